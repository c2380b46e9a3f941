"""`mtmd pull org/name[:TYPE]`: a model fetched ahead of its use, its checksums compared."""

from __future__ import annotations

import argparse
import sys

from mtmd.base.text import for_terminal, plural

HELP = "Download a model from the Hugging Face hub, and verify its checksums."
EXAMPLES = """\
mtmd pull org/name                          # safetensors, as transformers has them
mtmd pull org/name:Q4_K_M                   # a GGUF of that type, and its projector
mtmd pull org/name@v1.0                     # a branch, tag or commit"""


def add_arguments(sub: argparse.ArgumentParser) -> None:
    sub.add_argument(
        "models",
        nargs="+",
        metavar="MODEL",
        help="org/name on the Hugging Face hub, org/name:TYPE for a GGUF; either with @REVISION",
    )


def run(args: argparse.Namespace) -> int:
    from mtmd.checkpoint.pull import pull, size_text

    for model in args.models:
        pulled = pull(model, sys.stderr.isatty())
        new = "already here" if not pulled.fetched else f"{size_text(pulled.fetched)} fetched"
        checked = (
            f"no checksum for {', '.join(pulled.unchecked)}"
            if pulled.unchecked
            else "checksums right"
        )
        files = plural(pulled.files, "file")
        print(for_terminal(f"{model}: {size_text(pulled.bytes)} in {files}, {new}, {checked}"))
    print(for_terminal(f"mtmd describe photo.jpg -m {args.models[-1]}"))
    return 0
