"""Sparse activation for modules of a model that exists already."""
