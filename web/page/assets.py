"""The page's files, below an address that changes with any of them: a browser keeps them for good
and asks for none of them again. Compressed where that helps; read once, by the first server.
"""

from __future__ import annotations

import gzip
import hashlib
import mimetypes
import re
import threading
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePosixPath
from posixpath import join, normpath

from flask import Blueprint, Response, request

from mtmd.web.access import without_key
from mtmd.web.errors import ApiError
from mtmd.web.intake.request_limits import Body, takes

FOLDER = Path(__file__).parents[1] / "static"
FOREVER = "public, max-age=31536000, immutable"
DIGEST_CHARS = 12
COMPRESSED = ("text/", "application/json", "image/svg+xml")
TYPES = {".js": "text/javascript", ".woff2": "font/woff2", ".mp4": "video/mp4", "": "text/plain"}
_IMPORT = re.compile(r'^import [^";]*"([^"]+)";$', re.M)


@dataclass(frozen=True)
class Asset:
    data: bytes
    kind: str


class Assets:
    """Assets by their path in `folder`. Thread-safe."""

    def __init__(self, folder: Path = FOLDER) -> None:
        self._files = {
            path.relative_to(folder).as_posix(): Asset(path.read_bytes(), _kind(path))
            for path in sorted(folder.rglob("*"))
            if path.is_file()
        }
        whole = hashlib.sha256()
        for name, asset in self._files.items():
            whole.update(f"{name}\0{len(asset.data)}\0".encode() + asset.data)
        self.digest = whole.hexdigest()[:DIGEST_CHARS]
        self._compressed: dict[str, bytes] = {}
        self._lock = threading.Lock()

    def get(self, name: str) -> Asset | None:
        return self._files.get(name)

    def compressed(self, name: str) -> bytes | None:
        """None for what gets no smaller."""
        asset = self._files[name]
        if not asset.kind.startswith(COMPRESSED):
            return None
        with self._lock:
            if name not in self._compressed:
                self._compressed[name] = gzip.compress(asset.data, 6, mtime=0)
            return self._compressed[name]

    def modules(self, entry: str) -> list[str]:
        """Return what a script imports, and what that does: to be fetched at once rather than one
        after another.
        """
        result: dict[str, None] = {}
        left = [entry]
        while left:
            name = left.pop()
            text = self._files[name].data.decode()
            for target in _IMPORT.findall(text):
                module = normpath(join(str(PurePosixPath(name).parent), target))
                if module not in result:
                    result[module] = None
                    left.append(module)
        return list(result)


@cache
def shipped() -> Assets:
    """The page's own, read and compressed once for all applications of the process: the one that
    answers while a model is loaded, and the one that follows it.
    """
    return Assets()


def blueprint(assets: Assets) -> Blueprint:
    routes = Blueprint("assets", __name__)

    @routes.app_context_processor
    def _names() -> dict[str, object]:
        return {"asset": _address, "modules": assets.modules}

    def _address(name: str) -> str:
        """Relative to the page that is asked for: a proxy may have put all of it under a path."""
        if assets.get(name) is None:
            raise KeyError(name)
        root = "../" * (request.path.count("/") - 1) or "./"
        return f"{root}static/{assets.digest}/{name}"

    @routes.get("/static/<path:filename>")
    @takes(Body.NOTHING)
    @without_key
    def static(filename: str) -> Response:
        """Return it with the digest, for good; without it, or with another, to be asked for
        again.
        """
        first, _, rest = filename.partition("/")
        saved = first == assets.digest
        # A page of an older server goes on with what there is now.
        name = rest if saved or assets.get(filename) is None else filename
        asset = assets.get(name)
        if asset is None:
            raise ApiError(404, "there is no such file")
        accepts = request.accept_encodings.quality("gzip") > 0
        smaller = assets.compressed(name) if accepts else None
        response = Response(smaller or asset.data, mimetype=asset.kind)
        response.headers["Cache-Control"] = FOREVER if saved else "no-cache"
        response.vary.add("Accept-Encoding")
        if smaller:
            response.headers["Content-Encoding"] = "gzip"
        response.set_etag(f"{assets.digest}{'-gzip' if smaller else ''}")
        # Safari plays no video of which it cannot have a part.
        parts = len(asset.data) if asset.kind.startswith("video/") else None
        response.make_conditional(request, accept_ranges=parts is not None, complete_length=parts)
        return response

    return routes


def _kind(path: Path) -> str:
    return (
        TYPES.get(path.suffix) or mimetypes.guess_type(path.name)[0] or "application/octet-stream"
    )
