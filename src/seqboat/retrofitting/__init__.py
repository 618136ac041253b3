"""Sparse activation for the modules of an existing model."""
