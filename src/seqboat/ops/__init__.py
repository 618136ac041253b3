"""Arithmetic on tensors: scans, attention on packed tokens, fused parts. Knows nothing of routing."""
