"""Products with block-quantized weights."""
