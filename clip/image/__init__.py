"""Files and arrays into upright RGB pixels (`decode.py`): formats and headers, modes, transparency,
resizing and normalisation, on the host and on a device, in workers.
"""
