"""What stands in another's place: rows, tokens, positions and masks of one sample that another one gets."""
