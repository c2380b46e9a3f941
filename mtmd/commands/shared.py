"""Options that several commands have."""
from __future__ import annotations

import argparse
from typing import Any

# Below this, products are too small to share between threads: on a busy machine waiting for each other takes most of the time.
SMALL_BYTES = 64 << 20


def add_model_arguments(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("-m", "--model", metavar="MODEL",
                     help="a checkpoint folder, or org/name on the Hugging Face hub (default: the demo model)")
    sub.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N (default: auto)")
    sub.add_argument("--dtype", default="auto", help="auto, bf16 or fp32 (default: auto)")
    sub.add_argument("--flash-attn", default="auto", help="auto, on or off (default: auto)")
    sub.add_argument("--override-tensor", action="append", default=[], metavar="RE=DEVICE",
                     help="run nodes whose name, or weight's name, matches RE on DEVICE; may be repeated")
    sub.add_argument("--refuse", action="append", default=[], metavar="RULE",
                     help="plan as if the device did not support OP, OP:head=72, OP:batch>1, OP:bf16 or OP:/NAME REGEX/; may be repeated")
    sub.add_argument("--threads", type=int, metavar="N", help="CPU threads (default: torch's choice, 1 for a very small model)")
    sub.add_argument("--context", type=int, metavar="N",
                     help="longest sequence in tokens, answer included (default: the model's, at most 8192)")


def load_from(args: argparse.Namespace) -> Any:
    """The model the options name."""
    import sys

    from mtmd.model import load, set_threads
    model = load(args.model, progress=sys.stderr.isatty(), device=args.device, dtype=args.dtype, flash_attn=args.flash_attn,
                 override_tensor=args.override_tensor, refuse=args.refuse, threads=args.threads, context=args.context)
    if args.threads is None and model.checkpoint.weight_bytes < SMALL_BYTES:
        set_threads(1)
    return model
