"""Answers in a notebook; boxes and points read from their text."""
