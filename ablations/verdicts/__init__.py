"""From finished trials to the record of a run: a verdict and a cost for each row, and what became of predictions."""
