"""Decoding with folded or rounded weights: few operations and little memory per token."""
