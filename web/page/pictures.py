"""Pictures, videos and audio of conversations, made ready for the model."""

from __future__ import annotations

import threading
from collections import OrderedDict

from mtmd import ImageError, Picture
from mtmd.prompt.audio_input import Recording, is_audio_data, sent_audio
from mtmd.prompt.load_image import jpeg_bytes, picture_format, png_bytes
from mtmd.prompt.video_input import Footage, first_frame, is_video_data, sent_video
from mtmd.web.errors import ApiError
from mtmd.web.intake.picture_budget import PictureBudget
from mtmd.web.native_threads import in_thread
from mtmd.web.settings import ServerSettings
from mtmd.web.store.conversation import StoredImage
from mtmd.web.store.store import Store

STORED_PIXELS = 16_000_000  # three bytes each
STORED_MAX = 64  # pictures: small ones are decoded again at once
ROW_BYTES = 4096  # counted for each picture beside its own: a block of the disk
THUMBNAIL_SIDE = 160  # pixels
THUMBNAILS_SAVED = 1000  # of some 5 KB
IN_MEMORY_BYTES = 1 << 30  # of all, where nothing is kept on the disk


class PictureCache:
    """Cache of the pictures used last, as far as there is room: a long conversation does not decode
    its pictures for every turn. Thread-safe.
    """

    def __init__(self, store: Store, budget: PictureBudget, settings: ServerSettings) -> None:
        self._store, self._budget, self._lock = store, budget, threading.Lock()
        self._max_unsent = settings.upload_bytes
        self._maximum = settings.storage_bytes
        if not store.keeps:
            self._maximum = min(self._maximum, IN_MEMORY_BYTES)
        self._adding = threading.Lock()
        self._cached: OrderedDict[str, Picture] = OrderedDict()
        self._thumbnails: OrderedDict[str, bytes] = OrderedDict()

    def add(self, data: bytes, name: str, owner: str) -> StoredImage:
        """The file of a picture into the store, once it is seen to decode, as one that `owner`
        brought. Raises ImageError, BusyError, and ApiError where there is no room for it.
        """
        self._check_room(len(data))
        if is_audio_data(data[:64]):
            return self._add_audio(data, name[:200], owner)
        if is_video_data(data[:64]):
            return self._add_video(data, name[:200], owner)
        picture = self._budget.decode_counted(data)
        if picture_format(data) == "PDF":  # which no browser shows as a picture
            data = in_thread(png_bytes, picture.pixels)
        with self._adding:
            self._check_room(len(data))
            image = self._store.put_image(data, *picture.size, name[:200], owner)
        self._put(image.sha256, picture)
        return image

    def _add_video(self, data: bytes, name: str, owner: str) -> StoredImage:
        facts = self._budget.check_video(data, name or "video")
        with self._adding:
            self._check_room(len(data))
            return self._store.put_image(
                data, facts.width, facts.height, name, owner, facts.seconds
            )

    def _add_audio(self, data: bytes, name: str, owner: str) -> StoredImage:
        facts = self._budget.check_audio(data, name or "audio")
        with self._adding:
            self._check_room(len(data))
            return self._store.put_image(data, 0, 0, name, owner, facts.seconds)

    def recording(self, audio: StoredImage, count: int) -> Recording:
        """Return the recording for a prompt with `count` of them. Raises ImageError for one that
        the store does not have any more.
        """
        limits = self._budget.limits.audio_of(count)
        return sent_audio(self._bytes(audio), limits, audio.name or "the audio")

    def footage(self, video: StoredImage, videos: int) -> Footage:
        """Return the footage for a prompt with so many `videos`. Raises ImageError for one that the
        store does not have any more.
        """
        limits = self._budget.limits.video_of(videos)
        return sent_video(self._bytes(video), limits, video.name or "the video")

    def _bytes(self, image: StoredImage) -> bytes:
        data = self._store.image_bytes(image.sha256)
        if data is None:
            raise ImageError(
                f"picture {image.name or image.sha256[:12]!r} is not here any more; edit the "
                "message and attach it again"
            )
        return data

    def add_pages(
        self, data: bytes, name: str, owner: str, maximum: int
    ) -> tuple[list[StoredImage], int]:
        """The first `maximum` pages of a PDF as pictures, and how many it has. Raises as `add`."""
        pages, count, number = [], 1, 0
        while number < min(count, maximum):
            picture = self._budget.decode_counted(data, number)
            count, number = picture.pages, number + 1
            called = f"{name[:180]}, page {number}" if count > 1 else name
            page = in_thread(png_bytes, picture.pixels)
            pages.append(self.add(page, called, owner))
        return pages, count

    def get(self, image: StoredImage) -> Picture:
        """Return the picture for a prompt whose pixels are held. Raises ImageError for one that the
        store does not have any more.
        """
        with self._lock:
            if image.sha256 in self._cached:
                self._cached.move_to_end(image.sha256)
                return self._cached[image.sha256]
        picture = self._budget.decode(self._bytes(image))
        self._put(image.sha256, picture)
        return picture

    def thumbnail(self, sha256: str) -> bytes | None:
        """Return the thumbnail as JPEG, made once while it is among those asked for last."""
        with self._lock:
            if sha256 in self._thumbnails:
                self._thumbnails.move_to_end(sha256)
                return self._thumbnails[sha256]
        data = self._store.image_bytes(sha256)
        if data is None or is_audio_data(data[:64]):
            return None
        if is_video_data(data[:64]):
            picture = first_frame(data, self._budget.limits.video, "video")
        else:
            picture = self._budget.decode_counted(data)
        small = in_thread(jpeg_bytes, picture.pixels, THUMBNAIL_SIDE)
        with self._lock:
            self._thumbnails[sha256] = small
            while len(self._thumbnails) > THUMBNAILS_SAVED:
                self._thumbnails.popitem(last=False)
        return small

    def _check_room(self, count: int) -> None:
        stored = self._store.picture_totals()
        new = count + ROW_BYTES
        if stored.unsent_bytes + stored.unsent * ROW_BYTES + new > self._max_unsent:
            raise ApiError(
                413,
                f"{stored.unsent_bytes:,} bytes of pictures are attached to no message yet, and "
                f"{self._max_unsent:,} may be; send them, or wait an hour",
                code="storage_full",
            )
        if stored.bytes + stored.count * ROW_BYTES + new > self._maximum:
            raise ApiError(
                507,
                f"the pictures of all conversations have {stored.bytes:,} "
                f"bytes, and {self._maximum:,} can be stored; delete "
                "conversations that you no longer need",
                code="storage_full",
            )

    def _put(self, sha256: str, picture: Picture) -> None:
        with self._lock:
            self._cached[sha256] = picture
            self._cached.move_to_end(sha256)
            while len(self._cached) > 1 and (
                len(self._cached) > STORED_MAX or self._bytes_stored() > 3 * STORED_PIXELS
            ):
                self._cached.popitem(last=False)

    @property
    def stored_bytes(self) -> int:
        """Return the held bytes of pictures that are decoded, and of thumbnails."""
        with self._lock:
            return self._bytes_stored() + sum(map(len, self._thumbnails.values()))

    def _bytes_stored(self) -> int:
        return sum(3 * width * height for width, height in (p.size for p in self._cached.values()))
