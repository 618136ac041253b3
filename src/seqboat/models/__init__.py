"""Whole models: a backbone of mixers, its heads, and the weights that come with the package."""
