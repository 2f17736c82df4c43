"""Probes that find no fact and ask: what may be a defect or the design, by a whole sequence or by the code."""
