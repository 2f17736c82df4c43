"""Proof that a run can fail: faults put into the subject itself, and known-broken models."""
