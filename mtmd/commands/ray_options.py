"""The options of `mtmd serve` on many machines, and which of the others go with them."""

from __future__ import annotations

import argparse
import re

from mtmd.base.errors import OptionError
from mtmd.commands.arguments import defaults_in
from mtmd.options.serve import ServeOptions

REPLICAS_MAX = 1000
OWN = ("replicas", "no_affinity")  # options that only --ray has
_ONE_MODEL = "serve one model, by -m"
_NO_HISTORY = "several servers keep no conversations"
_PROXY = "Ray Serve's proxy accepts connections; limit them in front of it"
OF_ONE_SERVER = {  # options that mean something for one server only, and why
    **dict.fromkeys(("models", "models_max", "unload_after", "presets"), _ONE_MODEL),
    "on_engine_failure": "Ray replaces a replica whose model's process fails",
    **dict.fromkeys(("data", "max_storage", "no_history"), _NO_HISTORY),
    **dict.fromkeys(("max_connections", "max_connections_per_address"), _PROXY),
    "api_key": "put keys into a file that every machine has (--api-key-file), or into "
    "MTMD_API_KEYS of each",
}


def check_ray_options(args: argparse.Namespace) -> bool:
    """Return whether the server is to be one of several, by Ray. Raises OptionError for options
    that would do nothing.
    """
    if args.ray is None:
        for name in OWN:
            if getattr(args, name):
                raise OptionError(
                    f"--{name.replace('_', '-')}: found without --ray; add --ray, or leave it out"
                )
        return False
    from mtmd.web.settings import ConnectionLimits, ServerSettings

    usual = defaults_in(ServeOptions, ServerSettings, ConnectionLimits)
    for name, advice in OF_ONE_SERVER.items():
        result = getattr(args, name)
        if result != usual[name]:
            raise OptionError(f"--{name.replace('_', '-')}: found with --ray; {advice}")
    if str(args.host).startswith("unix:"):
        raise OptionError(
            "--host: found a socket in a file beside --ray; Ray Serve's proxy listens at an address"
        )
    replicas(args.replicas)
    return True


def replicas(text: str | None) -> tuple[int, int] | None:
    """Return both numbers of MIN[:MAX], None for no text. Raises OptionError."""
    if text is None:
        return None
    result = re.fullmatch(r"([0-9]{1,6})(?::([0-9]{1,6}))?", text)
    low = int(result[1]) if result else 0
    high = int(result[2] or low) if result else 0
    if not 1 <= low <= high <= REPLICAS_MAX:
        raise OptionError(
            f"replicas: found {text!r:.40}, expected MIN or MIN:MAX of 1 to {REPLICAS_MAX:,}"
        )
    return low, high
