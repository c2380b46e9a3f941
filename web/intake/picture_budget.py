"""Describes what pictures may bring, for both products: those of one request, and those of all at
once.

Nothing is decoded before it is known to be within the budget: a few bytes can promise gigabytes of
pixels.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from mtmd import BusyError, Picture
from mtmd.base.cores import usable_cores
from mtmd.base.turns import Turns, current_owner
from mtmd.prompt.audio_input import AudioFacts, check_audio
from mtmd.prompt.load_image import load_isolated, picture_size
from mtmd.prompt.video_input import VideoFacts, check_video
from mtmd.service.turnover import Turnover
from mtmd.web.intake.slots import Askers
from mtmd.web.settings import MediaBudget

# Pictures of one client beside one for each core, so that few of his wait for a worker with their
# pixels counted; which of several clients' run is the workers' own rule:
# `mtmd.base.isolation.worker_slots`.
ALONGSIDE_CORES = 8


@dataclass(frozen=True)
class Excess:
    """`what`: "pictures", "bytes of pictures", "pixels", "videos" or "audio files"."""

    what: str
    count: int
    maximum: int


class PictureBudget:
    """Thread-safe; one for the whole server. `decoded_at_once`: pictures of one client."""

    def __init__(self, limits: MediaBudget) -> None:
        self.limits = limits
        self._pixels_stored, self._lock = Counter[str](), threading.Lock()
        self._askers = Askers()
        self._turnover = Turnover()
        self.decoded_at_once = max(2, usable_cores().usable) + ALONGSIDE_CORES
        self._decoding = Turns(None, limits.decoding_pixels, each=self.decoded_at_once)

    def excess(
        self,
        *,
        pictures: int = 0,
        bytes_: int = 0,
        pixels: int = 0,
        videos: int = 0,
        audio: int = 0,
    ) -> Excess | None:
        """The first limit of one request that its pictures exceed together, None where they are
        within all.
        """
        limits = self.limits
        return next(
            (
                Excess(what, count, maximum)
                for what, count, maximum in (
                    ("pictures", pictures, limits.images),
                    ("bytes of pictures", bytes_, limits.bytes),
                    ("pixels", pixels, limits.pixels),
                    ("videos", videos, limits.videos),
                    ("audio files", audio, limits.audio),
                )
                if count > maximum
            ),
            None,
        )

    def size(self, data: bytes, name: str = "picture") -> tuple[int, int]:
        """(width, height) from the header of one picture file. Raises ImageError, also for one
        that is over the budget by itself.
        """
        return picture_size(data, self.limits.each, name)

    def check_video(self, data: bytes, name: str = "video") -> VideoFacts:
        """Return what a video says of itself; its first frame is decoded. Raises VideoError,
        BusyError.
        """
        with self.stored(self.limits.video_pixels):
            return check_video(data, self.limits.video, name)

    def check_audio(self, data: bytes, name: str = "audio") -> AudioFacts:
        """Return what is known of audio, all of it decoded. Raises AudioError, BusyError."""
        with self.stored(self.limits.audio_pixels):
            return check_audio(data, self.limits.audio_of(1), name)

    def decode(self, data: bytes, page: int = 0) -> Picture:
        """Waits while as many pictures, or pixels, are being decoded as may at once, in turn with
        other clients. `page` of a PDF, from 0 on. Raises ImageError.
        """
        width, height = self.size(data)
        with self._decoding.one(width * height):
            return load_isolated(data, self.limits.each, "picture", page)

    @property
    def stored_bytes(self) -> int:
        """Return an upper bound of the bytes of the pixels that are counted: those that are
        decoded.
        """
        with self._lock:
            return 3 * self._pixels_stored.total()

    def decode_counted(self, data: bytes, page: int = 0) -> Picture:
        """Do what `decode` does, for a picture whose pixels are nobody's yet. Raises BusyError."""
        width, height = self.size(data)
        with self.stored(width * height):
            return self.decode(data, page)

    @contextmanager
    def stored(self, pixels: int) -> Iterator[None]:
        """Count `pixels` among those of all requests under way. Raises BusyError where these would
        be too many, or more than half of what may be for a client who has others under way while
        other clients ask, too.
        """
        owner = current_owner()
        with self._lock:
            own, maximum = self._pixels_stored[owner], self.limits.server_pixels
            rooms = [("", self._pixels_stored.total(), maximum)]
            if self._askers.others_than(owner) and own:
                rooms.append((" for this client", own, maximum // 2))
            for whose, stored, room in rooms:
                if stored + pixels > room:
                    raise BusyError(
                        f"{stored:,} pixels{whose} are waiting and {room:,} may "
                        f"wait; send these {pixels:,} later",
                        self._turnover.wait_s(pixels),
                    )
            if not self._pixels_stored:
                self._turnover.begin()
            self._pixels_stored[owner] += pixels
        try:
            yield
        finally:
            with self._lock:
                self._pixels_stored[owner] -= pixels
                self._pixels_stored += Counter()  # without those that hold none
                self._turnover.freed(pixels)
