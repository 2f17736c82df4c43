"""Where in a subject's own code runs part: the module, the line, the number."""
