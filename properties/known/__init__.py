"""Known deviations: the files that are shipped, one a library, and how such files are read, applied and edited."""
