"""What textbooks say of Transformers, each statement tested: the claims ledger."""
