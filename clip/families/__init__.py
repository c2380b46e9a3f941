"""Vision families: one model architecture a file, or a folder where one file would be long."""
