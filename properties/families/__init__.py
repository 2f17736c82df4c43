"""The catalogue: one file a family; a property is added by one decorated function in the file of its family."""
