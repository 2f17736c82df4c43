"""Systems that the notes describe and that are no part of a Transformer: what attention is compared with."""
