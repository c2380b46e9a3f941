"""Chat and answers in a terminal."""
