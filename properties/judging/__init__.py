"""From a subject and the catalogue to a report: what applies, in which order, and what comes of it."""
