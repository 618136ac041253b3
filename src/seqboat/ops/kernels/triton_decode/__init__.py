"""A step of decoding: one token through a whole SeqBoat layer, in a few kernels that never ask the host."""
