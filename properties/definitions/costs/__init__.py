"""What a model costs by its sizes: parameters and multiplications; and what its matrices are, told by their shapes."""
