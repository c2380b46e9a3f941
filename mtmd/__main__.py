"""The `mtmd` command, which `python -m mtmd` is, too. It is light: a Ctrl-C that comes while the
command itself is imported finds somebody who takes it.
"""

from __future__ import annotations

import sys


def main() -> int:
    """As `mtmd.cli.main`, with the arguments of the process."""
    try:
        from mtmd.cli import main as command

        return command()
    except KeyboardInterrupt:
        print("mtmd: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
