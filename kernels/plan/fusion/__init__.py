"""Rules by which a graph is rewritten for a device on which each launch counts."""
