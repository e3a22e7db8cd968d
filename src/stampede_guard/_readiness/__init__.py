"""Whether a process is ready for traffic, and how it gets ready."""
