"""The service in a process of its own: its client in the server, the process, messages between the
two.
"""
