"""Everything that runs where the rows are."""
