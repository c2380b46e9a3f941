"""What the engine runs next: which sequences are let in, how many tokens of each go into a batch,
who gives way. Plain Python, no tensors.

Every running sequence gets its next token before anybody's prompt is read on. Prompts share what is
left of a batch, so that a long one does not keep short ones waiting. A stretch of tokens that see
each other in both directions is never cut: a batch grows for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from mtmd.llm.engine.pages import Pages

LEAST_SHARE = 32  # tokens of a prompt that are worth a place in a batch
BESIDE = 128  # tokens of a batch in which somebody waits for his next one


@dataclass(eq=False)
class Item:
    """A sequence as the batcher sees it. `total` counts its tokens, prompt and answer so far,
    `done` those whose keys and values are kept.

    `blocks` are stretches (start, stop) not to be cut; `keys` those of the prompt's full pages;
    `slot` is its place among recurrent states, None while it waits. `snapshot_at`: the token at
    whose end its recurrent states are to be looked at, if it has any.
    """

    total: int
    blocks: tuple[tuple[int, int], ...] = ()
    keys: Sequence[bytes] = ()
    done: int = 0
    pages: list[int] = field(default_factory=list)
    slot: int | None = None
    snapshot_at: int | None = None

    @property
    def left(self) -> int:
        """Tokens still to be read, 1 while it decodes."""
        return self.total - self.done

    def chunk(self, room: int) -> int:
        """How many of its next tokens to run given `room`: no more, but to the end of a block that
        begins at the first of them.
        """
        stop = min(self.done + room, self.total)
        if self.snapshot_at is not None and self.done < self.snapshot_at < stop:
            stop = self.snapshot_at
        for start, end in self.blocks:
            if start < stop < end:
                return (start if start > self.done else end) - self.done
        return stop - self.done


@dataclass(frozen=True)
class Step:
    """One batch: `parts` are (sequence, tokens). `admitted` have been given a slot, `preempted`
    have lost theirs and wait again.
    """

    parts: tuple[tuple[Item, int], ...]
    admitted: tuple[Item, ...]
    preempted: tuple[Item, ...]

    def smaller(self) -> Step | None:
        """About half of it, where there is too little memory for all; None where nothing can be
        left out. Prompts are read in shorter pieces, and where they are short already, those who
        come last wait.
        """
        parts = tuple(
            (item, item.chunk(count // 2) if count > LEAST_SHARE else count)
            for item, count in self.parts
        )
        if sum(count for _, count in parts) == sum(count for _, count in self.parts):
            parts = parts[: (len(parts) + 1) // 2]
        return Step(parts, self.admitted, self.preempted) if parts != self.parts else None


class Batcher:
    """`pages` of the cache, `slots` sequences at once, at most `tokens` in a batch. `recurrent`:
    sequences can be taken up again only where one of the `snapshots`, known by a page's key, was
    taken, and not at the end of any page.
    """

    def __init__(self, pages: Pages, slots: int, tokens: int, recurrent: bool = False):
        self.pages, self.tokens, self.recurrent = pages, tokens, recurrent
        self.snapshots: set[bytes] = set()
        self.waiting: deque[Item] = deque()
        self.running: list[Item] = []
        self._slots = list(range(slots))

    def add(self, item: Item) -> None:
        if self.recurrent:
            item.snapshot_at = (item.total - 1) // self.pages.size * self.pages.size or None
        self.waiting.append(item)

    def remove(self, item: Item) -> None:
        """A sequence that ended or was cancelled, wherever it is."""
        if item in self.running:
            self._vacate(item)
        elif item in self.waiting:
            self.waiting.remove(item)

    def step(self) -> Step:
        """Decide on the next batch; the caller runs it and then calls `ran`. No parts: there is
        nothing to do.
        """
        preempted: list[Item] = []
        parts = [
            (item, 1)
            for item in list(self.running)
            if item.left == 1 and item in self.running and self._grow(item, 1, preempted)
        ]
        parts = [
            (item, count) for item, count in parts if item in self.running
        ]  # a later one may have pushed out an earlier
        admitted = self._admit() if not preempted else []
        decoding = {item for item, _ in parts}
        room = (min(self.tokens, BESIDE) if decoding else self.tokens) - len(parts)
        readers = [item for item in self.running if item.left and item not in decoding]
        for index, item in enumerate(readers):
            share = max(room // (len(readers) - index), min(LEAST_SHARE, room))
            count = item.chunk(share) if share > 0 else 0
            if count > room and len(parts) > len(decoding):
                continue  # the batch grows for one block that does not fit, not for a second
            if count > 0 and self._grow(item, count, preempted, may_preempt=False):
                parts.append((item, count))
                room -= count
        return Step(tuple(parts or self._oldest(preempted)), tuple(admitted), tuple(preempted))

    def _oldest(self, preempted: list[Item]) -> list[tuple[Item, int]]:
        """Where nobody finds room, those who came first go on at the cost of the others: else all
        would wait for each other.
        """
        item = next((i for i in self.running if i.left), None)
        if item is None:
            return []
        count = item.chunk(self.tokens)
        return [(item, count)] if self._grow(item, count, preempted) else []

    def ran(self, step: Step) -> None:
        """The batch has been run: its tokens' keys and values are kept, and full pages are
        known.
        """
        for item, count in step.parts:
            item.done += count
            self.remember(item)

    def remember(self, item: Item) -> None:
        """What is in an item's full pages is known by its keys from now on."""
        for page, key in zip(item.pages[: item.done // self.pages.size], item.keys, strict=False):
            self.pages.remember(page, key)

    def restart(self, item: Item) -> None:
        """A running sequence forgets what it has read, keeps its place, and gets pages for all its
        tokens. Raises IndexError if there are too few.
        """
        self.pages.release(item.pages)
        item.pages, item.done = [], 0
        item.pages = self.pages.take(self._pages_for(item.total))

    def _admit(self) -> list[Item]:
        """First come, first served: nobody overtakes one who waits for memory."""
        admitted = []
        while self.waiting and self._slots:
            item = self.waiting[0]
            found = self.pages.find(self._usable(item))
            need = self._pages_for(item.total) - len(found)
            if need > self.pages.available - self._reserve():
                self.pages.release(found)
                break
            self.waiting.popleft()
            item.pages = found
            item.done = len(found) * self.pages.size
            item.slot = self._slots.pop(0)
            self.running.append(item)
            admitted.append(item)
        return admitted

    def _usable(self, item: Item) -> Sequence[bytes]:
        """Keys of pages that end before the last token: one has to be read anew, for its logits."""
        keys = item.keys[: (item.total - 1) // self.pages.size]
        if not self.recurrent:
            return keys
        usable = 0
        for number, key in enumerate(keys, 1):
            if not self.pages.knows(
                key
            ):  # a page further on may be known all the same, and is of no use
                break
            usable = number if key in self.snapshots else usable
        return keys[:usable]

    def _reserve(self) -> int:
        """Pages that those let in still need for what they were let in with."""
        return sum(max(self._pages_for(item.total) - len(item.pages), 0) for item in self.running)

    def _grow(
        self, item: Item, count: int, preempted: list[Item], may_preempt: bool = True
    ) -> bool:
        """Pages for `count` more tokens; the youngest others give way for it. False where there are
        none to be had.
        """
        need = self._pages_for(item.done + count) - len(item.pages)
        while need > self.pages.available:
            victim = self.running[-1]
            if not may_preempt or victim is item:
                return False
            self.preempt(victim)
            preempted.append(victim)
        item.pages += self.pages.take(need) if need > 0 else []
        return True

    def preempt(self, item: Item) -> None:
        """A running sequence gives up its place and its pages, and is the next to get some."""
        self._vacate(item)
        item.done = 0
        self.waiting.appendleft(item)

    def _vacate(self, item: Item) -> None:
        self.running.remove(item)
        self.pages.release(item.pages)
        item.pages = []
        assert item.slot is not None
        self._slots.append(item.slot)
        self._slots.sort()
        item.slot = None

    def _pages_for(self, tokens: int) -> int:
        return -(-tokens // self.pages.size)
