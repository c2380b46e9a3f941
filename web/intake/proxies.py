"""Describes what stands between a client and the server: what proxies say of it is believed where
they are named, and the path under which they have put the server is taken off.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING
from urllib.parse import quote

from mtmd.web.settings import PEER, ServerSettings, Trusted

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIApplication, WSGIEnvironment

_FORWARDED = "HTTP_X_FORWARDED_"
_ALL = ("FOR", "HOST", "PORT", "PREFIX", "PROTO", "BY", "SERVER", "SSL")
_HOST_CHARS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.-_:[]")
_PREFIX_CHARS = _HOST_CHARS - {":", "[", "]"} | {"/", "~"}


class Proxies:
    """Around an application. X-Forwarded-For, -Host, -Proto and -Prefix of the proxies that are
    trusted take the place of what the connection says, each the one that the last of them wrote;
    everybody else's are taken out. `root_path` is where a proxy has the server, whether it leaves
    it in the path or not.
    """

    def __init__(self, app: WSGIApplication, settings: ServerSettings) -> None:
        self._app, self._root = app, settings.root_path
        self._trusted = settings.trusted_proxies

    def __call__(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        given = {name: environ.pop(_FORWARDED + name, "") for name in _ALL}
        environ.pop("HTTP_FORWARDED", None)
        root = self._root
        if is_trusted(environ.get("REMOTE_ADDR", ""), self._trusted):
            root = self._believe(environ, given) or root
        path = environ.get("PATH_INFO", "")
        if root:
            if path == root:
                return _moved(environ, f"{root}/", start_response)
            if path.startswith(f"{root}/"):
                environ["PATH_INFO"] = path[len(root) :]
            environ["SCRIPT_NAME"] = root
        return self._app(environ, start_response)

    def _believe(self, environ: WSGIEnvironment, given: dict[str, str]) -> str:
        """The path that the proxy says it took off."""
        client = client_of(given["FOR"], self._trusted)
        if client:
            environ["REMOTE_ADDR"] = client
        host, scheme, prefix = (_last(given[name]) for name in ("HOST", "PROTO", "PREFIX"))
        if host and _HOST_CHARS.issuperset(host):
            environ["HTTP_HOST"] = host
        if scheme in ("http", "https"):
            environ["wsgi.url_scheme"] = scheme
        prefix = prefix.rstrip("/")
        fits = prefix.startswith("/") and "//" not in prefix and _PREFIX_CHARS.issuperset(prefix)
        return prefix if fits else ""


def is_trusted(address: str, trusted: Collection[Trusted]) -> bool:
    """`address`: of whoever has the connection, or PEER."""
    if address == PEER:
        return PEER in trusted
    try:
        result = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    if isinstance(result, ipaddress.IPv6Address) and result.ipv4_mapped:
        result = result.ipv4_mapped
    return any(network != PEER and result in network for network in trusted)


def client_of(forwarded_for: str, trusted: Collection[Trusted]) -> str:
    """The last address of X-Forwarded-For that is not a trusted proxy's; "" where there is none:
    what stands before it anybody can write.
    """
    for entry in reversed(forwarded_for.split(",")):
        address = entry.strip()
        if address.startswith("["):  # with a port
            address = address[1:].partition("]")[0]
        elif address.count(":") == 1:
            address = address.partition(":")[0]
        try:
            ipaddress.ip_address(address)
        except ValueError:
            return ""
        if not is_trusted(address, trusted):
            return address
    return ""


def _last(values: str) -> str:
    return values.rpartition(",")[2].strip()


def _moved(environ: WSGIEnvironment, path: str, start_response: StartResponse) -> Iterable[bytes]:
    """Links of the page are relative to the path with the slash."""
    query = environ.get("QUERY_STRING", "")
    location = quote(path, safe="/~") + (f"?{query}" if query.isprintable() and query else "")
    start_response("308 PERMANENT REDIRECT", [("Location", location), ("Content-Length", "0")])
    return []
