"""State-space kernels and the layers around them."""
