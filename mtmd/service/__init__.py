"""The service: many requests at once over one model; what happens when its device fails."""
