"""The `mtmd` command, which `python -m mtmd` is, too. It is light: a Ctrl-C that comes while the
command itself is imported finds somebody who takes it.
"""

from __future__ import annotations

import os
import sys

IN_PROCESS = ("--models", "--no-engine-process", "--ray")  # models of other processes alone


def main() -> int:
    """As `mtmd.cli.main`, with the arguments of the process."""
    if sys.argv[1:2] == ["serve"] and _computes_elsewhere(sys.argv[2:]):
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
    from gevent.monkey import patch_all

    patch_all(os=False, signal=False, subprocess=False)


def _computes_elsewhere(words: list[str]) -> bool:
    """Return whether `serve` has no model in its own process: then its threads can be gevent's."""
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else 1
    return cores > 1 and not any(word.partition("=")[0] in IN_PROCESS for word in words)


if __name__ == "__main__":
    sys.exit(main())
