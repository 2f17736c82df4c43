"""Somebody's own classes: how they are built from drawn sizes, by the names of what they take."""
