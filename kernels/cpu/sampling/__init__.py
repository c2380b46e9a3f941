"""Sampling by machine code: the next token of a row of logits."""
