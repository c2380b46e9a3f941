"""Machine code for many rows at once, between torch's operators and on torch's threads."""
