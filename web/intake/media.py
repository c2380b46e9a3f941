"""From what a request calls a picture to pixels, within what the whole request may bring.

Count first, then bytes, then pixels as the headers tell them; only what is within all three is
decoded. What is here already (data URLs, uploads, files) is measured before anything is fetched.
"""

from __future__ import annotations

import base64
import binascii
import os
import stat
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from mtmd import BusyError, ImageError
from mtmd.prompt.media import Picture, load_image, picture_size
from mtmd.web.errors import ApiError
from mtmd.web.intake.fetch import Fetcher
from mtmd.web.intake.uploads import PREFIX, Uploads
from mtmd.web.settings import ServerSettings

DECODE_AT_ONCE = max(2, os.cpu_count() or 1)
_SHOWN = 24  # characters of a URL whose scheme is not known


@dataclass(frozen=True)
class Reference:
    """What stands for a picture in a request: a URL or the id of an upload. `place` names it:
    "messages[0].content[1].image_url".
    """

    place: str
    url: str


@dataclass(frozen=True)
class _Found:
    """`count`: of its bytes, known before it is read, None for what has to be fetched. `read` takes
    the bytes left and the deadline for fetching.
    """

    place: str
    count: int | None
    read: Callable[[int, float], bytes]


class Media:
    """Opens pictures for requests. `fetcher` None: nothing is fetched."""

    def __init__(self, settings: ServerSettings, uploads: Uploads, fetcher: Fetcher | None) -> None:
        self._budget, self._uploads, self._fetcher = settings.media, uploads, fetcher
        self._root = settings.media_path.resolve() if settings.media_path else None
        self._pixels_held, self._lock = 0, threading.Lock()
        self._decoding = threading.BoundedSemaphore(DECODE_AT_ONCE)

    @contextmanager
    def opened(self, references: Sequence[Reference], owner: str) -> Iterator[list[Picture]]:
        """The pictures in order; their pixels count as held until the context is left. Raises
        ApiError, ImageError and BusyError.
        """
        found = self._read(self._check_bytes(references, owner))
        pixels = self._check_pixels(found)
        with self._held(pixels):
            yield [self._decode(place, data) for place, data in found]

    def _check_bytes(self, references: Sequence[Reference], owner: str) -> list[_Found]:
        budget = self._budget
        if len(references) > budget.images:
            raise ApiError(
                413,
                f"found {len(references)} pictures, expected at most {budget.images} in one "
                "request; send fewer",
                param="messages",
                code="too_many_images",
            )
        found = [self._find(reference, owner) for reference in references]
        if (total := sum(f.count or 0 for f in found)) > budget.bytes:
            raise _too_many_bytes(total, budget.bytes)
        return found

    def _read(self, found: Sequence[_Found]) -> list[tuple[str, bytes]]:
        """Everything that is here, then, with what is left of the budget, what has to be
        fetched.
        """
        left, deadline = (
            self._budget.bytes,
            time.monotonic() + (self._fetcher.limit_s if self._fetcher else 0),
        )
        data: dict[int, bytes] = {}
        for index, one in sorted(enumerate(found), key=lambda pair: pair[1].count is None):
            data[index] = one.read(left, deadline)
            left -= len(data[index])
            if left < 0:
                raise _too_many_bytes(self._budget.bytes - left, self._budget.bytes)
        return [(one.place, data[index]) for index, one in enumerate(found)]

    def _check_pixels(self, found: Sequence[tuple[str, bytes]]) -> int:
        total = 0
        for place, data in found:
            with _placed(place):
                width, height = picture_size(data, self._budget.each, "picture")
            total += width * height
            if total > self._budget.pixels:
                raise ApiError(
                    413,
                    f"the pictures have more than {self._budget.pixels:,} pixels together; scale "
                    "them down",
                    param=place,
                    code="too_many_pixels",
                )
        return total

    @contextmanager
    def _held(self, pixels: int) -> Iterator[None]:
        most = self._budget.server_pixels
        with self._lock:
            if self._pixels_held + pixels > most:
                raise BusyError(
                    f"{self._pixels_held:,} pixels wait to be seen and {most:,} may, so these "
                    f"{pixels:,} have to come later"
                )
            self._pixels_held += pixels
        try:
            yield
        finally:
            with self._lock:
                self._pixels_held -= pixels

    def _decode(self, place: str, data: bytes) -> Picture:
        with self._decoding, _placed(place):
            return load_image(data, self._budget.each, "picture")

    def _find(self, reference: Reference, owner: str) -> _Found:
        url, place = reference.url, reference.place
        scheme = url[:_SHOWN].partition(":")[0].lower()
        if url.startswith(PREFIX):
            upload = self._uploads.get(owner, url)
            return _Found(place, len(upload.data), lambda *_: upload.data)
        if scheme == "data":
            return _data_url(url, place)
        if scheme in ("http", "https"):
            return self._remote(url, place)
        if scheme == "file":
            return self._file(url, place)
        raise ApiError(
            400,
            f"{place}: expected a data URL, an http(s) address or the id of an uploaded file",
            param=place,
        )

    def _remote(self, url: str, place: str) -> _Found:
        fetcher = self._fetcher
        if fetcher is None:
            raise ApiError(
                400,
                f"{place}: this server does not fetch pictures; send a data URL or upload the file",
                param=place,
                code="remote_media_off",
            )
        return _Found(place, None, lambda left, deadline: fetcher.fetch(url, place, left, deadline))

    def _file(self, url: str, place: str) -> _Found:
        """A regular file below the media folder, links followed first. Whatever is wrong is told in
        the same words.
        """
        refusal = ApiError(
            400,
            f"{place}: there is no such file that may be read",
            param=place,
            code="file_not_found",
        )
        if self._root is None:
            raise ApiError(
                400,
                f"{place}: this server does not read files by file://; send a data URL",
                param=place,
                code="media_path_off",
            )
        try:
            parts = urlsplit(url)
            path = Path(unquote(parts.path, errors="strict"))
            if parts.netloc not in ("", "localhost") or parts.query or parts.fragment:
                raise refusal
            inside = path if path.is_relative_to(self._root) else self._root / str(path).lstrip("/")
            path = inside.resolve(strict=True)
            found = path.stat()
        except (OSError, ValueError, RuntimeError):  # RuntimeError: a loop of links
            raise refusal from None
        if not path.is_relative_to(self._root) or not stat.S_ISREG(found.st_mode):
            raise refusal
        return _Found(place, found.st_size, lambda left, _: _read_file(path, left, refusal))


def _data_url(url: str, place: str) -> _Found:
    """RFC 2397, base64 only. What type it says it is does not matter: the first bytes tell."""
    head, comma, encoded = url.partition(",")
    if not comma or not head[-7:].lower() == ";base64":
        raise ApiError(
            400,
            f"{place}: expected a data URL of the form data:image/png;base64,...",
            param=place,
            code="invalid_image",
        )

    def read(*_: float) -> bytes:
        try:
            plain = encoded.translate({10: None, 13: None}) if "\n" in encoded else encoded
            return base64.b64decode(plain, validate=True)
        except (binascii.Error, ValueError):
            raise ApiError(
                400, f"{place}: found data that is not base64", param=place, code="invalid_image"
            ) from None

    return _Found(place, len(encoded) * 3 // 4, read)


def _read_file(path: Path, most: int, refusal: ApiError) -> bytes:
    """`path` has no links in it any more: one that has come since is not followed."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:  # noqa: PTH123  # flags
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise refusal
            return file.read(most + 1)
    except OSError:
        raise refusal from None


def _too_many_bytes(found: int, most: int) -> ApiError:
    return ApiError(
        413,
        f"the pictures have {found:,} bytes together, expected at most {most:,}; scale them down "
        "or send fewer",
        param="messages",
        code="images_too_large",
    )


@contextmanager
def _placed(place: str) -> Iterator[None]:
    """Says of which picture of the request an ImageError tells."""
    try:
        yield
    except ImageError as error:
        raise ApiError(400, f"{place}: {error}", param=place, code="invalid_image") from error
