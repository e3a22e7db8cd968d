"""L2 as the guard uses it, above any store."""
