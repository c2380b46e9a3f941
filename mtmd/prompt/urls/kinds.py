"""Which texts are URLs, and what messages call them. Loads without numpy."""

from __future__ import annotations

import re

from mtmd.kernels.text import printable, shortened


def is_data_url(text: str) -> bool:
    return text[:5].lower() == "data:"


def is_address(text: str) -> bool:
    """Whether it is one of the web's, as far as its beginning says."""
    return text[:8].lower().startswith(("http://", "https://"))


def is_url(source: object) -> bool:
    """Whether a source of `describe` is a data URL or an address of the web, and no path."""
    return isinstance(source, str) and (is_data_url(source) or is_address(source))


def url_name(url: str) -> str:
    """For messages: without what may be a secret, the user and all after the path."""
    plain = re.sub(r"//[^/@]*@", "//", re.split(r"[?#]", url, maxsplit=1)[0])
    return shortened(printable(plain))
