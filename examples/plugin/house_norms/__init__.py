"""A norm of our own."""
