"""Raw files in, memory-mapped arrays out."""
