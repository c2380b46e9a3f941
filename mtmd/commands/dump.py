"""`mtmd dump IMAGE -p PROMPT`: every node of a run, so that a divergence can be found node by node."""
from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from mtmd.commands.shared import add_model_arguments, load_from
from mtmd.kernels.errors import OptionError

HELP = "Print every node of an encode and prefill: name, op, shape, device, sum, first and last values."


def add_arguments(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("images", nargs="*", metavar="IMAGE")
    sub.add_argument("-p", "--prompt", default="Describe the image.", help="what to ask (default: %(default)s)")
    sub.add_argument("--filter", metavar="RE", help="only nodes whose name matches")
    sub.add_argument("--json", action="store_true", help="print a JSON list, as --compare reads it")
    sub.add_argument("--compare", type=Path, metavar="OTHER.json", help="name the first node that differs from a dump made with --json")
    sub.add_argument("--tolerance", type=float, default=1e-3, metavar="X", help="relative difference that counts (default: %(default)g)")
    add_model_arguments(sub)


def run(args: argparse.Namespace) -> int:
    from mtmd.dumping import Row, compare, pattern, record
    from mtmd.model import user_message
    wanted = pattern(args.filter)
    other = _read(args.compare) if args.compare else None
    rows = record(load_from(args), [user_message(args.images, args.prompt)], wanted)
    if not rows:
        raise OptionError(f"filter {args.filter!r} matches no node")
    if other is not None:
        found = compare(rows, [Row(**r) for r in other], args.tolerance)
        print(found.text)
        return 0 if found.same else 1
    if args.json:
        print(json.dumps([r.asdict() for r in rows]))
    else:
        for row in rows:
            print(row)
    return 0


def _read(path: Path) -> list[dict[str, Any]]:
    from mtmd.dumping import FIELDS
    try:
        rows = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not JSON"
        raise OptionError(f"{path}: cannot be read ({reason}); expected the output of `mtmd dump --json`") from error
    if not isinstance(rows, list) or not all(isinstance(r, dict) and set(r) == FIELDS for r in rows):
        raise OptionError(f"{path}: expected the output of `mtmd dump --json`")
    return rows


