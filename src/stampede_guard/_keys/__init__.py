"""Keys and tags: from a call's arguments to text."""
