"""The Redis driver."""
