"""One property and one case of it: what a property is, drawing, calling, comparing, and the search for a violation."""
