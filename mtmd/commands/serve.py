"""`mtmd serve`: the model behind OpenAI's HTTP interface, with a page to chat. Runs until it is
interrupted, or its device fails.
"""

from __future__ import annotations

import argparse
import faulthandler
import logging
import os
import shlex
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

from mtmd.base.cores import leave_half
from mtmd.base.errors import DeviceError, OptionError
from mtmd.base.text import for_terminal, plural
from mtmd.commands.arguments import add_options, options_in
from mtmd.commands.ray_options import check_ray_options
from mtmd.commands.shared import add_model_arguments, check_loading, compiling, loading
from mtmd.options.answer import AnswerOptions
from mtmd.options.load import LoadOptions
from mtmd.options.serve import ServeOptions

ANSWERING = ("sampling", "stop_repeating")  # what holds where a request does not give it
ENDING_S = 20.0  # for the step that the device is in
NAMED = 8  # models, when the server begins
DEVICE_FAILED = 70  # the exit code by which whoever started it knows to start it again
log = logging.getLogger("mtmd.serve")
NOT_ISOLATED = (
    "this system has no limits for processes: a hostile picture or JSON schema can take the "
    "server's memory and time (Linux and macOS isolate them)"
)
HELP = "Serve the model over HTTP: an OpenAI-compatible API and a chat page."
EXAMPLES = """\
mtmd serve                                  # http://127.0.0.1:8080, for this machine only
mtmd serve -m org/name --parallel 4 --port 9000
mtmd serve --models ~/models --unload-after 600
mtmd serve --host 0.0.0.0 --api-key-file keys.txt
mtmd serve --ray auto --replicas 2:8 -m org/name"""

SHORT = (
    *("--model", "--models", "--host", "--port", "--api-key-file", "--parallel", "--context"),
    *("--alias", "--sampling", "--stop-repeating", "--allow-remote-media", "--no-history"),
    *("--device", "--dtype", "--memory-limit", "--no-warmup"),
)


def add_arguments(sub: argparse.ArgumentParser) -> None:
    from mtmd.web.settings import ConnectionLimits, MediaBudget, ServerSettings

    server, *_ = (sub.add_argument_group(group) for group in ("server", "several models", "access"))
    for record in (ServerSettings, MediaBudget, ConnectionLimits):
        add_options(sub, record, group="server")
    add_options(server, LoadOptions, ["parallel"], defaults={"parallel": 16})
    add_options(server, AnswerOptions, ANSWERING, defaults={"sampling": "model"})
    add_model_arguments(sub)
    add_options(sub, ServeOptions, group="server")


def run(args: argparse.Namespace) -> int:
    if check_ray_options(args):
        from mtmd.web.replicas.command import run as run_on_ray

        return run_on_ray(args, _settings, _serve_in_replica)
    settings, folder = (
        _settings(args),
        _folder(args),
    )  # a wrong option, or a port in use, is told before a model is loaded for it
    from mtmd.web.server import bind

    serve = _serve_many if args.models else _serve
    _check_options_of_many(args)
    if not args.models:
        check_loading(args)
    _check_writable(folder)
    if args.engine_process is not None:
        word = "" if args.engine_process else "no-"
        _warn(f"--{word}engine-process does nothing any more: each model has a process of its own")
    with bind(settings) as sock:
        try:
            fault = serve(args, settings, folder, sock)
        except DeviceError as error:  # the model's process has ended while it loaded the model
            fault = error
    if fault is None:
        return 0
    print(f"mtmd serve: {fault}", file=sys.stderr, flush=True)
    sys.stdout.flush()
    # Whatever hangs in the device would not let the interpreter end, or not with this code.
    os._exit(DEVICE_FAILED)


def _write_log(args: argparse.Namespace) -> None:
    """Write the log to stderr. A crash of native code tells where it was."""
    from mtmd.web.telemetry.logs import write_log

    if sys.__stderr__ is not None:
        faulthandler.enable(sys.__stderr__)
    write_log(args.log_format, args.log_level, requests=args.access_log)


def _serve(
    args: argparse.Namespace,
    settings: Any,
    folder: Path | None,
    sock: socket.socket,
    begin: Callable[[Any, Any], None] | None = None,
) -> Any:
    """Until it is stopped. The fault of the device, if that is why. `begin` is called with server
    and service when it can answer, in place of what a command does about signals.
    """
    from mtmd.base.isolation.limits import available as can_isolate
    from mtmd.loaded.allocator import return_freed_memory
    from mtmd.loaded.interpreter import shared_promptly
    from mtmd.web.models.progress import Loading
    from mtmd.web.server import Server
    from mtmd.web.small_apps.loading_app import create_loading_app
    from mtmd.web.telemetry.systemd import notify_systemd

    return_freed_memory()
    args.isolate = can_isolate()
    _write_log(args)  # also of what is asked, or has to be warned of, while the model is loaded
    how_far = Loading()
    server = Server(create_loading_app(how_far, settings), settings, sock)
    restarts = begin is None and args.on_engine_failure == "restart"  # Ray replaces replicas
    with ExitStack() as stack:
        with server.answering():
            print(f"loading; {_page(server.url, '/ready')} shows the progress", flush=True)
            notify_systemd("STATUS=loading")
            engine = _load(args, settings, restarts, stack)
            how_far.warming(engine.weights_read)
            if args.no_warmup:
                report = engine.warmup_report
            else:
                with compiling() as progress:
                    report = engine.warm_up(progress)
            app, notices = _application(engine, report, settings, folder, stack)
            if not args.isolate:
                notices.append(NOT_ISOLATED)
            server.use(app)
        engine.on_fault(lambda _: server.stop())
        if begin is None:
            _stop_on_signals(server, settings.drain_s)
        else:
            begin(server, engine)
        stack.enter_context(shared_promptly())
        warn = _warn if args.log_format == "text" else log.warning
        _say(server.url, engine.name, report, settings, folder, notices, warn)
        log.info("serving at %s", server.url)
        notify_systemd("READY=1", f"STATUS=serving at {server.url}")
        server.serve(closing=engine.close, busy=lambda: engine.busy)
        engine.close(ENDING_S)
        if engine.fault is None:
            print("stopped", flush=True)
        return engine.fault


def _serve_in_replica(
    args: argparse.Namespace, settings: Any, sock: socket.socket, begin: Callable[[Any, Any], None]
) -> None:
    """One of several servers of one model, which keeps no conversations."""
    _serve(args, settings, None, sock, begin)


class _OptionParser(argparse.ArgumentParser):
    """Parser of options that come from a file: wrong ones end no process."""

    def error(self, message: str) -> NoReturn:
        raise OptionError(f"command: {message}")


def ray_application(options: dict[str, str]) -> Any:
    """Return the application for `import_path` of Ray Serve's own files: the application of `mtmd
    serve --ray` with the options in `options["command"]`, as they would be written there. Raises
    OptionError.
    """
    from mtmd.web.replicas.command import application_of

    if unknown := sorted(set(options) - {"command"}):
        raise OptionError(f"args: found {unknown[0]!r:.40}, expected `command` alone")
    command = options.get("command", "")
    if not isinstance(command, str):
        raise OptionError(f"command: found {type(command).__name__}, expected options as one text")
    parser = _OptionParser(prog="mtmd serve", add_help=False)
    add_arguments(parser)
    parser.set_defaults(host=None, port=None)  # Ray Serve's own
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise OptionError(f"command: {error}") from error
    args = parser.parse_args(["--ray", "auto", *words])
    check_ray_options(args)
    return application_of(args, _settings, _serve_in_replica)


def _check_options_of_many(args: argparse.Namespace) -> None:
    """Raises OptionError for options that would do nothing."""
    from mtmd.base.errors import OptionError

    if not args.models:
        for name in ("models_max", "unload_after", "presets"):
            if getattr(args, name) is not None:
                raise OptionError(f"--{name.replace('_', '-')}: needs --models")
        return
    for name in ("mmproj", "chat_template"):
        if getattr(args, name):
            raise OptionError(
                f"--{name.replace('_', '-')}: found with --models, but it is "
                'for one model; put it into "load" of the presets'
            )
    if args.alias:
        raise OptionError('--alias: found with --models; put "aliases" into the presets')
    if args.tp > 1:
        raise OptionError("--tp: found with --models; serve a model that uses several GPUs with -m")
    for name in ("split", "fit"):
        if getattr(args, name) not in ("none", False):
            raise OptionError(
                f"--{name}: found with --models, which share one device; serve one model with -m"
            )


def _serve_many(
    args: argparse.Namespace, settings: Any, folder: Path | None, sock: socket.socket
) -> Any:
    """Do what `_serve` does, for several models, none of which has to be there at the start."""
    from mtmd.base.isolation.limits import available as can_isolate
    from mtmd.clip.image.isolated import start as start_picture_workers
    from mtmd.loaded.allocator import return_freed_memory
    from mtmd.loaded.interpreter import shared_promptly
    from mtmd.web.app import create_app_of_many
    from mtmd.web.models.start import make_registry
    from mtmd.web.server import Server
    from mtmd.web.telemetry.systemd import notify_systemd

    return_freed_memory()
    args.isolate = can_isolate()
    left_out: list[str] = []
    registry = make_registry(
        args.models,
        args.model,
        settings,
        options_in(args, LoadOptions),
        presets=args.presets,
        maximum=args.models_max,
        unload_after_s=args.unload_after or 0.0,
        warm_up=not args.no_warmup,
        ends_on_fault=args.on_engine_failure == "exit",
        report=left_out.append,
    )
    _write_log(args)
    with ExitStack() as stack:
        stack.push(lambda error, *_: None if error else _leave_fetch(registry))
        opened = _close_to_others(folder)
        store = _opened(folder)
        stack.callback(store.close)
        stack.callback(registry.close)
        server = Server(create_app_of_many(registry, settings, store), settings, sock)
        _stop_on_signals(server, settings.drain_s)
        registry.on_fault(lambda _: server.stop())
        stack.enter_context(shared_promptly())
        if args.isolate:
            start_picture_workers()
        leave_half()  # of the cores, which is the models'
        registry.start()
        if args.model is not None:
            registry.load(registry.find(None).name)
        listed = registry.listed()
        names = ", ".join(m.name for m in listed[:NAMED])
        lines = (
            f"{plural(len(listed), 'model')} to choose from: {names}"
            f"{', ...' if len(listed) > NAMED else ''}",
            f"conversations: {folder or 'not kept'}",
            _serving_at(server.url),
        )
        print(for_terminal("\n".join(lines)), flush=True)
        notices = [*left_out, *_describe(store), *_describe_modes(opened)]
        notices += [] if args.isolate else [NOT_ISOLATED]
        warn = _warn if args.log_format == "text" else log.warning
        for warning in [*notices, *_warnings_of_access(settings)]:
            warn(warning)
        log.info("serving at %s", server.url)
        notify_systemd("READY=1", f"STATUS=serving at {server.url}")
        server.serve(closing=registry.close, busy=lambda: registry.busy)
        registry.close()
        if registry.fault is None:
            print("stopped", flush=True)
        return registry.fault


def _leave_fetch(registry: Any) -> None:
    """The last that is done. The interpreter would wait for the threads of huggingface_hub as long
    as a fetch takes; what has come is kept, and the next one goes on from there.
    """
    if registry.fetching and registry.fault is None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def _load(args: argparse.Namespace, settings: Any, restarts: bool, stack: ExitStack) -> Any:
    """The model's process, which ends with `stack`. Raises MtmdError."""
    from mtmd.clip.image.isolated import start as start_picture_workers
    from mtmd.engine_process.supervisor import EngineClient

    is_here = check_loading(args)
    engine = stack.enter_context(EngineClient(hang_s=settings.hang_s or None, restarts=restarts))
    if args.isolate:
        start_picture_workers()
    with loading(args.model) as status:
        if not is_here:
            status.clear()  # the hub's own bars come in its place
        engine.load(args.model, options_in(args, LoadOptions))
    leave_half()  # of the cores, which is the model's
    return engine


def _application(
    engine: Any, report: Any, settings: Any, folder: Path | None, stack: ExitStack
) -> tuple[Any, list[str]]:
    """Return what answers requests from now on, and warnings. `stack` closes engine and store; that
    of a dual encoder keeps nothing on disk.
    """
    from mtmd.web.app import create_app
    from mtmd.web.small_apps.retrieval_app import create_retrieval_app

    opened: list[str] = []
    store = None
    if engine.writes:
        opened = _close_to_others(folder)
        store = _opened(folder)
        stack.callback(store.close)
    engine.begin(queue=settings.queue, share_cache=settings.share_cache)
    stack.callback(engine.close, ENDING_S)
    if store is None:
        return create_retrieval_app(engine, settings, report), []
    app = create_app(engine, settings, store, warmup=report)
    return app, [*_describe(store), *_describe_modes(opened)]


def _check_writable(folder: Path | None) -> None:
    """Before a model is loaded for nothing. Raises StoreError."""
    from mtmd.web.store.folder import check_writable

    if folder is not None:
        with _named(folder, "; or keep none, by --no-history"):
            check_writable(folder)


def _opened(folder: Path | None) -> Any:
    """The store of conversations. Raises StoreError."""
    from mtmd.web.store.store import Store

    with _named(folder):
        return Store(folder)


@contextmanager
def _named(folder: Path | None, advice: str = "") -> Iterator[None]:
    """A StoreError names the folder, which pages are not told."""
    from mtmd.web.store.errors import StoreError

    try:
        yield
    except StoreError as error:
        reported = str(error).replace("the data folder", f"the data folder {folder}", 1)
        raise type(error)(reported + advice) from error


def _close_to_others(folder: Path | None) -> list[str]:
    """Return what this process makes from now on is the user's alone, and what lies in the data
    folder too. The names of what others could read until now.
    """
    os.umask(0o077)
    opened = []
    for name in ("conversations.db", "conversations.db-wal", "conversations.db-shm", "images"):
        path = folder / name if folder else Path()
        if folder and os.name == "posix" and path.exists() and path.stat().st_mode & 0o077:
            with suppress(PermissionError):  # another user's, who chose its mode
                path.chmod(0o700 if path.is_dir() else 0o600)
                opened.append(name)
    return opened


def _settings(args: argparse.Namespace) -> Any:
    """Raises OptionError."""
    from mtmd.environment import api_keys_from_environment
    from mtmd.options.by_name import options
    from mtmd.web.api_keys import parse_keys
    from mtmd.web.settings import ConnectionLimits, MediaBudget, ServerSettings

    options(ServeOptions, options_in(args, ServeOptions))
    answers = {name: value for name in ANSWERING if (value := getattr(args, name))}
    options(AnswerOptions, answers)
    return ServerSettings(
        **options_in(args, ServerSettings),
        named_keys=parse_keys(api_keys_from_environment(), "MTMD_API_KEYS"),
        media=MediaBudget(**options_in(args, MediaBudget)),
        connections=ConnectionLimits(**options_in(args, ConnectionLimits)),
        answers=answers,
    )


def _folder(args: argparse.Namespace) -> Path | None:
    from mtmd.environment import data_folder

    return None if args.no_history else Path(args.data).expanduser() if args.data else data_folder()


def _stop_on_signals(server: Any, drain_s: float) -> None:
    """Ctrl-C ends answers under way, each told so, and then the server. A request to terminate, or
    the end of the terminal, has them written first; a second one does not.
    """

    from mtmd.web.telemetry.systemd import notify_systemd

    def stop(*_: object) -> None:
        notify_systemd("STOPPING=1")
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a second Ctrl-C does not wait
        server.stop()

    def drain(number: int, *_: object) -> None:
        log.info("stopping: requests in progress are answered first, for up to %g s", drain_s)
        signal.signal(number, stop)
        notify_systemd("STOPPING=1", "STATUS=answering what is under way")
        server.drain(drain_s)

    signal.signal(signal.SIGINT, stop)
    signal.signal(signal.SIGTERM, drain)
    hang_up = getattr(signal, "SIGHUP", None)  # Windows has none
    if hang_up is not None and signal.getsignal(hang_up) is not signal.SIG_IGN:  # as nohup sets
        signal.signal(hang_up, drain)


def _describe(store: Any) -> list[str]:
    """Return what who starts the server is to know of its history."""
    reported = [store.notice.text] if store.notice else []
    if store.shared:
        reported.append(
            "another server uses the same data folder; each shows answers that the other is "
            "writing as interrupted (--data gives it one of its own)"
        )
    return reported


def _describe_modes(opened: list[str]) -> list[str]:
    names = ", ".join(opened)
    reported = f"other users of this machine could read {names} in the data folder; now they cannot"
    return [reported] if opened else []


def _serving_at(url: str) -> str:
    v1 = _page(url, "/v1")
    return f"serving at {for_terminal(url)}, OpenAI's interface at {v1}; Ctrl-C stops"


def _page(url: str, path: str) -> str:
    """Return how one is written that is at `path` of the server."""
    return f"{path} there" if url.startswith("unix:") else f"{url}{path}"


def _say(
    url: str,
    name: str,
    report: Any,
    settings: Any,
    folder: Path | None,
    notices: list[str],
    warn: Callable[[str], None],
) -> None:
    lines = (
        f"{name} on {report.device} ({report.device_name}), {report.dtype}",
        f"conversations: {folder or 'not kept'}",
        _serving_at(url),
    )
    print(for_terminal("\n".join(lines)), flush=True)
    warnings = notices + [
        f"{r.count} {r.op} nodes of the {r.graph} run on {r.runs_on}: {r.reason}"
        for r in report.refused
    ]
    if not report.fully_accelerated:
        warnings.append(
            f"not everything runs on {report.device} as expected: `mtmd "
            f"warmup`, or {_page(url, '/diagnostics')}, shows what and why"
        )
    for warning in [*warnings, *_warnings_of_access(settings)]:
        warn(warning)


def _warnings_of_access(settings: Any) -> list[str]:
    """Warn about who gets in, and what they can do."""
    warnings = []
    if settings.api_keys:
        warnings.append(
            "every user of this machine can see the key of --api-key in `ps`; put it in a file "
            "(--api-key-file) or in the variable MTMD_API_KEYS"
        )
    if settings.api_key_file and settings.api_key_file.stat().st_mode & 0o004:
        warnings.append(
            "every user of this machine can read the keys in --api-key-file; `chmod 600` it"
        )
    if not (settings.loopback or settings.needs_key):
        warnings.append(
            "everyone who can reach this address can use the model and see every conversation "
            "(--insecure-no-auth)"
        )
    elif not settings.loopback:
        warnings.append(
            "keys and pictures travel unencrypted; put a server that speaks TLS in front"
        )
    if "*" in settings.cors_origins:
        warnings.append(
            "every web page that a user of this machine visits can use this server (--cors-origin "
            "*)"
        )
    return warnings


def _warn(text: str) -> None:
    print(for_terminal(f"WARNING: {text}"), file=sys.stderr, flush=True)
