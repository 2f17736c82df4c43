"""Training somebody's own model, loss and data: one seed after the other, or stacked where that gives the same."""
