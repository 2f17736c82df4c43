"""What is wrong with a gradient: the cut that is undone, the term that is missing, the backward written by hand."""
