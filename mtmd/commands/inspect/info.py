"""`mtmd info MODEL`: what a model is and what it takes, without running it."""

from __future__ import annotations

import argparse
import json

from mtmd.commands.shared import add_model_arguments, add_model_named, load_from
from mtmd.terminal.wrap import wrapped

HELP = (
    "Show a model's families, sizes, types, tokens per image and memory from the headers of its"
    " files; nothing is run."
)
EXAMPLES = """\
mtmd info                                   # the demo model
mtmd info org/name:Q4_K_M --context 4096
mtmd info path/to/checkpoint --json"""

SHORT = (
    *("--model", "--json", "--context", "--device", "--dtype"),
    *("--mmproj", "--chat-template", "--image-max-tokens", "--threads"),
)


def add_arguments(sub: argparse.ArgumentParser) -> None:
    add_model_named(sub)
    sub.add_argument("--json", action="store_true", help="print one JSON object")
    add_model_arguments(sub, model=False)


def run(args: argparse.Namespace) -> int:
    model = load_from(args, answers=False)
    from mtmd.inspect.info import model_info
    from mtmd.inspect.info_text import render

    info = model_info(model)
    print(json.dumps(info.asdict()) if args.json else wrapped(render(info), indent="  "))
    return 0
