"""What is wrong with an attention: where it is wrong, and the weights that it really uses there."""
