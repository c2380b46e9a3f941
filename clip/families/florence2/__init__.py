"""Florence-2."""
