"""Attention layers: the Transformer and its long-sequence relatives."""
