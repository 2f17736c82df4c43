"""Wrong formulas of losses, and which of them gives a subject's numbers."""
