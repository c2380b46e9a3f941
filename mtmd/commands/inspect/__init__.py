"""The commands `info`, `compare`, `dump`, `fit` and `bench`."""
