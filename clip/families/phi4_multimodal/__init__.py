"""Phi-4-multimodal: pictures and audio beside the decoder of Phi-4-mini."""
