"""`mtmd serve --ray`: the application is deployed, watched, and taken away at the end."""

from __future__ import annotations

import argparse
import logging
import secrets
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from mtmd import DeviceError, OptionError
from mtmd.base.text import plural
from mtmd.cluster.connect import (
    LOCAL,
    PoolSize,
    check_address,
    connected,
    describe,
    import_ray,
    import_serve,
    nodes,
    pool_size,
)
from mtmd.cluster.locations import absolute
from mtmd.commands.arguments import options_in
from mtmd.commands.ray_options import replicas
from mtmd.options.by_name import options
from mtmd.options.load import LoadOptions
from mtmd.web.replicas.forwarded import LEAVING_S, NOT_STARTED, Serving, SettingsOf
from mtmd.web.server import bind
from mtmd.web.settings import ServerSettings
from mtmd.web.telemetry.systemd import notify_systemd

APP = "mtmd"
LOOK_S = 1.0  # between two looks at how it goes
ANSWER_S = 10.0
EVERYWHERE, SERVE_PORT = "0.0.0.0", 8000  # what Ray Serve's files mean where they say nothing
FILES = ("model", "mmproj", "chat_template", "kernels", "api_key_file", "media_path")
ENDING_S = 30.0  # beside the time for answers
TAKING_OVER = (
    "stopped waiting: Ray Serve continues to replace the application; the same command watches it, "
    "`serve shutdown` ends it"
)
EXITED = "the application has ended: it was deleted, or Ray Serve was shut down"


def run(args: argparse.Namespace, settings_of: SettingsOf, serving: Serving) -> int:
    """Until it is interrupted, or another command has taken the application over. Raises
    OptionError and DeviceError.
    """
    check_address(args.ray)
    settings = settings_of(args)
    _check_loading(args)
    serve = import_serve(args.ray)
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    if args.ray == LOCAL:
        with bind(settings) as sock:  # whether the port can be had, and which one 0 takes
            settings = replace(settings, port=sock.getsockname()[1])
    elif not settings.port:
        raise OptionError("port: found 0 on a cluster, expected a port, the same on every machine")
    print("loading", flush=True)
    with connected(args.ray) as ray, _reporting_errors():
        mine = secrets.token_hex(8)
        requested = _application(args, nodes(ray), settings, settings_of, serving, mine)
        serve.start(
            proxy_location="HeadOnly" if args.ray == LOCAL else "EveryNode",
            http_options={"host": settings.host, "port": settings.port},
            logging_config={"enable_access_log": False, "log_level": "WARNING"},
        )
        with _Stopping() as stopping:
            was_there = APP in serve.status().applications
            try:
                _deploy(serve, requested, settings, was_there)
                return _watch(serve, settings, mine, was_there, args.ray == LOCAL, stopping)
            except KeyboardInterrupt:
                if args.ray == LOCAL:  # Ray itself ends with this command
                    print("stopped", flush=True)
                elif was_there and not stopping.serving:
                    print(TAKING_OVER, flush=True)
                else:
                    wait = None if stopping.drain else settings.drain_s  # asked a second time
                    print(_take_away(serve, mine, was_there, wait), flush=True)
                return 0


def application_of(args: argparse.Namespace, settings_of: SettingsOf, serving: Serving) -> Any:
    """Return the application, for a cluster that deploys it, in a process that belongs to it. Where
    Ray Serve listens decides who can reach it: `args.host` and `args.port` become that, and are
    None or the same before. Raises OptionError.
    """
    _check_loading(args)
    ray = import_ray(args.ray)
    args.host, args.port = _as_served(args.host, args.port)
    settings = settings_of(args)
    return _application(args, nodes(ray), settings, settings_of, serving)


def _application(
    args: argparse.Namespace,
    there: list[dict[str, float]],
    settings: ServerSettings,
    settings_of: SettingsOf,
    serving: Serving,
    command: str = "",
) -> Any:
    from mtmd.web.replicas.application import Requested, application

    requested = replicas(args.replicas)
    chosen = pool_size(
        there, args.device, args.tp, requested[1] if requested else None, args.threads
    )
    minimum, maximum = requested or (chosen.actors, chosen.actors)
    everywhere = {
        name: absolute(value) if name in FILES else value for name, value in vars(args).items()
    }
    everywhere |= {"device": chosen.device, "threads": chosen.threads}
    if (now := room(there, chosen)) < minimum:
        gpus = f" and {plural(chosen.gpus, 'GPU')}" if chosen.gpus else ""
        needs = f"{plural(chosen.cpus, 'CPU')}{gpus}"
        print(
            f"resources for {now} of {minimum} replicas: each needs {needs}, "
            f"and there are {describe(there)}; the others start when machines join",
            flush=True,
        )
    needed = Requested(minimum, maximum, chosen, args.parallel, not args.no_affinity)
    return application(needed, everywhere, settings, settings_of, serving, command)


def room(there: Sequence[Mapping[str, float]], size: PoolSize) -> int:
    """Return how many replicas machines have room for."""
    return sum(
        min(
            int(node.get("CPU", 0)) // size.cpus,
            int(node.get("GPU", 0)) // size.gpus if size.gpus else sys.maxsize,
        )
        for node in there
    )


def _check_loading(args: argparse.Namespace) -> None:
    """Raises OptionError for wrong options before the cluster is used."""
    options(LoadOptions, options_in(args, LoadOptions))


def _deploy(serve: Any, requested: Any, settings: ServerSettings, was_there: bool) -> None:
    """Returns when every replica of the least number can answer. Raises OptionError with what a
    replica says of why it cannot start. What another command has deployed stays as far as it can
    still answer.
    """
    there = _http_options()
    if there is not None and there != (settings.host, settings.port):
        raise OptionError(
            f"port: Ray Serve runs on this cluster already, at {there[0]}:{there[1]}; give that "
            "with --host and --port, or run `serve shutdown` there first"
        )
    try:
        serve.run(requested, name=APP, route_prefix="/")
    except RuntimeError as error:
        reason = _reason(serve) or " ".join(str(error).split())[:300]
        if not was_there:
            serve.delete(APP, _blocking=False)
        raise OptionError(reason) from error


def _as_served(host: str | None, port: int | None) -> tuple[str, int]:
    """Return where Ray Serve listens, which is everywhere where it does not run yet. Raises
    OptionError where another address is asked for.
    """
    there = _http_options()
    if there is None:
        return EVERYWHERE, port or SERVE_PORT
    for name, requested, result in (("host", host, there[0]), ("port", port, there[1])):
        if requested is not None and requested != result:
            raise OptionError(
                f"{name}: found {requested} in `command`, but Ray Serve listens at "
                f"{there[0]}:{there[1]}; leave it out, and set it in `http_options`"
            )
    return there


def _http_options() -> tuple[str, int] | None:
    """Return where Ray Serve listens, also where it ran before; None where it does not run."""
    from ray.serve.context import _get_global_client
    from ray.serve.exceptions import RayServeException

    try:
        result = _get_global_client().http_config
    except RayServeException:
        return None
    return str(result.host), int(result.port)


def _reason(serve: Any) -> str:
    """Return why a replica could not start, "" where none has said so."""
    application = serve.status().applications.get(APP)
    messages = [] if application is None else [d.message for d in application.deployments.values()]
    _, _, why = "\n".join(messages).partition(NOT_STARTED)
    return why.partition("\n")[0].strip()


def _watch(
    serve: Any,
    settings: ServerSettings,
    mine: str,
    was_there: bool,
    alone: bool,
    stopping: _Stopping,
) -> int:
    """Tells how many replicas there are as it changes. `mine`: what this command calls itself."""
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    url = f"http://{host}:{settings.port}"
    print(f"serving at {url}, OpenAI's interface at {url}/v1; Ctrl-C stops", flush=True)
    notify_systemd("READY=1")
    stopping.serving, before = True, -1
    while True:
        if (ready := _ready(serve)) != before:
            before = ready
            print(f"{plural(ready, 'replica')} ready", flush=True)
            notify_systemd(f"STATUS=serving at {url}, {plural(ready, 'replica')} ready")
        if stopping.drain:
            notify_systemd("STOPPING=1")
            print("stopping: requests in progress are answered first", flush=True)
            print(_take_away(serve, mine, was_there, settings.drain_s), flush=True)
            return 0
        if not alone and APP not in serve.status().applications:
            raise DeviceError(f"ray: {EXITED}")
        if not alone and _whose(serve) not in (mine, None):
            print("another command has taken over the application, which continues", flush=True)
            return 0
        time.sleep(LOOK_S)


def _whose(serve: Any) -> str | None:
    """Return the name of the command that has deployed the application; None where no front is
    there to say it.
    """
    from ray.exceptions import RayError
    from ray.serve.exceptions import RayServeException

    try:
        return str(serve.get_app_handle(APP).command.remote().result(timeout_s=ANSWER_S))
    except (RayError, RayServeException, TimeoutError):
        return None


def _ready(serve: Any) -> int:
    from mtmd.web.replicas.application import REPLICAS

    application = serve.status().applications.get(APP)
    if application is None or REPLICAS not in application.deployments:
        return 0
    states: Mapping[Any, int] = application.deployments[REPLICAS].replica_states
    return next((n for state, n in states.items() if str(state).endswith("RUNNING")), 0)


def _take_away(serve: Any, mine: str, was_there: bool, drain_s: float | None) -> str:
    """Answers under way are written first, for which it waits, unless `drain_s` is None. What there
    is to tell of it. `was_there`: another command had deployed the application before.
    """
    if (there := serve.status().applications.get(APP)) is None:
        return "stopped"
    if not str(there.status).endswith("DELETING"):
        whose = _whose(serve)
        if whose is None and was_there:
            return (
                "stopped; no front says whose application Ray Serve runs, which goes on: "
                "`serve shutdown` ends it"
            )
        if whose not in (None, mine):
            return "stopped; the application of another command continues"
        serve.delete(APP, _blocking=False)  # Ray would wait for a minute, and then raise
    end = time.monotonic() + (drain_s or 0.0) + LEAVING_S + ENDING_S
    while APP in serve.status().applications:
        if drain_s is None or time.monotonic() > end:
            return "stopped; Ray Serve is still ending replicas"
        time.sleep(LOOK_S)
    return "stopped"


@contextmanager
def _reporting_errors() -> Iterator[None]:
    """Raises DeviceError for what goes wrong in the cluster or in Ray Serve."""
    from ray.exceptions import RayError
    from ray.serve.exceptions import RayServeException

    try:
        yield
    except (RayError, RayServeException, TimeoutError) as error:
        why = getattr(error, "cause", None) or error  # Ray's own text is a traceback
        reported = " ".join(str(why).split())[:300] or "no answer in time"
        raise DeviceError(f"ray: {reported}") from error


class _Stopping:
    """Ctrl-C raises KeyboardInterrupt; a request to terminate, or the end of the terminal, sets
    `drain` where answers may be under way (`serving`), and elsewhere, or the second time, raises
    it too.
    """

    serving = drain = False

    def __enter__(self) -> _Stopping:
        signal.signal(signal.SIGTERM, self._ask)
        hang_up = getattr(signal, "SIGHUP", None)
        if hang_up is not None and signal.getsignal(hang_up) is not signal.SIG_IGN:
            signal.signal(hang_up, self._ask)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def _ask(self, *_: object) -> None:
        if self.drain or not self.serving:
            raise KeyboardInterrupt
        self.drain = True
