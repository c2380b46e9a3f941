"""Encoders and decoders of transformers' `vision-encoder-decoder`: TrOCR and Donut."""
