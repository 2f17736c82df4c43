"""What is trained, and what is taken out of it: a trial, its recipe, its model and the edits to that."""
