"""The process's environment: variables, the user's folders, launchers. No other file reads it."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

from mtmd.base.errors import OptionError


def data_folder() -> Path:
    """Return where this user's conversations are kept, as the system has it (XDG base directories
    on Linux). Raises OptionError for a user who has no home.
    """
    try:
        return _data_folder()
    except RuntimeError as error:  # a number alone, as containers are run with
        raise OptionError(
            "found no home folder of this user, expected one; set HOME, or give --data DIR, or "
            "--no-history"
        ) from error


def _data_folder() -> Path:
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA")
        return Path(base or Path.home() / "AppData" / "Local") / "mtmd"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Application Support" / "mtmd"
    base = os.environ.get("XDG_DATA_HOME", "")
    return (Path(base) if base.startswith("/") else Path.home() / ".local" / "share") / "mtmd"


def ollama_folder() -> Path | None:
    """Return where OLLAMA_MODELS says that Ollama keeps models."""
    given = os.environ.get("OLLAMA_MODELS")
    return Path(given).expanduser() if given else None


def api_keys_from_environment() -> list[str]:
    """Entries of MTMD_API_KEYS, which stand apart by commas or white space: each KEY or
    NAME:KEY.
    """
    return os.environ.get("MTMD_API_KEYS", "").replace(",", " ").split()


def notify_socket() -> str | None:
    """Return where systemd listens that has started this process; a name in memory begins with a
    NUL.
    """
    address = os.environ.get("NOTIFY_SOCKET", "")
    return f"\0{address[1:]}" if address.startswith("@") else address or None


def needs_style() -> bool:
    """Return whether a terminal may be given bold and dim letters (no-color.org)."""
    return not os.environ.get("NO_COLOR") and os.environ.get("TERM", "dumb") != "dumb"


def kernels_from_environment() -> str | None:
    """The folder of compiled GPU programs that MTMD_KERNELS names."""
    return os.environ.get("MTMD_KERNELS") or None


@dataclass(frozen=True)
class Launched:
    """Describes what a launcher (torchrun) says of the processes it has started: which this is, of
    how many, and where the first one is.
    """

    rank: int
    size: int
    address: str
    port: int


def launcher(tp: int) -> Launched | None:
    """None where nobody has started several. Raises OptionError where that is not one for each of
    `tp` ranks.
    """
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    values = [os.environ.get(name) for name in names]
    if tp == 1 or any(v is None for v in values):
        return None
    rank, size, port = (int(v) if v and v.isdecimal() else -1 for v in (*values[:2], values[3]))
    if size != tp or not 0 <= rank < size or port < 0:
        raise OptionError(
            f"tp: found {tp}, expected {size}, as many as processes were started (WORLD_SIZE)"
        )
    return Launched(rank, size, str(values[2]), port)


def stay_on_this_machine() -> None:
    """Keep ranks on this machine: gloo would ask for the machine's name, which may be no address of
    it.
    """
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")


def keep_ray_quiet() -> None:
    """Before Ray is imported: it reports nothing to its makers, and leaves the GPUs that actors
    without one see as they are, which it will do by itself and warns of.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")


def guard_own_ray() -> None:
    """Guard a Ray that is started for this process only: who does not know its token has nothing
    done by it. Without one given, Ray would leave a token of its own in the user's folder, and
    every later cluster of theirs would ask for it.
    """
    import secrets

    if not any(name.startswith("RAY_AUTH_") for name in os.environ):
        os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(32))


def tokenize_in_own_thread() -> None:
    """Tokenize in the caller's thread, for a server: one text at a time gains nothing by the
    threads that the tokenizers library would start.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
