"""Goes from what a request calls a picture, a video or audio to pixels and recordings, within what
the whole request may bring.

Count first, then bytes, then pixels as the headers give them; only what is within all three is
decoded; of a video the frames that are seen, later, as is audio. What is here already (data URLs,
uploads, files) is measured before anything is fetched.
"""

from __future__ import annotations

import os
import stat
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from mtmd import AudioError, ImageError, Picture, VideoError
from mtmd.prompt.audio_input import Audio, Recording, is_audio_data, sent_audio
from mtmd.prompt.data_url import base64_of, byte_count, decoded
from mtmd.prompt.fetch_url import WORDS
from mtmd.prompt.video_input import Footage, is_video_data, sent_video
from mtmd.web.errors import ApiError
from mtmd.web.intake.fetch_media import Fetcher
from mtmd.web.intake.json_limits import BASE64
from mtmd.web.intake.long_texts import CutText, beginning
from mtmd.web.intake.picture_budget import PictureBudget
from mtmd.web.intake.uploads import PREFIX, Uploads
from mtmd.web.native_threads import waiting

_TYPES = {"image": "image/png", "video": "video/mp4", "audio": "audio/wav"}
_SHOWN = 24  # characters of a URL whose scheme is not known


@dataclass(frozen=True)
class Reference:
    """Describes what stands for a picture in a request: a URL or the id of an upload. `location`
    names it: "messages[0].content[1].image_url". `kind`: "image", "video" or "audio"; None: what it
    is shows by itself. `frames`: fps and the like of a video, where they are asked for.
    """

    location: str
    url: str | CutText
    kind: str | None = "image"
    frames: Mapping[str, Any] = field(default_factory=dict)

    @property
    def word(self) -> str:
        """Return what it is, as far as the request says."""
        return WORDS[self.kind or "image"]

    @property
    def stored_bytes(self) -> int:
        """Return what it takes to keep."""
        return len(self.url) if isinstance(self.url, str) else self.url.byte_count

    @property
    def code(self) -> str:
        """Return the code of an error about it."""
        return f"invalid_{self.kind or 'image'}"


@dataclass(frozen=True)
class _Source:
    """`count`: of its bytes, known before it is read, None for what has to be fetched. `read` takes
    the bytes left and the deadline for fetching.
    """

    reference: Reference
    count: int | None
    read: Callable[[int, float], bytes]

    @property
    def location(self) -> str:
        return self.reference.location


@dataclass(frozen=True)
class Shown:
    """A picture decoded, a video to take frames of, or audio, as a part of a message."""

    kind: str
    source: Picture | Footage | Recording
    frames: Mapping[str, Any] = field(default_factory=dict)

    @property
    def part(self) -> dict[str, Any]:
        return {"type": self.kind, self.kind: self.source, **self.frames}


class Media:
    """Opens pictures for requests. `fetcher` None: nothing is fetched."""

    def __init__(
        self,
        budget: PictureBudget,
        uploads: Uploads,
        fetcher: Fetcher | None,
        folder: Path | None = None,
    ) -> None:
        """`folder`: what file:// may name; None for nothing."""
        self._budget, self._uploads, self._fetcher = budget, uploads, fetcher
        self._root = folder.resolve() if folder else None

    @contextmanager
    def opened(self, references: Sequence[Reference], owner: str) -> Iterator[list[Picture]]:
        """Do what `shown` does, for pictures alone."""
        with self.shown(references, owner) as shown:
            yield [one.source for one in shown if isinstance(one.source, Picture)]

    @contextmanager
    def shown(self, references: Sequence[Reference], owner: str) -> Iterator[list[Shown]]:
        """The pictures, videos and audio in order; their pixels count as held until the context is
        left.
        Raises ApiError, ImageError and BusyError.
        """
        files = self._read(self._sources(references, owner))
        kinds = [_kind(reference, data) for reference, data in files]
        counts = Counter(kinds)
        pictures = [
            (r.location, data)
            for (r, data), kind in zip(files, kinds, strict=True)
            if kind == "image"
        ]
        if excess := self._budget.excess(videos=counts["video"], audio=counts["audio"]):
            raise ApiError(
                413,
                f"found {excess.count} {excess.what}, expected at most {excess.maximum} in one "
                "request; send fewer",
                param="messages",
                code=f"too_many_{'videos' if excess.what == 'videos' else 'audio_files'}",
            )
        limits = self._budget.limits
        pixels = self._count_pixels(pictures)
        pixels += counts["video"] * limits.video_pixels + counts["audio"] * limits.audio_pixels
        with self._budget.stored(pixels):
            yield [
                self._open(reference, data, kind, counts[kind])
                for (reference, data), kind in zip(files, kinds, strict=True)
            ]

    @property
    def max_bytes(self) -> int:
        """The most bytes of one request's media."""
        return self._budget.limits.bytes

    @contextmanager
    def audio(self, data: bytes, location: str, rate: int) -> Iterator[Audio]:
        """The samples of an audio file; they count as held until the context is left. Raises
        ApiError and BusyError.
        """
        limits = self._budget.limits
        if len(data) > limits.bytes:
            raise ApiError(
                413,
                f"{location}: found more than {limits.bytes:,} bytes, expected no more; cut the "
                "audio or encode it smaller",
                param=location,
                code="audio_too_large",
            )
        with self._budget.stored(limits.audio_pixels):
            with _located(location):
                audio = sent_audio(data, limits.audio_of(1), location).audio(rate)
            yield audio

    def _open(self, reference: Reference, data: bytes, kind: str, count: int) -> Shown:
        """`count`: how many of its kind there are in the request."""
        if kind == "image":
            return Shown("image", self._decode(reference.location, data))
        limits = self._budget.limits
        with _located(reference.location):
            if kind == "audio":
                recording = sent_audio(data, limits.audio_of(count), reference.location)
                return Shown("audio", recording)
            footage = sent_video(data, limits.video_of(count), reference.location)
        return Shown("video", footage, reference.frames)

    def _sources(self, references: Sequence[Reference], owner: str) -> list[_Source]:
        """Within the budget of pictures, and of the bytes that are known already."""
        if excess := self._budget.excess(pictures=len(references)):
            raise ApiError(
                413,
                f"found {excess.count} pictures, expected at most {excess.maximum} in one "
                "request; send fewer",
                param="messages",
                code="too_many_images",
            )
        sources = [self._source(reference, owner) for reference in references]
        self._check_bytes(sum(source.count or 0 for source in sources))
        return sources

    def _read(self, sources: Sequence[_Source]) -> list[tuple[Reference, bytes]]:
        """Each with its bytes: first what is here, then, with what is left of the budget, what
        has to be fetched.
        """
        deadline = time.monotonic() + (self._fetcher.limit_s if self._fetcher else 0)
        maximum, count = self._budget.limits.bytes, 0
        data: dict[int, bytes] = {}
        for index, source in sorted(enumerate(sources), key=lambda pair: pair[1].count is None):
            data[index] = source.read(maximum - count, deadline)
            count += len(data[index])
            self._check_bytes(count)
        return [(source.reference, data[index]) for index, source in enumerate(sources)]

    def _check_bytes(self, count: int) -> None:
        if excess := self._budget.excess(bytes_=count):
            raise ApiError(
                413,
                f"the pictures have {excess.count:,} bytes together, expected at most "
                f"{excess.maximum:,}; scale them down or send fewer",
                param="messages",
                code="images_too_large",
            )

    def _count_pixels(self, files: Sequence[tuple[str, bytes]]) -> int:
        total = 0
        for location, data in files:
            with _located(location):
                width, height = self._budget.size(data)
            total += width * height
            if excess := self._budget.excess(pixels=total):
                raise ApiError(
                    413,
                    f"the pictures have more than {excess.maximum:,} pixels together; scale them "
                    "down",
                    param=location,
                    code="too_many_pixels",
                )
        return total

    def _decode(self, location: str, data: bytes) -> Picture:
        with _located(location):
            return self._budget.decode(data)

    def _source(self, reference: Reference, owner: str) -> _Source:
        url, location = reference.url, reference.location
        scheme = beginning(url)[:_SHOWN].partition(":")[0].lower()
        if isinstance(url, CutText):
            if scheme == "data":
                return _Source(reference, url.byte_count, lambda *_: url.data)
        elif url.startswith(PREFIX):
            upload = self._uploads.get(owner, url)
            return _Source(reference, upload.size, lambda *_: self._uploads.read(upload))
        elif scheme == "data":
            return _data_url(reference, url)
        elif scheme in ("http", "https"):
            return self._remote(reference, url)
        elif scheme == "file":
            return self._file(reference, url)
        alone = isinstance(url, CutText) or url[:_SHOWN].encode("utf-8", "replace").startswith(
            BASE64
        )
        value = "found base64 alone, " if alone else ""
        raise ApiError(
            400,
            f"{location}: {value}expected a data URL, as data:image/png;base64,..., an http(s) "
            "address or the id of an uploaded file",
            param=location,
        )

    def _remote(self, reference: Reference, url: str) -> _Source:
        fetcher, location = self._fetcher, reference.location
        if fetcher is None:
            raise ApiError(
                400,
                f"{location}: this server does not fetch {reference.word}s; send a data URL or "
                "upload the file",
                param=location,
                code="remote_media_off",
            )

        def fetched(left: int, deadline: float) -> bytes:
            return fetcher.fetch(url, location, left, deadline, kind=reference.kind or "image")

        return _Source(reference, None, fetched)

    def _file(self, reference: Reference, url: str) -> _Source:
        """A regular file below the media folder, links followed first. One message for whatever is
        wrong: it must not show what files there are.
        """
        location = reference.location
        refusal = ApiError(
            400, f"{location}: no such file that may be read", param=location, code="file_not_found"
        )
        if self._root is None:
            raise ApiError(
                400,
                f"{location}: this server does not read files by file://; send a data URL",
                param=location,
                code="media_path_off",
            )
        try:
            parts = urlsplit(url)
            path = Path(unquote(parts.path, errors="strict"))
            if parts.netloc not in ("", "localhost") or parts.query or parts.fragment:
                raise refusal
            inside = path if path.is_relative_to(self._root) else self._root / str(path).lstrip("/")
            path = inside.resolve(strict=True)
            status = path.stat()
        except (OSError, ValueError, RuntimeError):  # RuntimeError: a loop of links
            raise refusal from None
        if not path.is_relative_to(self._root) or not stat.S_ISREG(status.st_mode):
            raise refusal
        return _Source(
            reference, status.st_size, lambda left, _: waiting(_read_file, path, left, refusal)
        )


def _kind(reference: Reference, data: bytes) -> str:
    if reference.kind is not None:
        return reference.kind
    head = data[:64]
    return "audio" if is_audio_data(head) else "video" if is_video_data(head) else "image"


def _data_url(reference: Reference, url: str) -> _Source:
    location = reference.location
    try:
        encoded = base64_of(url)
    except ValueError:
        raise ApiError(
            400,
            f"{location}: expected a data URL of the form "
            f"data:{_TYPES[reference.kind or 'image']};base64,...",
            param=location,
            code=reference.code,
        ) from None

    def read(*_: float) -> bytes:
        try:
            return decoded(encoded)
        except ValueError:
            raise ApiError(
                400,
                f"{location}: found data that is not base64",
                param=location,
                code=reference.code,
            ) from None

    return _Source(reference, byte_count(len(encoded)), read)


def _read_file(path: Path, maximum: int, refusal: ApiError) -> bytes:
    """`path` has no links in it any more: one that has come since is not followed."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:  # noqa: PTH123  # flags
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise refusal
            return file.read(maximum + 1)
    except OSError:
        raise refusal from None


@contextmanager
def _located(location: str) -> Iterator[None]:
    """Names the picture of the request in an ImageError."""
    try:
        yield
    except (VideoError, AudioError) as error:  # which has the place before it already
        code = "invalid_video" if isinstance(error, VideoError) else "invalid_audio"
        raise ApiError(400, str(error), param=location, code=code) from error
    except ImageError as error:
        raise ApiError(400, f"{location}: {error}", param=location, code="invalid_image") from error
