"""What flows inside a running model, told by the numbers themselves: its products, attentions, norms and sums."""
