"""Studies that train nothing: time, memory and FLOPs against size, and what untrained models say already."""
