"""From the smallest failing case to what a reader gets: the record, and a script that stands alone."""
