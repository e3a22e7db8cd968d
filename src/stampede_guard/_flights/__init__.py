"""Loads that run, and the callers that wait for them."""
