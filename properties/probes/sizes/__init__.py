"""The sizes that a model takes, and those that it has of its own."""
