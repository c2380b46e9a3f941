"""The server: the application, keys, headers, metrics; the web server (`server.py`): gevent's, with
an end to every stage of a request (`connection.py`), and native threads for what takes long
(`native_threads.py`).
"""
