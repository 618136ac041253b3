"""Commands about the machine that models run on."""
