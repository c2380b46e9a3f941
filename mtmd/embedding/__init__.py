"""Models that give vectors or scores, loaded; vectors on disk."""
