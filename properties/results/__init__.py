"""What a run found: plain records, and the JSON that they become."""
