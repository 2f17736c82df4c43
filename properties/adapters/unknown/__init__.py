"""Somebody's own classes: how they are called and what comes back, by names and then by trying."""
