"""Pages of the key/value cache: who holds which, what is in them, and which can be used again.
Plain Python, no tensors.

A page is a fixed run of tokens' keys and values. Several sequences may hold the same page when
their prompts begin alike: a page that is full is known by a key, a digest of everything up to its
end. A page nobody holds keeps its contents until it is needed for others.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import blake2b

SCRATCH = 0  # a page that belongs to nobody: rows that only fill up a batch are written there


class Pages:
    """`count` pages of `size` tokens; the first is the scratch page."""

    def __init__(self, count: int, size: int):
        if count < 2 or size < 1:
            raise ValueError(f"{count} pages of {size} tokens; expected at least 2 of at least 1")
        self.count, self.size = count, size
        # a heap: low numbers first, so that neighbours stay together
        self._free = list(range(1, count))
        self._holders: dict[int, int] = {}
        self._key_of: dict[int, bytes] = {}
        self._by_key: dict[bytes, int] = {}
        # known, held by nobody, the least recently used first
        self._idle: OrderedDict[int, None] = OrderedDict()

    @property
    def available(self) -> int:
        """Pages that can be taken: free ones, and known ones that nobody holds."""
        return len(self._free) + len(self._idle)

    @property
    def stored(self) -> int:
        return len(self._holders)

    def take(self, number: int) -> list[int]:
        """Pages for new contents, held once, in ascending order where that is possible. Raises
        IndexError where fewer are `available`.
        """
        if number > self.available:
            raise IndexError(f"{number} pages wanted, {self.available} available")
        while len(self._free) < number:
            page, _ = self._idle.popitem(last=False)
            self._forget(page)
            heapq.heappush(self._free, page)
        taken = [heapq.heappop(self._free) for _ in range(number)]
        self._holders.update(dict.fromkeys(taken, 1))
        return taken

    def find(self, keys: Sequence[bytes]) -> list[int]:
        """The pages of the longest run of leading `keys` that are known, held for the caller."""
        pages: list[int] = []
        for key in keys:
            page = self._by_key.get(key)
            if page is None:
                break
            self._idle.pop(page, None)
            self._holders[page] = self._holders.get(page, 0) + 1
            pages.append(page)
        return pages

    def knows(self, key: bytes) -> bool:
        return key in self._by_key

    def register(self, page: int, key: bytes) -> None:
        """The page is full, and `key` tells what is in it. The first page known by a key stays the
        one.
        """
        if page not in self._holders:
            raise ValueError(f"page {page} is not in use")
        if key not in self._by_key and page not in self._key_of:
            self._by_key[key], self._key_of[page] = page, key

    def release(self, pages: Iterable[int]) -> None:
        """Let go of pages held. Those with known contents stay for later; the last given go first:
        a beginning is worth more.
        """
        for page in reversed(list(pages)):
            left = self._holders[page] - 1
            if left:
                self._holders[page] = left
                continue
            del self._holders[page]
            if page in self._key_of:
                self._idle[page] = None
            else:
                heapq.heappush(self._free, page)

    def _forget(self, page: int) -> None:
        del self._by_key[self._key_of.pop(page)]


def page_keys(
    identities: Sequence[bytes], size: int, salt: bytes = b"", known: Sequence[bytes] = ()
) -> list[bytes]:
    """A key for every full page of tokens: a digest of all identities up to its end. Equal tokens
    of another `salt` have other keys. `known`: keys of pages before, of which the result is a
    continuation.

    identities: what makes a token what it is: its id, or the picture it shows and its place in it.
    """
    keys, last = [], known[-1] if known else blake2b(salt, digest_size=16).digest()
    for start in range(0, len(identities) - size + 1, size):
        page = [
            part
            for identity in identities[start : start + size]
            for part in (len(identity).to_bytes(2, "little"), identity)
        ]
        last = blake2b(b"".join((last, *page)), digest_size=16).digest()
        keys.append(last)
    return keys
