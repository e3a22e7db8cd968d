"""All that exists only for speed."""
