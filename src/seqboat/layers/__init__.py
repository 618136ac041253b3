"""Sparse modular activation and the SeqBoat layer."""
