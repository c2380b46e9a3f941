"""Requests of any interface answered: the request in no interface's form (`request.py`), what is
done with it (`answer.py`), answers awaited and sent (`response_streams.py`).
"""
