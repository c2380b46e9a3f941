"""The options of `mtmd serve` on many machines, and which of the others go with them."""

from __future__ import annotations

import argparse
import re

from mtmd.base.errors import OptionError

MOST_REPLICAS = 1000
OWN = ("replicas", "no_affinity")  # options that only --ray has
OF_ONE_SERVER: dict[
    str, tuple[object, str]
] = {  # those that mean something for one server alone: what is usual, and why
    "models": ([], "serve one model, by -m"),
    "models_max": (None, "serve one model, by -m"),
    "unload_after": (None, "serve one model, by -m"),
    "presets": (None, "serve one model, by -m"),
    "engine_process": (None, "each replica is a process of its own; start more of them"),
    "data": (None, "several servers keep no conversations"),
    "max_storage": (16, "several servers keep no conversations"),
    "no_history": (False, "several servers keep no conversations"),
    "max_connections": (4096, "Ray Serve's proxy accepts connections; limit them in front of it"),
    "max_connections_per_address": (
        1024,
        "Ray Serve's proxy accepts connections; limit them in front of it",
    ),
    "api_key": (
        [],
        "put keys into a file that every machine has (--api-key-file), or into MTMD_API_KEYS of "
        "each",
    ),
}


def check_ray_options(args: argparse.Namespace) -> bool:
    """Whether the server is to be one of several, by Ray. Raises OptionError for options that
    would do nothing.
    """
    if args.ray is None:
        for name in OWN:
            if getattr(args, name):
                raise OptionError(
                    f"--{name.replace('_', '-')}: found without --ray, expected beside it; leave "
                    "it out, or say where Ray runs"
                )
        return False
    for name, (usual, advice) in OF_ONE_SERVER.items():
        found = getattr(args, name)
        if found != usual and found is not False:  # --no-engine-process asks for what is so
            raise OptionError(f"--{name.replace('_', '-')}: found beside --ray; {advice}")
    if str(args.host).startswith("unix:"):
        raise OptionError(
            "--host: found a socket in a file beside --ray; Ray Serve's proxy listens at an address"
        )
    replicas(args.replicas)
    return True


def replicas(text: str | None) -> tuple[int, int] | None:
    """The least and the most of MIN[:MAX], None where nothing is asked for. Raises OptionError."""
    if text is None:
        return None
    found = re.fullmatch(r"([0-9]{1,6})(?::([0-9]{1,6}))?", text)
    least = int(found[1]) if found else 0
    most = int(found[2] or least) if found else 0
    if not 1 <= least <= most <= MOST_REPLICAS:
        raise OptionError(
            f"replicas: found {text!r:.40}, expected MIN or MIN:MAX of 1 to {MOST_REPLICAS:,}"
        )
    return least, most
