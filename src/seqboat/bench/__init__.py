"""Time and memory of mixers."""
