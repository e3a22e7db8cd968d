"""What the processes of a cluster tell each other."""
