"""What users put in front of their functions."""
