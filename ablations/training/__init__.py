"""How the seeds of a trial are trained together, what is watched on the way, and what is written down of each."""
