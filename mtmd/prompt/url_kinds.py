"""Describes which texts are URLs, and what messages call them. Loads without numpy."""

from __future__ import annotations

import hashlib
import re

from mtmd.base.text import printable, shortened

DIGEST_CHARS = 16


def is_data_url(text: str) -> bool:
    return text[:5].lower() == "data:"


def is_address(text: str) -> bool:
    """Return whether it is one of the web's, as far as its beginning says."""
    return text[:8].lower().startswith(("http://", "https://"))


def is_url(source: object) -> bool:
    """Return whether a source of `describe` is a data URL or an address of the web, and no path."""
    return isinstance(source, str) and (is_data_url(source) or is_address(source))


def url_name(url: str) -> str:
    """Return the URL for messages, without what may be a secret, the user and all after the
    path.
    """
    return shortened(printable(_without_secrets(url)))


def url_identity(url: str) -> str:
    """A name of its own, in which nothing is secret, nor a whole picture: where something was left
    out, the first digits of the SHA-256 of the whole stand in its place. A user and password are
    left out of that, too: what is easy to guess could be found from it.
    """
    digest = hashlib.sha256(_without_user(url).encode("utf-8", "surrogatepass")).hexdigest()
    if is_data_url(url):
        kind = re.match(r"[\w.+-]+/[\w.+-]+", url[5:80])
        return f"data:{kind[0] if kind else ''};sha256={digest[:DIGEST_CHARS]}"
    plain = printable(_without_secrets(url))
    return url if plain == url else f"{plain}?{digest[:DIGEST_CHARS]}"


def _without_secrets(url: str) -> str:
    return re.split(r"[?#]", _without_user(url), maxsplit=1)[0]


def _without_user(url: str) -> str:
    """Return the without user of an address of any kind; its host stands behind the last @ before
    path and query.
    """
    kind, mark, rest = url.partition("://")
    if is_data_url(url) or not mark:
        return url
    end = re.search(r"[/?#]", rest)
    host = rest[: end.start()] if end else rest
    return f"{kind}://{host.rpartition('@')[2]}{rest[len(host) :]}"
