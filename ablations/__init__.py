"""What each part of a Transformer buys: trials, studies, statistics."""
