"""What several adapters share: usual ways to call a model, JAX functions as modules, small configurations."""
