"""A dual encoder loaded, its vectors on disk."""
