"""The table: what is left of a Transformer without each of its parts, at its best and at its worst over one sweep."""
