"""Programs compiled before a launch needs them: where operands lie, many at once, saved and
checked, counted.
"""
