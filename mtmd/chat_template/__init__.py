"""Chat templates from the internet, in a sandbox with limits."""
