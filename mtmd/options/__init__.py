"""Options, each declared once (`load.py`, `answer.py`, `serve.py`; those of the server in
`web/settings.py`), and taken by name (`by_name.py`).
"""
