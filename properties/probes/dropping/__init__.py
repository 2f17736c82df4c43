"""Dropouts that act: where, at which rates, on what, and by which factor on what is kept."""
