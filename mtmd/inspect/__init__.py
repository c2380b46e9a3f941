"""Inspection of models: `info`, `dump`, `compare`, predictions for other GPUs."""
