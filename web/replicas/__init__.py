"""The command `mtmd serve --ray`: what requests have in common (`affinity.py`), which replica they
go to (`choice.py`), what clients reach (`front.py`), the server in an actor (`replica.py`), Ray's
side (`router.py`, `application.py`, `command.py`).
"""
