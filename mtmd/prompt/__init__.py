"""Messages and pictures into what the decoder reads; pictures and videos from files, data URLs and
the web.
"""
