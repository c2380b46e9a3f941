"""`mtmd serve`: the model behind OpenAI's HTTP interface, with a page to chat. Runs until it is
interrupted.
"""

from __future__ import annotations

import argparse
import signal
import socket
import sys
from pathlib import Path
from typing import Any

from mtmd.commands.shared import add_model_arguments, load_from
from mtmd.kernels.text import for_terminal

NOT_ISOLATED = (
    "this system has no limits for processes: a hostile picture or JSON schema can take the "
    "server's memory and time (Linux and macOS isolate them)"
)
HELP = "Serve the model over HTTP: OpenAI's interface, and a page to chat."


def add_arguments(sub: argparse.ArgumentParser) -> None:
    server = sub.add_argument_group("server")
    server.add_argument(
        "--host",
        default="127.0.0.1",
        help="address to listen on; others than this machine's own need a key "
        "(default: %(default)s)",
    )
    server.add_argument(
        "--port", type=int, default=8080, help="0 takes a free one (default: %(default)s)"
    )
    server.add_argument(
        "--parallel",
        type=int,
        default=16,
        metavar="N",
        help="answers computed at once (default: %(default)s)",
    )
    server.add_argument(
        "--queue",
        type=int,
        default=64,
        metavar="N",
        help="requests that may wait (default: %(default)s)",
    )
    server.add_argument(
        "--data",
        metavar="DIR",
        help="folder of conversations and their pictures (default: in the user's data folder)",
    )
    server.add_argument("--no-history", action="store_true", help="keep no conversations on disk")
    server.add_argument(
        "--no-warmup", action="store_true", help="begin at once; the first answer then takes longer"
    )
    access = sub.add_argument_group("access")
    access.add_argument(
        "--api-key",
        action="append",
        default=[],
        metavar="KEY",
        help="let in who has KEY; may be repeated",
    )
    access.add_argument(
        "--insecure-no-auth", action="store_true", help="let anybody in who can reach the address"
    )
    access.add_argument(
        "--rate-limit",
        type=int,
        default=600,
        metavar="N",
        help="requests a minute for each key, 0 for any number (default: %(default)s)",
    )
    access.add_argument(
        "--allow-remote-media",
        action="store_true",
        help="fetch pictures from public web addresses in requests",
    )
    access.add_argument(
        "--media-path", metavar="DIR", help="let requests name pictures in DIR by file://"
    )
    access.add_argument(
        "--cors-origin",
        action="append",
        default=[],
        metavar="ORIGIN",
        help="let web pages of ORIGIN use the server; may be repeated, * for all",
    )
    add_model_arguments(sub)


def run(args: argparse.Namespace) -> int:
    settings, folder = (
        _settings(args),
        _folder(args),
    )  # a wrong option, or a port in use, is told before a model is loaded for it
    from mtmd.web.server import bind

    with bind(settings) as sock:
        _serve(args, settings, folder, sock)
    return 0


def _serve(
    args: argparse.Namespace, settings: Any, folder: Path | None, sock: socket.socket
) -> None:
    from mtmd.kernels.isolation.limits import available as can_isolate
    from mtmd.loaded.allocator import return_freed_memory

    return_freed_memory()
    args.isolate = can_isolate()
    model = load_from(args)
    model.loaded.start_workers()
    report = model.warmup_report if args.no_warmup else model.warm_up()
    from mtmd.service.service import Service
    from mtmd.web.app import create_app
    from mtmd.web.server import Server
    from mtmd.web.store.store import Store

    store = Store(folder)
    try:
        service = Service(model, queue=settings.queue)
        try:
            server = Server(
                create_app(service, settings, store, warmup=report), service, settings, sock
            )
            _stop_on_signals(server)
            notices = [*_told_of(store), *([] if args.isolate else [NOT_ISOLATED])]
            _say(server.url, model.name, report, settings, folder, notices)
            server.serve(closing=service.close)
            print("stopped", flush=True)
        finally:
            service.close()
    finally:
        store.close()


def _settings(args: argparse.Namespace) -> Any:
    """Raises OptionError."""
    from mtmd.web.settings import ServerSettings

    return ServerSettings(
        host=args.host,
        port=args.port,
        api_keys=tuple(args.api_key),
        insecure_no_auth=args.insecure_no_auth,
        rate_limit=args.rate_limit,
        allow_remote_media=args.allow_remote_media,
        media_path=Path(args.media_path) if args.media_path else None,
        cors_origins=tuple(args.cors_origin),
        queue=args.queue,
    )


def _folder(args: argparse.Namespace) -> Path | None:
    from mtmd.config import data_folder

    return None if args.no_history else Path(args.data).expanduser() if args.data else data_folder()


def _stop_on_signals(server: Any) -> None:
    """Ctrl-C, or a request to terminate, ends answers under way, each told so, and then the
    server.
    """

    def stop(*_: object) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a second Ctrl-C does not wait
        server.stop()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)


def _told_of(store: Any) -> list[str]:
    """What who starts the server is to know of its history."""
    told = [store.notice.text] if store.notice else []
    if store.shared:
        told.append(
            "another server uses the same data folder; each shows answers that the other is "
            "writing as interrupted (--data gives it one of its own)"
        )
    return told


def _say(
    url: str, name: str, report: Any, settings: Any, folder: Path | None, notices: list[str]
) -> None:
    lines = (
        f"{name} on {report.device} ({report.device_name}), {report.dtype}",
        f"conversations: {folder or 'not kept'}",
        f"serving at {url}, OpenAI's interface at {url}/v1; Ctrl-C stops",
    )
    print(for_terminal("\n".join(lines)), flush=True)
    warnings = notices + [
        f"{r.count} {r.op} nodes of the {r.graph} do not run on {report.device} but on "
        f"{r.runs_on}: {r.reason}"
        for r in report.refused
    ]
    if not report.fully_accelerated:
        warnings.append(
            f"not everything runs on {report.device} as it should: `mtmd warmup`, or "
            f"{url}/diagnostics, tells what and why"
        )
    if not (settings.loopback or settings.api_keys):
        warnings.append(
            "anybody who can reach this address can use the model and see every conversation "
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
    for warning in warnings:
        print(for_terminal(f"WARNING: {warning}"), file=sys.stderr, flush=True)
