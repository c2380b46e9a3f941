"""Records of requests: the log, the metrics."""
