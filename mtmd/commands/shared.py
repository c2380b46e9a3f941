"""Options that several commands have."""
from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from typing import Any

# Below this, products are too small to share between threads: on a busy machine waiting for each other takes most of the time.
SMALL_BYTES = 64 << 20


MODEL_HELP = "a checkpoint folder, a GGUF file, or org/name or org/name:Q4_K_M on the Hugging Face hub"


def add_model_arguments(sub: argparse.ArgumentParser, model: bool = True) -> None:
    """All of `LoadOptions`, and, with `model`, which model."""
    group = sub.add_argument_group("model and device")
    if model:
        group.add_argument("-m", "--model", metavar="MODEL", help=f"{MODEL_HELP} (default: the demo model)")
    group.add_argument("--mmproj", metavar="FILE", help="the projector of a GGUF (default: the one beside it)")
    group.add_argument("--chat-template", metavar="FILE", help="a Jinja chat template to use in place of the model's own")
    group.add_argument("--device", metavar="DEVICE", default="auto", help="auto, cpu, cuda or cuda:N (default: auto)")
    group.add_argument("--dtype", metavar="TYPE", default="auto", help="auto, bf16 or fp32 (default: auto)")
    group.add_argument("--flash-attn", metavar="WHEN", default="auto", help="auto, on or off (default: auto)")
    group.add_argument("--override-tensor", action="append", default=[], metavar="RE=DEVICE",
                       help="run nodes whose name, or weight's name, matches RE on DEVICE; may be repeated")
    group.add_argument("--refuse", action="append", default=[], metavar="RULE",
                       help="plan as if the device did not support OP, OP:head=72, OP:batch>1, OP:bf16 or OP:/NAME REGEX/; may be repeated")
    group.add_argument("--image-min-tokens", type=int, metavar="N", help="least tokens of one picture (default: the model's)")
    group.add_argument("--image-max-tokens", type=int, metavar="N", help="most tokens of one picture (default: the model's)")
    group.add_argument("--threads", type=int, metavar="N", help="CPU threads (default: torch's choice, 1 for a very small model)")
    group.add_argument("--context", type=int, metavar="N",
                       help="longest sequence in tokens, answer included (default: the model's, at most 8192)")


def load_from(args: argparse.Namespace) -> Any:
    """The model the options name. Raises MtmdError; for an option out of its range at once, before torch is imported."""
    import sys

    from mtmd.config import LoadOptions, options
    chosen = {f.name: getattr(args, f.name) for f in dataclasses.fields(LoadOptions) if hasattr(args, f.name)}
    options(LoadOptions, chosen)
    from mtmd.loading import load
    model = load(args.model, progress=sys.stderr.isatty(), **chosen)
    settle_threads(args.threads, [model])
    return model


def settle_threads(asked: int | None, models: Sequence[Any]) -> None:
    """One thread for very small models, unless a number was asked for."""
    from mtmd.device import set_threads
    if asked is None and all(model.checkpoint.weight_bytes < SMALL_BYTES for model in models):
        set_threads(1)
