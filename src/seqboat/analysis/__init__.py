"""What routers did and what attention saw."""
