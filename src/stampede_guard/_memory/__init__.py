"""L1: the memory of one process."""
