"""How the server is run, checked once before a model is loaded for it."""

from __future__ import annotations

import ipaddress
import re
import socket
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeAlias

from mtmd import OptionError
from mtmd.prompt.load_image import ImageLimits
from mtmd.prompt.video_input import VideoLimits
from mtmd.web.api_keys import Keys, NamedKey

Network: TypeAlias = ipaddress.IPv4Network | ipaddress.IPv6Network
Trusted: TypeAlias = Network | Literal["unix"]
PEER: Literal["unix"] = "unix"  # the address of everybody who comes through a socket in a file
UNIX = "unix:"  # before the path, where a host is expected
UNKNOWN_FIELDS = ("ignore", "refuse")
ALIAS_CHARS = 256
VIDEO_LIMITS = VideoLimits(max_seconds=6 * 3600.0, cpu_s=120.0)
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://([^\s/*]+|\*)")
_HOST = re.compile(r"(\*\.)?[\w.-]+|\[?[0-9A-Fa-f:.]+\]?")
_CONTAINERS = "host.docker.internal"  # how containers call this machine
_ROOT = re.compile(r"(/[\w.~-]+)+")


@dataclass(frozen=True)
class MediaBudget:
    """What the pictures of one request may bring together; `server_pixels`: those of all requests
    that are not answered yet; `decoding_pixels`: of pictures that are being decoded at once.
    `bytes` count for videos as well, of which there may be `videos`, each within `video` but for
    the processor time, which is that of all together; while one is answered, it counts as
    `video_pixels` held, whatever its size.
    """

    images: int = 32
    bytes: int = 64 << 20
    pixels: int = 128_000_000
    server_pixels: int = 512_000_000
    decoding_pixels: int = 128_000_000
    videos: int = 8
    video: VideoLimits = VIDEO_LIMITS
    video_pixels: int = 24_000_000

    @property
    def each(self) -> ImageLimits:
        return ImageLimits(self.bytes, self.pixels)

    def video_of(self, count: int) -> VideoLimits:
        """Of each of `count` videos of one request."""
        return replace(self.video, cpu_s=self.video.cpu_s / count)


@dataclass(frozen=True)
class ConnectionLimits:
    """What clients may take before anything is done for them, and beside it. `per_address` does not
    bind connections from this machine, where a proxy may stand for everybody. `body_bytes`: of all
    bodies that are being received or answered. A body may take `body_s`, and a second more for
    every `body_rate` bytes received; whoever does not read an answer at `unread_rate` bytes a
    second, over `unread_s`, does not get the rest.
    """

    most: int = 4096
    per_address: int = 1024
    head_s: float = 20.0
    body_s: float = 60.0
    body_rate: int = 32 << 10
    body_bytes: int = 512 << 20
    idle_s: float = 60.0
    unread_s: float = 60.0
    unread_rate: int = 1 << 10


@dataclass(frozen=True)
class JsonLimits:
    """Of one body: `bytes` beside its pictures, `values` (names, texts, numbers, lists, ...) in
    all, and how `deep` they may lie in one another.
    """

    bytes: int = 8 << 20
    values: int = 100_000
    deep: int = 64


@dataclass(frozen=True)
class ServerSettings:
    """`host` unix:PATH is a socket in a file of the mode `socket_mode`, and has no port; elsewhere
    `port` 0 takes a free one. `api_keys` have no names, `named_keys` may have some, those in
    `api_key_file` can be changed while the server runs. `share_cache`: prompts and pictures that
    one key has asked about are known when another does. `rate_limit`: requests a minute for each
    key, 0 for no limit.
    `media_path`: the folder that file:// may name. `upload_bytes`: of uploaded files in all.
    `storage_bytes`: of pictures of conversations. `queue`: requests that may wait. `followers`:
    pages that read answers of the page as they are written; `downloads`: files being read at once.
    `drain_s`: how long answers under way may take once the server is asked to end.
    `hang_s`: how long the device may do nothing in the midst of an answer, 0 for any time.
    `cors_origins`: pages that may use the server, SCHEME://HOST[:PORT], SCHEME://* for all of a
    scheme, null, or *. `allowed_hosts`: names by which the server may be called beside this
    machine's own, *.NAME for all under one, * for any; none given, a server for this machine alone
    answers to its own names only, others to all. `root_path`: where a proxy has the server.
    `trusted_proxy`: addresses or networks whose X-Forwarded headers are believed; "unix": who comes
    through the socket in a file.
    `unknown_fields` of requests: "ignore", which the receipt says, or "refuse". `aliases`: other
    names by which requests may call the model; `any_model`: they may call it by any. `tag` stands
    in the ids of what the server keeps, by which it is found among several. `answers`: fields of
    AnswerOptions that hold where neither a request nor a preset says otherwise. Raises OptionError.
    """

    host: str = "127.0.0.1"
    port: int = 8080
    socket_mode: int = 0o600
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    named_keys: tuple[NamedKey, ...] = ()
    api_key_file: Path | None = None
    share_cache: bool = False
    insecure_no_auth: bool = False
    rate_limit: int = 0
    allow_remote_media: bool = False
    media_path: Path | None = None
    cors_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    root_path: str = ""
    trusted_proxy: tuple[str, ...] = ()
    queue: int = 1024
    hang_s: float = 300.0
    drain_s: float = 25.0
    aliases: tuple[str, ...] = ()
    any_model: bool = False
    answers: Mapping[str, Any] = field(default_factory=dict)
    media: MediaBudget = MediaBudget()
    upload_bytes: int = 256 << 20
    storage_bytes: int = 16 << 30
    followers: int = 256
    downloads: int = 32
    connections: ConnectionLimits = ConnectionLimits()
    json: JsonLimits = JsonLimits()
    unknown_fields: str = "ignore"
    tag: str = ""

    def __post_init__(self) -> None:
        if not 0 <= self.port < 1 << 16:
            raise OptionError(f"port: found {self.port}, expected 0 to 65535")
        self._check_socket()
        if self.unknown_fields not in UNKNOWN_FIELDS:
            raise OptionError(
                f"unknown_fields: found {self.unknown_fields!r:.40}, expected ignore or refuse"
            )
        if self.queue < 1:
            raise OptionError(f"queue: found {self.queue}, expected at least 1")
        if not 0 <= self.hang_s <= threading.TIMEOUT_MAX or 0 < self.hang_s < 1:
            raise OptionError(
                f"hang_limit: found {self.hang_s:g}, expected seconds, at least 1, or 0 for none"
            )
        if not 0 <= self.drain_s <= threading.TIMEOUT_MAX:
            raise OptionError(f"drain: found {self.drain_s:g}, expected seconds, or 0 for none")
        if self.rate_limit < 0:
            raise OptionError(
                f"rate_limit: found {self.rate_limit}, expected requests a minute, or 0 for no "
                "limit"
            )
        for alias in self.aliases:
            if (
                not 0 < len(alias) <= ALIAS_CHARS
                or not alias.isprintable()
                or alias != alias.strip()
            ):
                raise OptionError(
                    f"alias: found {alias!r:.80}, expected a name of at most {ALIAS_CHARS} "
                    "characters"
                )
        for name, found, least in (
            ("max_connections", self.connections.most, 16),
            ("max_connections_per_address", self.connections.per_address, 1),
        ):
            if found < least:
                raise OptionError(f"{name}: found {found}, expected at least {least}")
        if not 1 <= self.media.bytes <= 1 << 32:
            raise OptionError(
                f"max_request: found {self.media.bytes / (1 << 20):g} MiB, expected 1 to 4096"
            )
        if self.storage_bytes < 1 << 20:
            raise OptionError(
                f"max_storage: found {self.storage_bytes / (1 << 30):g} GiB, expected at least 1"
            )
        self.make_keys()
        if not (self.loopback or self.needs_key or self.insecure_no_auth):
            raise OptionError(
                f"host {self.host!r:.80} can be reached by others; give --api-key-file, or "
                "--insecure-no-auth to let anybody in"
            )
        if self.media_path is not None and not self.media_path.is_dir():
            raise OptionError(
                f"media_path: found no folder {str(self.media_path)!r}; give the folder whose "
                "pictures may be read"
            )
        for origin in self.cors_origins:
            if origin not in ("*", "null") and not _ORIGIN.fullmatch(origin):
                raise OptionError(
                    f"cors_origin: found {origin!r:.80}, expected scheme://host[:port], "
                    "scheme://*, null, or *"
                )
        for host in self.allowed_hosts:
            if host != "*" and not _HOST.fullmatch(host):
                raise OptionError(
                    f"allowed_host: found {host!r:.80}, expected a name or address without a port, "
                    "*.name, or *"
                )
        if self.root_path and not _ROOT.fullmatch(self.root_path):
            raise OptionError(
                f"root_path: found {self.root_path!r:.80}, expected a path such as /mtmd, without "
                "a slash at its end"
            )
        self.trusted_proxies  # noqa: B018  # raises what is wrong with them

    def _check_socket(self) -> None:
        if self.host == UNIX:
            raise OptionError(f"host: found {UNIX!r}, expected a path behind it")
        try:
            self.unix_socket  # noqa: B018  # raises where its ~ is nobody's
        except RuntimeError as error:
            raise OptionError(
                f"host: found {self.host!r:.80}, expected a path whose ~ is a user of this machine"
            ) from error
        if self.unix_socket is not None and not hasattr(socket, "AF_UNIX"):
            raise OptionError(f"host {self.host!r:.80}: this system has no sockets in files")
        if not 0 <= self.socket_mode <= 0o777:
            raise OptionError(f"socket_mode: found {self.socket_mode:o}, expected 0 to 777")
        if self.unix_socket is not None and self.port not in (0, ServerSettings.port):
            raise OptionError(
                f"port: found {self.port} beside host {self.host!r:.80}, which has none; leave one "
                "out"
            )
        if self.unix_socket is None and self.socket_mode != 0o600:
            raise OptionError(
                f"socket_mode: found beside host {self.host!r:.80}, expected --host {UNIX}PATH"
            )

    @property
    def unix_socket(self) -> Path | None:
        """Where it is, if it is a file."""
        if not self.host.startswith(UNIX):
            return None
        return Path(self.host.removeprefix(UNIX)).expanduser().absolute()

    @property
    def needs_key(self) -> bool:
        """Whether nobody is let in without one."""
        return bool(self.api_keys or self.named_keys or self.api_key_file)

    def make_keys(self) -> Keys:
        """Raises OptionError."""
        return Keys(self.api_keys, self.named_keys, self.api_key_file)

    @property
    def loopback(self) -> bool:
        """Whether this machine alone reaches it."""
        return self.unix_socket is not None or is_loopback(self.host)

    @cached_property
    def trusted_proxies(self) -> tuple[Trusted, ...]:
        try:
            return tuple(
                PEER if given == PEER else ipaddress.ip_network(given)
                for given in self.trusted_proxy
            )
        except ValueError as error:
            raise OptionError(
                f"trusted_proxy: {error}; expected an address such as 127.0.0.1, a network such "
                f"as 10.0.0.0/8, or unix for who comes through --host {UNIX}PATH"
            ) from error

    def allows_origin(self, origin: str | None) -> bool:
        """Whether pages of another origin may use the server."""
        if origin is None:
            return False
        every = f"{origin.partition('://')[0]}://*"
        return not {"*", origin, every}.isdisjoint(self.cors_origins)

    def answers_to(self, host: str) -> bool:
        """Whether it may be called by this name or address, which has no port."""
        if is_loopback(host) or not (self.loopback or self.allowed_hosts):
            return True
        host = host.lower().rstrip(".")
        if self.loopback and (host.endswith(".localhost") or host in _own_names()):
            return True
        under = (f"*{host[at:]}" for at, c in enumerate(host) if c == ".")
        return not {"*", host, *under}.isdisjoint(h.lower() for h in self.allowed_hosts)

    @property
    def allows_any_origin(self) -> bool:
        return "*" in self.cors_origins

    @property
    def body_bytes(self) -> int:
        """Of one request: its pictures in base64, and text."""
        return self.media.bytes * 4 // 3 + self.json.bytes


def _own_names() -> frozenset[str]:
    """Names of this machine beside localhost: its own, the same in its network (mDNS), and how
    containers call it. Others that end with .local anybody in the network can give to a page.
    """
    name = socket.gethostname().lower()
    return frozenset((name, f"{name.partition('.')[0]}.local", _CONTAINERS))


def is_loopback(host: str) -> bool:
    """Whether a name or address means this very machine, seen from itself."""
    if host.lower().rstrip(".") == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
