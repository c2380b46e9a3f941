"""Audio: files and arrays into samples at a model's rate, and how families take them."""
