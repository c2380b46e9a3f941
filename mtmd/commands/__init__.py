"""The command line: one verb a file; `arguments.py` makes arguments of declared options,
`shared.py` has what several commands do.
"""
