"""What stampede_guard costs, measured beside comparable packages."""
