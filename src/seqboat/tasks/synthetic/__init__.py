"""Tasks with generated data."""
