"""Describes how the server is run, checked once before a model is loaded for it."""

from __future__ import annotations

import ipaddress
import math
import re
import socket
import threading
from argparse import ArgumentTypeError
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from mtmd.base.errors import OptionError
from mtmd.base.options import (
    FLAG,
    Kind,
    as_given,
    check_options,
    one_of,
    option,
    ranged,
    several,
    whole,
)

if TYPE_CHECKING:  # loaded when they are used: the help of `mtmd serve` is made of this file
    from mtmd.prompt.audio_input import AudioLimits
    from mtmd.prompt.load_image import ImageLimits
    from mtmd.prompt.video_input import VideoLimits
    from mtmd.web.api_keys import Keys, NamedKey

Network: TypeAlias = ipaddress.IPv4Network | ipaddress.IPv6Network
Trusted: TypeAlias = Network | Literal["unix"]
PEER: Literal["unix"] = "unix"  # the address of everybody who comes through a socket in a file
HAS_LEFT = "mtmd.has_left"  # in the WSGI environment: a function, whether the client has left
UNIX = "unix:"  # before the path, where a host is expected
ALIAS_CHARS = 256
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://([^\s/*]+|\*)")
_HOST = re.compile(r"(\*\.)?[\w.-]+|\[?[0-9A-Fa-f:.]+\]?")
_CONTAINERS = "host.docker.internal"  # how containers call this machine
_ROOT = re.compile(r"(/[\w.~-]+)+")


def _seconds(expected: str, low: float = 0.0) -> Kind:
    """Check seconds from `low`, or 0."""

    def check(name: str, value: float) -> float:
        if value and not low <= value <= threading.TIMEOUT_MAX:
            raise OptionError(f"{name}: found {value:g}, expected {expected}")
        return value

    return Kind(check, parse=float, low=0, metavar="SECONDS")


def _texts(right: Callable[[str], object], expected: str, metavar: str) -> Kind:
    """Several texts, each of which is `right`."""

    def check(name: str, values: Iterable[str]) -> tuple[str, ...]:
        for value in values:
            if not right(value):
                raise OptionError(f"{name}: found {value!r:.80}, expected {expected}")
        return tuple(values)

    return Kind(check, repeated=True, metavar=metavar)


def _is_alias(text: str) -> bool:
    return 0 < len(text) <= ALIAS_CHARS and text.isprintable() and text == text.strip()


def _mode(text: str) -> int:
    try:
        return int(text, 8)
    except ValueError as error:
        raise ArgumentTypeError(f"found {text!r:.40}, expected octal digits such as 660") from error


def _socket_mode(name: str, value: int) -> int:
    if not 0 <= value <= 0o777:
        raise OptionError(f"{name}: found {value:o}, expected 0 to 777")
    return value


def _file(_: str, value: str | Path) -> Path:
    return Path(value).expanduser()


def _folder(name: str, value: str | Path) -> Path:
    path = Path(value)
    if not path.is_dir():
        raise OptionError(
            f"{name}: found no folder {str(path)!r}; give the folder whose pictures may be read"
        )
    return path


def _root(name: str, value: str) -> str:
    if value and not _ROOT.fullmatch(value):
        raise OptionError(
            f"{name}: found {value!r:.80}, expected a path such as /mtmd, without a slash at its "
            "end"
        )
    return value


@dataclass(frozen=True)
class MediaBudget:
    """Describes what the pictures of one request may bring together; `server_pixels`: those of all
    requests that are not answered yet; `decoding_pixels`: of pictures that are being decoded at
    once. `bytes` count for videos as well, of which there may be `videos`, each of `video_s`
    seconds, and read in `video_cpu_s` of processor time together; while one is answered, it counts
    as `video_pixels`, whatever its size. The same of `audio` files.
    """

    images: int = 32
    bytes: int = option(
        64 << 20,
        ranged(1, 1 << 32, "1 to 4096", scale=1 << 20, unit="MiB"),
        "max size of the pictures of one request, as files",
        flag="--max-request",
        scale=1 << 20,
    )
    pixels: int = 128_000_000
    server_pixels: int = 512_000_000
    decoding_pixels: int = 128_000_000
    videos: int = 8
    video_s: float = 6 * 3600.0
    video_cpu_s: float = 120.0
    video_pixels: int = 24_000_000
    audio: int = 16
    audio_s: float = 2 * 3600.0
    audio_cpu_s: float = 60.0
    audio_pixels: int = 24_000_000

    def __post_init__(self) -> None:
        check_options(self)

    @property
    def each(self) -> ImageLimits:
        from mtmd.prompt.load_image import ImageLimits

        return ImageLimits(self.bytes, self.pixels)

    @property
    def video(self) -> VideoLimits:
        return self.video_of(1)

    def video_of(self, count: int) -> VideoLimits:
        """Return the limits of each of `count` videos of one request."""
        from mtmd.prompt.video_input import VideoLimits

        return VideoLimits(max_seconds=self.video_s, cpu_s=self.video_cpu_s / count)

    def audio_of(self, count: int) -> AudioLimits:
        """Return the limits of each of `count` audio files of one request, which share its length
        and time.
        """
        from mtmd.prompt.audio_input import AudioLimits

        return AudioLimits(
            max_seconds=self.audio_s / count, cpu_s=max(1.0, self.audio_cpu_s / count)
        )


@dataclass(frozen=True)
class ConnectionLimits:
    """Describes what clients may take before anything is done for them, and beside it.
    `per_address` does not bind connections from this machine, where a proxy may stand for
    everybody. `body_bytes`: of all bodies that are being received or answered. A body may take
    `body_s`, and a second more for every `body_rate` bytes received; whoever does not read an
    answer at `unread_rate` bytes a second, over `unread_s`, does not get the rest.
    """

    total: int = option(
        4096,
        whole(16),
        "max open connections; beyond it, the longest idle ones are closed",
        flag="--max-connections",
    )
    per_address: int = option(
        1024,
        whole(1),
        "max open connections of one address other than this machine's",
        flag="--max-connections-per-address",
    )
    head_s: float = 20.0
    body_s: float = 60.0
    body_rate: int = 32 << 10
    body_bytes: int = 512 << 20
    idle_s: float = 60.0
    unread_s: float = 60.0
    unread_rate: int = 1 << 10

    def __post_init__(self) -> None:
        check_options(self)


@dataclass(frozen=True)
class JsonLimits:
    """Limits of the JSON of one body: `bytes` beside its pictures, `values` (names, texts, numbers,
    lists, ...) in all, and how `deep` they may lie in one another.
    """

    bytes: int = 8 << 20
    values: int = 100_000
    deep: int = 64


@dataclass(frozen=True)
class ServerSettings:
    """`api_keys` have no names, `named_keys` may have some, those in `api_key_file` can be changed
    while the server runs. `upload_bytes`: of uploaded files in all. `followers`: pages that read
    answers of the page as they are written; `downloads`: files being read at once. `tag` stands in
    the ids of what the server keeps, by which it is found among several. `answers`: fields of
    AnswerOptions that hold where neither a request nor a preset says otherwise. Raises OptionError.
    """

    host: str = option(
        "127.0.0.1",
        as_given("HOST"),
        "address to listen on; any other than this machine's own needs a key (--api-key-file). "
        "unix:PATH is a socket file, without a port",
    )
    port: int = option(
        8080,
        ranged(0, (1 << 16) - 1, "0 to 65535", metavar="PORT"),
        "port to listen on; 0 takes a free one",
    )
    socket_mode: int = option(
        0o600,
        Kind(_socket_mode, parse=_mode, metavar="MODE"),
        "permissions of the socket of --host unix:PATH: 660 for its group, 666 for every user "
        "of this machine",
        default="600, only its owner",
    )
    aliases: tuple[str, ...] = option(
        (),
        _texts(_is_alias, f"a name of at most {ALIAS_CHARS} characters", metavar="NAME"),
        "another name for the model in requests; may be repeated",
        flag="--alias",
    )
    any_model: bool = option(
        False, FLAG, "accept any model name in requests; answers have the model's own name"
    )
    unknown_fields: str = option(
        "ignore",
        one_of("ignore", "refuse"),
        "unknown fields of requests: ignored, and named in the receipt or the header "
        "X-Mtmd-Ignored, or refused",
    )
    queue: int = option(1024, whole(1), "max waiting requests")
    storage_bytes: int = option(
        16 << 30,
        ranged(1 << 20, math.inf, "at least 1", scale=1 << 30, unit="GiB"),
        "max size of the pictures of all conversations",
        flag="--max-storage",
        scale=1 << 30,
    )
    hang_s: float = option(
        300.0,
        _seconds("seconds, at least 1, or 0 for none", 1.0),
        "a model's process counts as failed after this time without progress on its device "
        "during an answer; 0 for never",
        flag="--hang-limit",
    )
    drain_s: float = option(
        25.0,
        _seconds("seconds, or 0 for none"),
        "time to complete running answers after SIGTERM or SIGHUP, while new requests are "
        "refused; Ctrl-C stops at once",
        flag="--drain",
    )
    api_key_file: Path | None = option(
        None,
        Kind(_file, metavar="FILE"),
        "accept the keys in FILE: NAME:KEY on each line, # for comments; read again when it "
        "changes. The variable MTMD_API_KEYS holds the same entries, separated by commas",
        group="access",
    )
    api_keys: tuple[str, ...] = option(
        (),
        several("KEY"),
        "accept KEY, which every user of this machine can see in `ps`; may be repeated",
        repr=False,
        flag="--api-key",
        group="access",
    )
    named_keys: tuple[NamedKey, ...] = ()
    share_cache: bool = option(
        False,
        FLAG,
        "share cached prompts and pictures between keys: faster, but a key can find out what "
        "others asked",
        group="access",
    )
    insecure_no_auth: bool = option(
        False,
        FLAG,
        "accept requests without a key from everyone who can reach the address",
        group="access",
    )
    add_models: bool | None = option(
        None,
        FLAG,
        "let clients add models of the Hugging Face hub by name, which are downloaded, to those of "
        "--models",
        default="only without keys, on this machine's own address",
        group="access",
    )
    rate_limit: int = option(
        0,
        ranged(0, math.inf, "requests a minute, or 0 for no limit"),
        "max requests per minute for each key",
        default="no limit",
        group="access",
    )
    allow_remote_media: bool = option(
        False,
        FLAG,
        "download pictures from public web addresses in requests",
        dest="fetches",  # by the server itself: the model has no use for addresses
        group="access",
    )
    media_path: Path | None = option(
        None,
        Kind(_folder, metavar="DIR"),
        "allow requests to read pictures in DIR by file:// addresses",
        group="access",
    )
    cors_origins: tuple[str, ...] = option(
        (),
        _texts(
            lambda text: text in ("*", "null") or _ORIGIN.fullmatch(text),
            "scheme://host[:port], scheme://*, null, or *",
            metavar="ORIGIN",
        ),
        "allow web pages of ORIGIN to use the server: https://HOST, app://NAME, "
        "vscode-webview://* for a whole scheme, null, * for all; may be repeated",
        flag="--cors-origin",
        group="access",
    )
    allowed_hosts: tuple[str, ...] = option(
        (),
        _texts(
            lambda text: text == "*" or _HOST.fullmatch(text),
            "a name or address without a port, *.name, or *",
            metavar="NAME",
        ),
        "answer to NAME in the Host header, as a proxy forwards it; *.NAME for all names below "
        "it, * for any; may be repeated",
        default="on this machine's own address, its own names; on others, any",
        flag="--allowed-host",
        group="access",
    )
    root_path: str = option(
        "",
        Kind(_root, parse=lambda text: text.rstrip("/"), metavar="PATH"),
        "path below which a proxy serves this server, such as /mtmd, whether the proxy removes "
        "it or not",
        group="access",
    )
    trusted_proxy: tuple[str, ...] = option(
        (),
        several("ADDRESS"),
        "trust X-Forwarded-For, -Host, -Proto and -Prefix of this address or network; unix for "
        "connections through --host unix:PATH; may be repeated",
        default="none",
        group="access",
    )
    answers: Mapping[str, Any] = field(default_factory=dict)
    media: MediaBudget = MediaBudget()
    upload_bytes: int = 256 << 20
    followers: int = 256
    downloads: int = 32
    connections: ConnectionLimits = ConnectionLimits()
    json: JsonLimits = JsonLimits()
    tag: str = ""

    def __post_init__(self) -> None:
        check_options(self)
        self._check_socket()
        self.make_keys()
        if not (self.loopback or self.needs_key or self.insecure_no_auth):
            raise OptionError(
                f"host {self.host!r:.80} can be reached by others; give --api-key-file, or "
                "--insecure-no-auth to let everyone in"
            )
        self.trusted_proxies  # noqa: B018  # raises what is wrong with them

    def _check_socket(self) -> None:
        if self.host == UNIX:
            raise OptionError(f"host: found {UNIX!r}, expected a path behind it")
        try:
            self.unix_socket  # noqa: B018  # raises where its ~ is nobody's
        except RuntimeError as error:
            raise OptionError(
                f"host: found {self.host!r:.80}, expected a path whose ~ names a user of "
                "this machine"
            ) from error
        if self.unix_socket is not None and not hasattr(socket, "AF_UNIX"):
            raise OptionError(f"host {self.host!r:.80}: this system has no sockets in files")
        if self.unix_socket is not None and self.port not in (0, ServerSettings.port):
            raise OptionError(
                f"port: found {self.port} with host {self.host!r:.80}, which has none; leave one "
                "out"
            )
        if self.unix_socket is None and self.socket_mode != 0o600:
            raise OptionError(
                f"socket_mode: found with host {self.host!r:.80}, expected --host {UNIX}PATH"
            )

    @property
    def unix_socket(self) -> Path | None:
        """Return where it is, if it is a file."""
        if not self.host.startswith(UNIX):
            return None
        return Path(self.host.removeprefix(UNIX)).expanduser().absolute()

    @property
    def needs_key(self) -> bool:
        """Return whether nobody is let in without one."""
        return bool(self.api_keys or self.named_keys or self.api_key_file)

    @property
    def may_add_models(self) -> bool:
        """Return whether clients may have models fetched that nobody has named at the start."""
        if self.add_models is None:
            return self.loopback and not self.needs_key
        return self.add_models

    def make_keys(self) -> Keys:
        """Raises OptionError."""
        from mtmd.web.api_keys import Keys

        return Keys(self.api_keys, self.named_keys, self.api_key_file)

    @property
    def loopback(self) -> bool:
        """Return whether this machine alone reaches it."""
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
                f"as 10.0.0.0/8, or unix for connections through --host {UNIX}PATH"
            ) from error

    def allows_origin(self, origin: str | None) -> bool:
        """Return whether pages of another origin may use the server."""
        if origin is None:
            return False
        every = f"{origin.partition('://')[0]}://*"
        return not {"*", origin, every}.isdisjoint(self.cors_origins)

    def answers_to(self, host: str) -> bool:
        """Return whether it may be called by this name or address, which has no port."""
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
        """Return the body bytes of one request: its pictures in base64, and text."""
        return self.media.bytes * 4 // 3 + self.json.bytes


def _own_names() -> frozenset[str]:
    """Names of this machine beside localhost: its own, the same in its network (mDNS), and how
    containers call it. Others that end with .local anybody in the network can give to a page.
    """
    name = socket.gethostname().lower()
    return frozenset((name, f"{name.partition('.')[0]}.local", _CONTAINERS))


def is_loopback(host: str) -> bool:
    """Return whether a name or address means this very machine, seen from itself."""
    if host.lower().rstrip(".") == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
