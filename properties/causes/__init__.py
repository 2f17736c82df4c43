"""Why a property does not hold: measured on the smallest case, named only where the measurement tells."""
