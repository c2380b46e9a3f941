"""`mtmd convert MODEL OUT --to TYPE`: a model written in another format or type."""

from __future__ import annotations

import argparse
import sys
import time

from mtmd.base.text import for_terminal
from mtmd.commands.arguments import add_options
from mtmd.kernels.checkpoint.mixtures import MIXTURES
from mtmd.options.load import LoadOptions

HELP = "Write a model as GGUF files that llama.cpp reads, or as safetensors in FP8."
EXAMPLES = """\
mtmd convert org/name model.gguf --to Q4_K_M        # and mmproj-model.gguf for its encoder
mtmd convert folder model.gguf --to Q4_K_M --imatrix imatrix.gguf
mtmd convert model-BF16.gguf model-Q8_0.gguf --to Q8_0 --text-only
mtmd convert org/name folder --to FP8               # safetensors, blocks of 128 x 128"""


def add_arguments(sub: argparse.ArgumentParser) -> None:
    from mtmd.commands.shared import MODEL_HELP

    sub.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    sub.add_argument(
        "out", metavar="OUT", help="the decoder's file, ending in .gguf; a folder with --to FP8"
    )
    sub.add_argument(
        "--to",
        metavar="TYPE",
        required=True,
        help=f"the type of the decoder's weights: {', '.join(MIXTURES)}",
    )
    sub.add_argument(
        "--mmproj-to",
        metavar="TYPE",
        help="the type of the encoder's weights, one of the same (default: as stored)",
    )
    sub.add_argument("--text-only", action="store_true", help="write the decoder only")
    add_options(sub, LoadOptions, ("mmproj",))
    sub.add_argument(
        "--imatrix",
        metavar="FILE",
        help="importance matrix, as llama.cpp's llama-imatrix writes it (.gguf or .dat)",
    )


def run(args: argparse.Namespace) -> int:
    from mtmd.convert.convert import convert
    from mtmd.terminal.status_line import Status

    status, began = Status(), time.monotonic()

    def show(name: str, done: int, total: int) -> None:
        status.say(f"{done >> 20:,} of {total >> 20:,} MiB written ({name})")

    try:
        written = convert(
            args.model,
            args.out,
            to=args.to,
            mmproj_to=args.mmproj_to,
            mmproj=args.mmproj,
            imatrix=args.imatrix,
            text_only=args.text_only,
            progress=show if sys.stderr.isatty() else None,
        )
    finally:
        status.clear()
    for file in written:
        lost = (
            ""
            if file.nmse is None
            else (f"; weights that were quantized before lost an NMSE of {file.nmse:.2g} more")
        )
        left_out = file.left_out and f"; {file.left_out}"
        print(for_terminal(f"{file.path}: {file.kind}, {file.bytes >> 20:,} MiB{lost}{left_out}"))
    print(for_terminal(f"{time.monotonic() - began:.0f} s"), file=sys.stderr)
    return 0
