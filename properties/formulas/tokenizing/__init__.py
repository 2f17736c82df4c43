"""Slips of tokenizers: what a wrong rule of merging, or of cutting words into pieces, gives."""
