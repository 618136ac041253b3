"""Layers whose state is a matrix per head, with decays that depend on the input, and their hybrid with attention."""
