"""Slips that are undone one at a time, call by call, until the property holds: what mends it is what was wrong."""
