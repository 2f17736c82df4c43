"""One subject made ready to be called: models built and re-drawn, calls guarded, its rounding noise measured."""
