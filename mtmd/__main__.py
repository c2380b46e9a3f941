"""The `mtmd` command, which `python -m mtmd` is, too. It is light: a Ctrl-C that comes while the
command itself is imported ends it at once.
"""

from __future__ import annotations

import sys

from mtmd.base.interrupts import end_at_interrupts

UNPATCHED = {"-h", "--help", "--help-all", "--ray"}  # options of `serve` that start no server here


def main() -> int:
    """Do what `mtmd.cli.main` does, with the arguments of the process."""
    end_at_interrupts()
    if sys.argv[1:2] == ["serve"] and not UNPATCHED & {w.partition("=")[0] for w in sys.argv[2:]}:
        patch()
    try:
        from mtmd.cli import main as command

        return command()
    except KeyboardInterrupt:
        print("mtmd: interrupted", file=sys.stderr)
        return 130


def patch() -> None:
    """Make threads, locks and sockets gevent's: before anything is imported that makes one. Not
    processes: gevent starts them by a fork that runs what is to be done after one, and greenlets
    with it, where Python's own runs nothing but the program.
    """
    from gevent.hub import Hub
    from gevent.monkey import patch_all

    patch_all(os=False, signal=False, subprocess=False)
    # A Ctrl-C that comes while all wait is raised in the hub, which would write a traceback of it.
    Hub.NOT_ERROR = (*Hub.NOT_ERROR, KeyboardInterrupt)


if __name__ == "__main__":
    sys.exit(main())
