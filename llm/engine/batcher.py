"""What the engine runs next: which sequences are let in, how many tokens of each go into a batch,
who gives way. Plain Python, no tensors.

Every running sequence gets its next token before anybody's prompt is read on. Prompts share what is
left of a batch, so that a long one does not keep short ones waiting. Where batches of few rows run
faster than others, as they read the cache in place, a larger one is two of them: prompts by
themselves, and those who wait for their next token. A stretch of tokens that see
each other in both directions is never cut: a batch grows for it.

Places and what is read of prompts are shared out by owner, as long as several want some: an owner
alone has everything, many requests of one stand before nobody else's, and who has more places than
another who waits gives one up (`greedy`).
"""

from __future__ import annotations

from collections import Counter, abc
from dataclasses import dataclass

from mtmd.base.fair_queue import FairQueue, FairShares
from mtmd.llm.engine.pages import Pages
from mtmd.llm.engine.sequence import Sequence

LEAST_SHARE = 32  # tokens of a prompt that are worth a place in a batch
BESIDE = 128  # tokens of a batch in which somebody waits for his next one, if nobody says


@dataclass(frozen=True)
class Step:
    """One batch: `parts` are (sequence, tokens); those beyond what is left of a sequence are of its
    proposal. `admitted` have been given a slot, `preempted` have lost theirs and wait again.
    `apart`: it is run as two batches.
    """

    parts: tuple[tuple[Sequence, int], ...]
    admitted: tuple[Sequence, ...]
    preempted: tuple[Sequence, ...]
    apart: bool = False

    def batches(self) -> tuple[Step, ...]:
        """Of two the parts of prompts are first: their tokens are handed out with the others."""
        if not self.apart:
            return (self,)
        answers = tuple(part for part in self.parts if part[0].decoding)
        prompts = tuple(part for part in self.parts if not part[0].decoding)
        return Step(prompts, self.admitted, self.preempted), Step(answers, (), ())

    def alone(self) -> Step | None:
        """Those who wait for their next token, without the parts of prompts beside them; None where
        there are not both.
        """
        parts = tuple(part for part in self.parts if part[0].decoding)
        both = 0 < len(parts) < len(self.parts)
        return Step(parts, self.admitted, self.preempted) if both else None

    def smaller(self) -> Step | None:
        """About half of it, where there is too little memory for all; None where nothing can be
        left out. Proposals go first; then prompts are read in shorter pieces, and where they are
        short already, those who come last wait.
        """
        parts = tuple((sequence, min(count, sequence.left)) for sequence, count in self.parts)
        if parts != self.parts:
            return Step(parts, self.admitted, self.preempted)
        parts = tuple(
            (sequence, sequence.chunk(count // 2) if count > LEAST_SHARE else count)
            for sequence, count in self.parts
        )
        if sum(count for _, count in parts) == sum(count for _, count in self.parts):
            parts = parts[: (len(parts) + 1) // 2]
        return Step(parts, self.admitted, self.preempted) if parts != self.parts else None


class Batcher:
    """`pages` of the cache, `slots` sequences at once, at most `tokens` in a batch. `recurrent`:
    sequences can be taken up again only where one of the `snapshots`, known by a page's key, was
    taken, and not at the end of any page. `beside`: tokens of a batch in which so many are of those
    who wait for their next one. `few`: tokens of a batch that reads the cache in place, None where
    none does. `alone`: tokens of a batch where nobody waits and so many are left of prompts.
    """

    def __init__(
        self,
        pages: Pages,
        slots: int,
        tokens: int,
        recurrent: bool = False,
        beside: abc.Callable[[int], int] = lambda _: BESIDE,
        few: int | None = None,
        alone: abc.Callable[[int], int] = lambda left: left,
    ):
        self.pages, self.tokens, self.recurrent = pages, tokens, recurrent
        self._beside, self._few, self._alone = beside, few, alone
        self.snapshots: set[bytes] = set()
        self.waiting = FairQueue[Sequence]()
        self.running: list[Sequence] = []
        self._slots = list(range(slots))
        self._read = FairShares()  # tokens of prompts

    def add(self, sequence: Sequence) -> None:
        if self.recurrent:
            sequence.snapshot_at = (sequence.total - 1) // self.pages.size * self.pages.size or None
        self.waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """A sequence that ended or was cancelled, wherever it is."""
        if sequence in self.running:
            self._vacate(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)

    def greedy(self) -> Sequence | None:
        """The sequence that is to give its place to another owner's, None where places are shared
        out as evenly as they can be: the youngest of the owner who has most, and has more left
        without it than who waits.
        """
        if self._slots:
            return None
        running = Counter(sequence.owner for sequence in self.running)
        waits = self.waiting.next(running)
        if waits is None:
            return None
        owner, most = max(running.items(), key=lambda item: item[1])
        if most < running[waits.owner] + 2:
            return None
        return next(s for s in reversed(self.running) if s.owner == owner)

    def step(self) -> Step:
        """Decide on the next batch; the caller runs it and then calls `ran`. No parts: there is
        nothing to do.
        """
        preempted: list[Sequence] = []
        parts = [
            (sequence, sequence.left)
            for sequence in list(self.running)
            if sequence.decoding
            and sequence in self.running
            and self._grow(sequence, sequence.left, preempted)
        ]
        parts = [
            (sequence, count + self._proposed(sequence))
            for sequence, count in parts
            if sequence in self.running  # a later one may have pushed out an earlier
        ]
        # Nobody is let in while others give way: it would take what was just freed for them.
        admitted = self._admit() if not preempted else []
        # Beside those who wait for their next token, little is read, so that they get it soon.
        decoding = {sequence for sequence, _ in parts}
        used = sum(count for _, count in parts)
        readers = [
            sequence for sequence in self.running if sequence.left and sequence not in decoding
        ]
        if decoding:
            room = min(self.tokens, self._beside(used)) - used
        else:
            room = min(self.tokens, self._alone(sum(sequence.left for sequence in readers)))
        if self._few is not None and decoding and self._few < room < 2 * self._few:
            room = self._few  # a few more would be read far more slowly
        lines = self._lines(readers)
        for number, line in enumerate(lines):
            # A part of what is left for each owner, and of that for each of his sequences; who
            # needs less leaves the rest to the later ones.
            own = _share(room, len(lines) - number)
            for index, sequence in enumerate(line):
                share = _share(own, len(line) - index)
                count = sequence.chunk(share) if share > 0 else 0
                if count > room and len(parts) > len(decoding):
                    continue  # the batch grows for one block that does not fit, not for a second
                if count > 0 and self._grow(sequence, count, preempted, may_preempt=False):
                    parts.append((sequence, count))
                    own, room = own - count, room - count
        # Of a prompt of one token, or of one that is known but for its last, `decoding` is true as
        # soon as it is let in: such parts alone are no batch of prompts.
        reads = any(not sequence.decoding for sequence, _ in parts)
        apart = self._few is not None and bool(decoding) and reads
        apart = apart and sum(count for _, count in parts) > (self._few or 0)
        return Step(
            tuple(parts or self._oldest(preempted)), tuple(admitted), tuple(preempted), apart
        )

    def _lines(self, readers: abc.Iterable[Sequence]) -> list[list[Sequence]]:
        """By owner, first the one who has read least."""
        lines: dict[str, list[Sequence]] = {}
        for sequence in readers:
            lines.setdefault(sequence.owner, []).append(sequence)
        return [lines[owner] for owner in self._read.order(lines)]

    def _proposed(self, sequence: Sequence) -> int:
        """How much of its proposal there is room for, all or nothing: nobody gives way for it."""
        count = len(sequence.proposal)
        if count and not self._grow(sequence, sequence.left + count, [], may_preempt=False):
            return 0
        return count

    def _oldest(self, preempted: list[Sequence]) -> list[tuple[Sequence, int]]:
        """Where nobody finds room, those who came first go on at the cost of the others: else all
        would wait for each other.
        """
        sequence = next((i for i in self.running if i.left), None)
        if sequence is None:
            return []
        count = sequence.chunk(self.tokens)
        return [(sequence, count)] if self._grow(sequence, count, preempted) else []

    def ran(self, step: Step) -> None:
        """The batch has been run: its tokens' keys and values are kept, and full pages are
        known. Proposed tokens are not among them. What was left out of a step is not read, and
        comes again.
        """
        for sequence, count in step.parts:
            if not sequence.decoding:
                self._read.charge(sequence.owner, count)
            sequence.done += min(count, sequence.left)
            sequence.behind = 0
            self.register(sequence)

    def settle(self, sequence: Sequence) -> None:
        """Pages that hold nothing but rejected tokens are given back."""
        keep = self._pages_for(max(sequence.total - 1, sequence.done))
        if len(sequence.pages) > keep:
            self.pages.release(sequence.pages[keep:])
            del sequence.pages[keep:]

    def register(self, sequence: Sequence) -> None:
        """What is in a sequence's full pages is known by its keys from now on."""
        for page, key in zip(
            sequence.pages[: sequence.done // self.pages.size], sequence.keys, strict=False
        ):
            self.pages.register(page, key)

    def restart(self, sequence: Sequence) -> None:
        """A running sequence forgets what it has read, keeps its place, and gets pages for all its
        tokens. Raises IndexError if there are too few.
        """
        self.pages.release(sequence.pages)
        sequence.pages, sequence.done, sequence.behind = [], 0, 0
        sequence.pages = self.pages.take(self._pages_for(sequence.total))

    def _admit(self) -> list[Sequence]:
        """In turn by owner; nobody overtakes one who waits for memory."""
        admitted = []
        running = Counter(sequence.owner for sequence in self.running)
        while self._slots and (sequence := self.waiting.next(running)) is not None:
            known = self.pages.find(self._usable(sequence))
            need = self._pages_for(sequence.total) - len(known)
            if need > self.pages.available - self._reserve():
                self.pages.release(known)
                break
            self.waiting.serve(sequence)
            running[sequence.owner] += 1
            sequence.pages = known
            sequence.done = len(known) * self.pages.size
            sequence.slot = self._slots.pop(0)
            self.running.append(sequence)
            admitted.append(sequence)
        return admitted

    def _usable(self, sequence: Sequence) -> abc.Sequence[bytes]:
        """Keys of pages that end before the last token: one has to be read anew, for its logits."""
        keys = sequence.keys[: (sequence.total - 1) // self.pages.size]
        if sequence.scores is not None:
            return ()
        if not self.recurrent:
            return keys
        usable = 0
        for number, key in enumerate(keys, 1):
            # a page further on may be known all the same, and is of no use
            if not self.pages.knows(key):
                break
            usable = number if key in self.snapshots else usable
        return keys[:usable]

    def _reserve(self) -> int:
        """Pages that those let in still need for what they were let in with."""
        return sum(
            max(self._pages_for(sequence.total) - len(sequence.pages), 0)
            for sequence in self.running
        )

    def _grow(
        self, sequence: Sequence, count: int, preempted: list[Sequence], may_preempt: bool = True
    ) -> bool:
        """Pages for `count` more tokens; the youngest others give way for it. False where there are
        none to be had.
        """
        need = self._pages_for(sequence.done + count) - len(sequence.pages)
        while need > self.pages.available:
            victim = self.running[-1]  # the youngest: it loses the least work
            if not may_preempt or victim is sequence:
                return False
            self.preempt(victim)
            preempted.append(victim)
        sequence.pages += self.pages.take(need) if need > 0 else []
        return True

    def preempt(self, sequence: Sequence) -> None:
        """A running sequence gives up its place and its pages, and is the next of its owner to get
        some.
        """
        self._vacate(sequence)
        sequence.done = sequence.behind = 0
        self.waiting.appendleft(sequence)

    def _vacate(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self.pages.release(sequence.pages)
        sequence.pages = []
        assert sequence.slot is not None
        # The lowest first, so that slots in use stay together and batches meet the same shapes.
        self._slots.append(sequence.slot)
        self._slots.sort()
        sequence.slot = None

    def _pages_for(self, tokens: int) -> int:
        return -(-tokens // self.pages.size)


def _share(room: int, among: int) -> int:
    """Of so many tokens for one of so many, as far as that is worth it."""
    return max(room // among, min(LEAST_SHARE, room))
