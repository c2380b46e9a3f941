"""Worker processes with limits of memory and time, for what libraries do with hostile input."""
