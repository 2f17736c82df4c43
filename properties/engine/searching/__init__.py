"""The search for a failing case: swept lengths, drawn cases, far lengths, and shrinking; the same for the same seed."""
