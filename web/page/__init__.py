"""The chat page and the diagnostics page: answers while they are written, a branch as turns."""
