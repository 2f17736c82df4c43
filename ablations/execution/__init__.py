"""From studies to finished trials on disk: which jobs there are, where they run, what a worker does, what is kept."""
