"""BLIP's captions, BLIP-2 and InstructBLIP."""
