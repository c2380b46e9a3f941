"""`mtmd rm org/name[:TYPE]`: a model taken out of the cache."""

from __future__ import annotations

import argparse
import sys

from mtmd.base.errors import OptionError
from mtmd.base.text import for_terminal
from mtmd.commands.completion import offers_models

HELP = "Delete downloaded models."
EXAMPLES = """\
mtmd rm org/name                            # asks first
mtmd rm org/name:Q4_K_M --yes               # one of several GGUFs in a repository"""


def add_arguments(sub: argparse.ArgumentParser) -> None:
    models = sub.add_argument(
        "models",
        nargs="+",
        metavar="MODEL",
        help="a name that `mtmd list` shows; org/name@REVISION for one commit",
    )
    offers_models(models)
    sub.add_argument("-y", "--yes", action="store_true", help="do not ask")


def run(args: argparse.Namespace) -> int:
    """1 where who was asked said no."""
    from mtmd.checkpoint.cached_models import plan_removal
    from mtmd.checkpoint.hub import is_demo
    from mtmd.checkpoint.pull import size_text

    if any(map(is_demo, args.models)):
        raise OptionError("the demo model is part of the package, and stays")
    plans = [plan_removal(model) for model in args.models]
    if not args.yes:
        if not sys.stdin.isatty():
            raise OptionError("found no terminal to ask at, expected one, or --yes")
        total = size_text(sum(plan.bytes for plan in plans))
        names = ", ".join(plan.name for plan in plans)
        if input(for_terminal(f"remove {names} ({total})? [y/N] ")).strip().lower() not in (
            "y",
            "yes",
        ):
            print("nothing was removed")
            return 1
    for plan in plans:
        plan.execute()
        print(for_terminal(f"removed {plan.name}, {size_text(plan.bytes)}"))
    return 0
