"""What is right by definition: closed forms, slow float64 oracles, and bounds on what rounding may do to them."""
