"""`mtmd list`: the models that are here."""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict

from mtmd.base.text import for_terminal

HELP = "List the models on this machine, including those of Ollama and LM Studio, with their sizes."
EXAMPLES = """\
mtmd list
mtmd list --json"""
DAY = 86_400.0


def add_arguments(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--json", action="store_true", help="print a JSON list")


def run(args: argparse.Namespace) -> int:
    from pathlib import Path

    import mtmd.demo_model
    from mtmd.checkpoint.cached_models import CachedModel, in_other_stores, read_cache
    from mtmd.checkpoint.hub import DEMO
    from mtmd.checkpoint.pull import size_text

    cache = read_cache()
    result = (*cache.models, *in_other_stores())
    if args.json:
        print(json.dumps([asdict(model) for model in result]))
        return 0
    folder = Path(mtmd.demo_model.__path__[0])
    size = sum(f.stat().st_size for f in folder.iterdir() if f.is_file())
    demo = CachedModel(DEMO, "part of the package", size, 0.0, True)
    models = (demo, *result)
    longest = max(len(model.name) for model in models)
    print(f"{'model':<{longest}}  {'size':>7}  {'last used':>10}  kind")
    for model in models:
        used = _ago(time.time() - model.last_used) if model.last_used else "-"
        kind = model.kind if model.whole else f"{model.kind}, not complete: pull it again"
        line = f"{model.name:<{longest}}  {size_text(model.bytes):>7}  {used:>10}  {kind}"
        print(for_terminal(line.rstrip()))
    if cache.others:
        print(
            for_terminal(
                f"and {len(cache.others)} in the cache that mtmd does not read: "
                f"{', '.join(cache.others)}"
            )
        )
    return 0


def _ago(seconds: float) -> str:
    days = int(seconds // DAY)
    return "today" if days < 1 else "yesterday" if days == 1 else f"{days} days"
