"""Estimates of how long a plan would take on a card that is not here: cards as published, launches
and bytes counted, a roofline.
"""
