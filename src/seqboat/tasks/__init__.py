"""Tasks: one file each, which reads the published file format or makes the data itself."""
