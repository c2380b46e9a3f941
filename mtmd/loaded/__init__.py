"""A model in memory: device, number type, the thread that owns the device, what fits in memory."""
