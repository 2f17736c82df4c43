"""Wrong formulas of small kinds that have been seen, and which of them gives a subject's numbers."""
