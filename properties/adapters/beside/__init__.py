"""What somebody's model has beside its forward: a loss, a generate, a cache; found by their names, then by trying."""
