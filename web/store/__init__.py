"""Conversations in SQLite, their pictures as files; damaged databases recovered, backups,
checks.
"""
