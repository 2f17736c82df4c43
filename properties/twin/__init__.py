"""The twin of a model: the reference Transformer of the same configuration, with the model's own weights."""
