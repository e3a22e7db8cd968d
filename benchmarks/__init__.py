"""What stampede_guard costs, measured beside every peer, each family of rows in one run."""
