"""Pictures of conversations, decoded for the model."""

from __future__ import annotations

import threading
from collections import OrderedDict

from mtmd import ImageError, Picture
from mtmd.web.intake.picture_budget import PictureBudget
from mtmd.web.store.conversation import StoredImage
from mtmd.web.store.store import Store

HELD_PIXELS = 32_000_000  # three bytes each


class PictureCache:
    """Those used last, as far as there is room: a long conversation does not decode its pictures
    for every turn. Thread-safe.
    """

    def __init__(self, store: Store, budget: PictureBudget) -> None:
        self._store, self._budget, self._lock = store, budget, threading.Lock()
        self._cached: OrderedDict[str, Picture] = OrderedDict()

    def add(self, data: bytes, name: str, owner: str) -> StoredImage:
        """The file of a picture into the store, once it is seen to decode, as one that `owner`
        brought. Raises ImageError.
        """
        picture = self._budget.decode(data)
        image = self._store.put_image(data, *picture.size, name[:200], owner)
        self._put(image.sha256, picture)
        return image

    def get(self, image: StoredImage) -> Picture:
        """Raises ImageError for one that the store does not have any more."""
        with self._lock:
            if image.sha256 in self._cached:
                self._cached.move_to_end(image.sha256)
                return self._cached[image.sha256]
        data = self._store.image_bytes(image.sha256)
        if data is None:
            raise ImageError(
                f"picture {image.name or image.sha256[:12]!r} is not here any more; edit the "
                "message and attach it again"
            )
        picture = self._budget.decode(data)
        self._put(image.sha256, picture)
        return picture

    def _put(self, sha256: str, picture: Picture) -> None:
        with self._lock:
            self._cached[sha256] = picture
            self._cached.move_to_end(sha256)
            while len(self._cached) > 1 and self._pixels() > HELD_PIXELS:
                self._cached.popitem(last=False)

    def _pixels(self) -> int:
        return sum(width * height for width, height in (p.size for p in self._cached.values()))
