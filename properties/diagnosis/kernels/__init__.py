"""Where a hand-written kernel of attention goes wrong: at which length, in which tile, by how many bits."""
