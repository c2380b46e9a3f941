"""Describes how `mtmd serve` is started: what the server's own settings (`web/settings.py`) do not
say.
"""

from __future__ import annotations

from dataclasses import dataclass

from mtmd.base.options import FLAG, Kind, as_given, check_options, one_of, option, path, several


@dataclass(frozen=True)
class ServeOptions:
    """Raises OptionError naming the field, what was found and what is expected."""

    models: tuple[str, ...] = option(
        (),
        several("WHICH"),
        "serve several models, each loaded when a request names it: a folder of checkpoints and "
        "GGUF files, models as -m takes them, with commas between them, or cache for all that were "
        "fetched; may be repeated. -m NAME is then loaded at once",
        group="several models",
    )
    models_max: int | None = option(
        None,
        Kind(lambda _, value: value, parse=int, metavar="N"),
        "models in memory at once",
        default="as many as fit",
        group="several models",
    )
    unload_after: float | None = option(
        None,
        Kind(lambda _, value: value, parse=float, metavar="SECONDS"),
        "unload a model that was not used for so long",
        default="only to make room",
        group="several models",
    )
    presets: str | None = option(
        None,
        path(),
        "JSON: system prompt, sampling, aliases and options of loading by model",
        default="presets.json in the folder of --models",
        group="several models",
    )
    data: str | None = option(
        None,
        path("DIR"),
        "folder of conversations and their pictures",
        default="in the user's data folder",
    )
    no_history: bool = option(False, FLAG, "keep no conversations on disk")
    engine_process: bool | None = option(
        None, FLAG, "does nothing any more: each model has a process of its own"
    )
    on_engine_failure: str = option(
        "restart",
        one_of("restart", "exit"),
        "when a model's process crashes or hangs: restart starts it again while other models "
        "answer; exit ends the server with exit code 70, for a supervisor",
    )
    no_warmup: bool = option(False, FLAG, "begin at once; the first answer then takes longer")
    access_log: bool = option(
        False, FLAG, "write a line for each request to stderr", group="access"
    )
    log_level: str = option(
        "warning", one_of("error", "warning", "info"), "what else is written there", group="access"
    )
    log_format: str = option(
        "text", one_of("text", "json"), "lines of text, or one JSON object a line", group="access"
    )
    ray: str | None = option(
        None,
        as_given("ADDRESS"),
        "by replicas of this server that Ray Serve runs: on a Ray cluster that is started for this "
        "command (local), the one this machine belongs to (auto) or HOST:PORT of its head",
        group="on many machines",
    )
    replicas: str | None = option(
        None,
        as_given("MIN[:MAX]"),
        "how many; up to MAX where more is asked than MIN can answer",
        default="as many as fit",
        group="on many machines",
    )
    no_affinity: bool = option(
        False,
        FLAG,
        "send requests to the replica that is least busy, and not to the one that knows their "
        "picture or the beginning of their prompt",
        group="on many machines",
    )

    def __post_init__(self) -> None:
        check_options(self)
