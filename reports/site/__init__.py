"""Pages of the documentation that are made of records: properties, kinds, facts, outcomes, studies, the gallery."""
