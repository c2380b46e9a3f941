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
        "serve several models, each loaded when a request names it: a folder of checkpoints and"
        " GGUF files, models as -m takes them, separated by commas, or cache for all downloaded"
        " models; may be repeated. -m NAME is loaded at the start",
        group="several models",
    )
    models_max: int | None = option(
        None,
        Kind(lambda _, value: value, parse=int, metavar="N"),
        "max models in memory at once",
        default="as many as fit",
        group="several models",
    )
    unload_after: float | None = option(
        None,
        Kind(lambda _, value: value, parse=float, metavar="SECONDS"),
        "unload a model after this time without use",
        default="only to make room",
        group="several models",
    )
    presets: str | None = option(
        None,
        path(),
        "JSON file with system prompt, sampling, aliases and load options of each model",
        default="presets.json in the folder of --models",
        group="several models",
    )
    data: str | None = option(
        None,
        path("DIR"),
        "folder for conversations and their pictures",
        default="in the user's data folder",
    )
    no_history: bool = option(False, FLAG, "do not store conversations on disk")
    engine_process: bool | None = option(
        None, FLAG, "no effect: each model has a process of its own"
    )
    on_engine_failure: str = option(
        "restart",
        one_of("restart", "exit"),
        "when a model's process crashes or hangs: restart starts it again while other models "
        "answer; exit ends the server with exit code 70, for a supervisor",
    )
    no_warmup: bool = option(
        False, FLAG, "start without a warm-up; the first answer then takes longer"
    )
    access_log: bool = option(False, FLAG, "log a line for each request to stderr", group="access")
    log_level: str = option(
        "warning",
        one_of("error", "warning", "info"),
        "min level of other log lines",
        group="access",
    )
    log_format: str = option(
        "text",
        one_of("text", "json"),
        "format of log lines: text, or one JSON object per line",
        group="access",
    )
    ray: str | None = option(
        None,
        as_given("ADDRESS"),
        "serve with replicas that Ray Serve runs: on a Ray cluster started for this command "
        "(local), the one this machine belongs to (auto), or HOST:PORT of its head",
        group="on many machines",
    )
    replicas: str | None = option(
        None,
        as_given("MIN[:MAX]"),
        "number of replicas; up to MAX under load",
        default="as many as fit",
        group="on many machines",
    )
    no_affinity: bool = option(
        False,
        FLAG,
        "send requests to the least busy replica, rather than to the one that has cached their "
        "picture or the start of their prompt",
        group="on many machines",
    )

    def __post_init__(self) -> None:
        check_options(self)
