"""Tools that a model may call: their syntax read from the chat template, enforced by a grammar,
read back.
"""
