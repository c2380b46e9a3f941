"""Norms, alone and with what stands before them."""
