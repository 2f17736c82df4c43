"""What may be said of numbers: intervals and tests of paired seeds, and power laws fitted to points."""
