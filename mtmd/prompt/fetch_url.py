"""Fetches pictures, videos and audio from the web for whoever names their addresses, without
letting him reach into our own network.

The address that is checked is the one that is connected to: a name is looked up once, every address
it has must be public, the socket goes to one of those, and its peer is checked again. Redirects
start over. No proxy is used, nothing is cached, no cookie kept.
"""

from __future__ import annotations

import http.client
import ipaddress
import queue
import re
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from typing import TypeAlias
from urllib.parse import SplitResult, urljoin, urlsplit

from mtmd.base.errors import ImageError
from mtmd.base.text import one_line
from mtmd.clip.audio.signatures import container_format
from mtmd.clip.image.signatures import picture_format
from mtmd.clip.video.signatures import video_format
from mtmd.prompt.url_kinds import url_name

Address: TypeAlias = "ipaddress.IPv4Address | ipaddress.IPv6Address"

LIMIT_S = 15.0
LONGEST_URL = 2048
MAX_REDIRECTS = 3
HEAD_BYTES = 64  # enough for the formats of pictures to differ
WORDS = {"image": "picture", "video": "video", "audio": "audio"}
_ACCEPTED = {"image": "image/*", "video": "video/*,image/*", "audio": "audio/*,video/*"}
_FORMATS = {"image": picture_format, "video": video_format, "audio": container_format}
_SMALLER = {
    "image": "scale the picture down",
    "video": "cut the video or encode it smaller",
    "audio": "cut the audio or encode it smaller",
}
_PORTS = {"http": 80, "https": 443}
_LOOK_UPS = threading.BoundedSemaphore(32)  # also those that nobody waits for any more
_HOST = re.compile(r"[A-Za-z0-9.\-]+|\[[0-9A-Fa-f:.]+\]")
_DENIED = tuple(
    map(
        ipaddress.ip_network,
        (  # IANA's special registries, where Python's is_global says otherwise or changed its mind
            "0.0.0.0/8",
            "100.64.0.0/10",
            "192.0.0.0/24",
            "192.88.99.0/24",
            "198.18.0.0/15",
            "240.0.0.0/4",
            "168.63.129.16/32",
            "64:ff9b::/96",
            "::ffff:0:0:0/96",  # IPv4 "translated", RFC 2765
            "64:ff9b:1::/48",
            "100::/64",
            "2001::/23",
            "2002::/16",
            "fec0::/10",
            "5f00::/16",
            "3fff::/20",
        ),
    )
)


@dataclass(frozen=True)
class Fetched:
    """Describes where a redirect leads, or a body."""

    location: str | None
    body: bytes


class Denied(Exception):
    """No client of a server gets to see why: it would learn which names and ports there are
    inside.
    """


NOT_FETCHED = (Denied, OSError, http.client.HTTPException, ValueError)


def fetched(url: str, max_bytes: int, deadline: float, kind: str = "image") -> bytes:
    """The picture, video or audio, by `kind`, at `url`, of at most `max_bytes`, by `deadline` (of
    time.monotonic).
    Raises ImageError for one of more bytes, and one of NOT_FETCHED.
    """
    for _ in range(MAX_REDIRECTS + 1):
        result = _get(url, max_bytes, deadline, kind)
        if result.location is None:
            return result.body
        target = urljoin(url, result.location)
        if url.lower().startswith("https:") and not target.lower().startswith("https:"):
            raise Denied("from https to http")
        url = target
    raise Denied("too many redirects")


class RemoteMedia:
    """Describes what addresses of pictures and videos lead to, for whoever gave them; `limit_s` for
    all of them, from the first one on.
    """

    def __init__(self, limit_s: float = LIMIT_S) -> None:
        self.limit_s = limit_s
        self._deadline: float | None = None

    def __call__(self, url: str, max_bytes: int, kind: str = "image") -> bytes:
        """Raises ImageError, with the reason."""
        if self._deadline is None:
            self._deadline = time.monotonic() + self.limit_s
        name = url_name(url)
        try:
            return fetched(url, max_bytes, self._deadline, kind)
        except ImageError as error:
            raise ImageError(f"{name}: {error}") from error
        except NOT_FETCHED as error:
            what = WORDS[kind]
            raise ImageError(
                f"{name}: the {what} could not be fetched ({_reason(error)}); only public http and "
                f"https addresses are asked, on their usual ports, for at most {self.limit_s:g} s"
            ) from error


def _reason(error: BaseException) -> str:
    if isinstance(error, TimeoutError):
        return "it took too long"
    if isinstance(error, OSError):
        return one_line(error.strerror or type(error).__name__, 80)
    return one_line(error, 80) or type(error).__name__


def check_url(url: str) -> SplitResult:
    """The parts of a URL that may be asked. Raises ValueError."""
    if (
        len(url) > LONGEST_URL
        or not url.isascii()
        or not url.isprintable()
        or " " in url
        or "\\" in url
    ):
        raise ValueError("not a URL as RFC 3986 has it")
    parts = urlsplit(url)
    host = parts.netloc.removesuffix(f":{_PORTS.get(parts.scheme)}")
    if (
        parts.scheme not in _PORTS or not _HOST.fullmatch(host) or not parts.hostname
    ):  # no user, no other port
        raise ValueError("not an address that is asked")
    return parts


def is_public(address: str) -> bool:
    """Return whether an IP address belongs to the internet at large: not private, local, shared,
    reserved, nor IPv4 inside IPv6.
    """
    try:
        ip: Address = ipaddress.ip_address(address)
    except ValueError:
        return False
    if isinstance(ip, ipaddress.IPv6Address) and (
        ip.ipv4_mapped or ip.sixtofour or ip.teredo or ip.scope_id
    ):
        return False
    if int(ip) >> 32 == 0 and ip.version == 6:  # ::a.b.c.d, deprecated
        return False
    return (
        ip.is_global
        and not ip.is_multicast
        and not any(ip.version == net.version and ip in net for net in _DENIED)
    )


def public_addresses(host: str, port: int, deadline: float) -> list[str]:
    """Return what `host` resolves to. Raises Denied if any of it is not public: such a name is set
    up to deceive, or is our own; and at the deadline.
    """
    addresses = _look_up(host, port, deadline)
    if not addresses or not all(map(is_public, addresses)):
        raise Denied("an address that is not public")
    return addresses


def _look_up(host: str, port: int, deadline: float) -> list[str]:
    """The system's own way to look names up, which knows no deadline: left alone where it takes
    longer. Raises Denied also where too many are left so.
    """
    result: queue.SimpleQueue[list[str] | OSError] = queue.SimpleQueue()

    def look_up() -> None:
        try:
            infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            result.put([str(info[4][0]) for info in infos])
        except OSError as error:
            result.put(error)
        except ValueError:  # no name can be written so
            result.put([])
        finally:
            _LOOK_UPS.release()

    if not _LOOK_UPS.acquire(timeout=max(0.0, deadline - time.monotonic())):
        raise Denied("too many names are being looked up")
    threading.Thread(target=look_up, name="mtmd names", daemon=True).start()
    try:
        answer = result.get(timeout=max(0.0, deadline - time.monotonic()))
    except queue.Empty:
        raise Denied("the name was not found in time") from None
    if isinstance(answer, OSError):
        raise answer
    return answer


def _get(url: str, max_bytes: int, deadline: float, kind: str = "image") -> Fetched:
    parts = check_url(url)
    port = _PORTS[parts.scheme]
    assert parts.hostname is not None
    address = public_addresses(parts.hostname, port, deadline)[0]
    with _connected(address, port, deadline) as plain:
        sock = plain
        if parts.scheme == "https":
            sock = ssl.create_default_context().wrap_socket(plain, server_hostname=parts.hostname)
        with closing(http.client.HTTPConnection(parts.hostname, port)) as connection:
            connection.sock = sock
            target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
            connection.request(
                "GET",
                target,
                headers={
                    "Accept": _ACCEPTED[kind],
                    "Accept-Encoding": "identity",
                    "User-Agent": "mtmd",
                    "Connection": "close",
                },
            )
            with connection.getresponse() as response:
                return _read(response, max_bytes, deadline, kind)


@contextmanager
def _connected(address: str, port: int, deadline: float) -> Iterator[socket.socket]:
    """A socket to this very address. Whatever stage it is in at the deadline, it is shut then:
    timeouts of single calls would add up.
    """
    left = deadline - time.monotonic()
    if left <= 0:
        raise Denied("no time left")
    with _connect(address, port, left) as sock:
        if not is_public(str(sock.getpeername()[0])):
            raise Denied("connected to an address that is not public")
        duplicate = sock.dup()  # wrapping in TLS takes the first over
        timer = threading.Timer(max(0.0, deadline - time.monotonic()), _shut, (duplicate,))
        timer.daemon = True
        timer.start()
        try:
            yield sock
        finally:
            timer.cancel()
            duplicate.close()


def _connect(address: str, port: int, timeout_s: float) -> socket.socket:
    """Not by `socket.create_connection`, which takes names and looks them up."""
    sock = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
    try:
        sock.settimeout(timeout_s)
        sock.connect((address, port))
    except BaseException:
        sock.close()
        raise
    return sock


def _shut(sock: socket.socket) -> None:
    with suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


def _read(
    response: http.client.HTTPResponse, max_bytes: int, deadline: float, kind: str = "image"
) -> Fetched:
    def is_known(data: bytes) -> bool:
        return _FORMATS[kind](data) is not None

    if response.status in (301, 302, 303, 307, 308):
        return Fetched(response.headers.get("Location") or "", b"")
    if (
        response.status != 200
        or response.headers.get("Content-Encoding", "identity").lower() != "identity"
    ):
        raise Denied(f"status {response.status}, or a body in another encoding")
    chunks, count, promised = [], 0, response.length
    while chunk := response.read1(1 << 16):
        chunks.append(chunk)
        count += len(chunk)
        if count > max_bytes:
            raise ImageError(
                f"found more than {max_bytes:,} bytes, what remains of this request's limit; "
                + _SMALLER[kind]
            )
        if count - len(chunk) < HEAD_BYTES <= count and not is_known(b"".join(chunks)):
            raise Denied(f"no {WORDS[kind]}")
    body = b"".join(chunks)
    if time.monotonic() >= deadline or count < (promised or 0) or not is_known(body):
        raise Denied(f"cut short, or no {WORDS[kind]}")
    return Fetched(None, body)
