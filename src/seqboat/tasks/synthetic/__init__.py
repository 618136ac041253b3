"""Tasks whose examples are made from a seed."""
