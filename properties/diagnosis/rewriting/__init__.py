"""Small changes of the subject's own source, one at a time: what a slip of the pen may have been."""
