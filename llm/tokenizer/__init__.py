"""Text to tokens and back, from either format."""
