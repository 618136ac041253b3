"""Device kernels of the heavy operations, and the registry that chooses among them."""
