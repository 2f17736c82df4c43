"""Masks of somebody's model: which it takes, in which form, and padding that it reads off its tokens."""
