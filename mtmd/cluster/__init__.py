"""The command `mtmd batch --ray`: pictures numbered, files on any file system, which actor answers
what next (`schedule.py`), a run (`run.py`), its folder (`output.py`), Ray's actors and what each
does (`actors.py`, `worker.py`).
"""
