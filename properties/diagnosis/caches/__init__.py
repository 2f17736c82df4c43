"""Why decoding through a cache parts from the whole sequence."""
