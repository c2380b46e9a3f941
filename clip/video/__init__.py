"""Videos: which frames of a file a model sees, and when each of them is."""
