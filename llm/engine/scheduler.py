"""Describes what the engine runs next: which sequences are admitted, how many tokens of each go
into a batch, which are preempted. Plain Python, no tensors.

Every running sequence gets its next token before any prompt is read on. Prompts share what remains
of a batch, so that a long one does not delay short ones. Where batches of few rows run faster than
others, as they read the cache in place, a larger one is split in two: prompts by themselves, and
sequences that decode. A stretch of tokens that see each other in both directions is never cut: a
batch grows for it.

Slots and prompt tokens are shared out by owner, as long as several have requests: a single owner
has everything, many requests of one delay nobody else's, and an owner with more slots than one who
waits gives one up (`unfair_slot`).
"""

from __future__ import annotations

from collections import Counter, abc
from dataclasses import dataclass, replace

from mtmd.base.fair_queue import FairQueue, FairShares
from mtmd.llm.engine.pages import Pages
from mtmd.llm.engine.sequence import Sequence, State

MIN_SHARE = 32  # tokens of a prompt that are worth a part of a batch
# Tokens of a batch in which somebody decodes, at least so many of them of prompts. A batch that
# reads the cache in place has fewer: see docs/LOG.md, "Prompts next to answers".
MIXED_ROWS, MIN_PROMPT_ROWS = 128, 4
SHORT_PROMPTS = 3  # batches of few rows, in which prompts are read faster than in one


@dataclass(frozen=True)
class Step:
    """One batch: `parts` are (sequence, tokens); those beyond what is left of a sequence are of its
    proposal. `admitted` have been given a slot, `preempted` have lost theirs and wait again.
    `is_split`: it is run as two batches.
    """

    parts: tuple[tuple[Sequence, int], ...]
    admitted: tuple[Sequence, ...] = ()
    preempted: tuple[Sequence, ...] = ()
    is_split: bool = False

    @property
    def rows(self) -> int:
        return sum(count for _, count in self.parts)

    def batches(self) -> tuple[Step, ...]:
        """Return one batch or two. Of two the parts of prompts are first: their tokens are handed
        out with the others.
        """
        if not self.is_split:
            return (self,)
        prompts = tuple(part for part in self.parts if not part[0].decoding)
        answers = tuple(part for part in self.parts if part[0].decoding)
        return Step(prompts, self.admitted, self.preempted), Step(answers)

    def smaller(self) -> Step | None:
        """Return about half of the step, where there is too little memory for all; None if nothing
        can be left out. Proposals go first; then prompts are read in shorter pieces, and where they
        are short already, the last sequences wait.
        """
        parts = tuple((sequence, min(count, sequence.left)) for sequence, count in self.parts)
        if parts != self.parts:
            return Step(parts, self.admitted, self.preempted)
        parts = tuple(
            (sequence, sequence.chunk(count // 2) if count > MIN_SHARE else count)
            for sequence, count in self.parts
        )
        if sum(count for _, count in parts) == self.rows:
            parts = parts[: (len(parts) + 1) // 2]
        return Step(parts, self.admitted, self.preempted) if parts != self.parts else None


class Scheduler:
    """`pages` of the cache, `slots` sequences at once, at most `tokens` in a batch. `snapshots`:
    keys of the pages at whose ends recurrent states are saved; only there can a sequence be
    resumed; None for models that have no such states. `in_place_rows`: rows of a batch that reads
    the cache in place, None where none does.
    """

    def __init__(
        self,
        pages: Pages,
        slots: int,
        tokens: int,
        snapshots: abc.Container[bytes] | None = None,
        in_place_rows: int | None = None,
    ):
        self.pages, self.tokens, self.snapshots = pages, tokens, snapshots
        self.in_place_rows = in_place_rows
        self.mixed_rows = in_place_rows or MIXED_ROWS
        self.waiting = FairQueue[Sequence]()
        self.running: list[Sequence] = []
        self._slots = list(range(slots))
        self._read = FairShares()  # tokens of prompts

    def add(self, sequence: Sequence) -> None:
        if self.snapshots is not None:
            sequence.snapshot_at = (sequence.total - 1) // self.pages.size * self.pages.size or None
        self.waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Free what a sequence has, wherever it is."""
        if sequence in self.running:
            self._free(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)

    def unfair_slot(self) -> Sequence | None:
        """Return the sequence that has to give its slot to another owner's: the youngest of the
        owner with the most, if it keeps more than the one who waits has; else None.
        """
        if self._slots:
            return None
        running = Counter(sequence.owner for sequence in self.running)
        waits = self.waiting.next(running)
        if waits is None:
            return None
        owner, maximum = max(running.items(), key=lambda item: item[1])
        if maximum < running[waits.owner] + 2:
            return None
        return next(s for s in reversed(self.running) if s.owner == owner)

    def schedule(self) -> Step:
        """Decide on the next batch; the caller runs it and then calls `advance`. No parts: there is
        nothing to do.
        """
        preempted: list[Sequence] = []
        parts = [
            (sequence, sequence.left)
            for sequence in list(self.running)
            if sequence.decoding and self._allocate(sequence, sequence.left, preempted)
        ]
        parts = [
            (sequence, count + self._proposed(sequence))
            for sequence, count in parts
            if sequence.decoding  # a later one may have preempted an earlier
        ]
        # Nobody is admitted while others are preempted: it would take what was just freed for them.
        admitted = self._admit() if not preempted else []
        decoding, used = len(parts), sum(count for _, count in parts)
        scheduled = {sequence for sequence, _ in parts}
        readers = [
            sequence
            for sequence in self.running
            if sequence.state is not State.SAMPLING and sequence not in scheduled
        ]
        room = self._room(used, readers)
        lines = self._lines(readers)
        for number, line in enumerate(lines):
            # A part of what is left for each owner, and of that for each of its sequences; who
            # needs less leaves the rest to the later ones.
            own = _share(room, len(lines) - number)
            for index, sequence in enumerate(line):
                share = _share(own, len(line) - index)
                count = sequence.chunk(share) if share > 0 else 0
                if count > room and len(parts) > decoding:
                    continue  # the batch grows for one block that does not fit, not for a second
                if count > 0 and self._allocate(sequence, count, preempted, may_preempt=False):
                    parts.append((sequence, count))
                    own, room = own - count, room - count
        # A prompt of one token, or one that is cached but for its last, decodes as soon as it is
        # admitted: such parts are no batch of prompts.
        is_mixed = decoding > 0 and any(not sequence.decoding for sequence, _ in parts)
        step = Step(tuple(parts or self._oldest(preempted)), tuple(admitted), tuple(preempted))
        limit = self.in_place_rows
        if limit is not None and is_mixed and step.rows > limit:
            return replace(step, is_split=True)
        return step

    def _room(self, used: int, readers: abc.Iterable[Sequence]) -> int:
        """Return how many rows of prompts go into a batch. Next to sequences that decode there are
        few, so that these get their next tokens soon.
        """
        if used:
            rows, more = self.mixed_rows, self.in_place_rows or MIN_SHARE
            return min(self.tokens, rows if rows - used >= MIN_PROMPT_ROWS else used + more) - used
        left, few = sum(sequence.left for sequence in readers), self.in_place_rows
        if few is not None and left <= SHORT_PROMPTS * few:
            return min(self.tokens, few)
        return self.tokens

    def _lines(self, readers: abc.Iterable[Sequence]) -> list[list[Sequence]]:
        """Return the sequences by owner, the one who has read least first."""
        lines: dict[str, list[Sequence]] = {}
        for sequence in readers:
            lines.setdefault(sequence.owner, []).append(sequence)
        return [lines[owner] for owner in self._read.order(lines)]

    def _proposed(self, sequence: Sequence) -> int:
        """Return how much of its proposal there is room for, all or nothing: nobody is preempted
        for it.
        """
        count = len(sequence.proposal)
        if count and not self._allocate(sequence, sequence.left + count, [], may_preempt=False):
            return 0
        return count

    def _oldest(self, preempted: list[Sequence]) -> list[tuple[Sequence, int]]:
        """Return a part of the oldest sequence, at the cost of the others, where nobody finds room:
        else all would wait for each other.
        """
        sequence = next((i for i in self.running if i.left), None)
        if sequence is None:
            return []
        count = sequence.chunk(self.tokens)
        return [(sequence, count)] if self._allocate(sequence, count, preempted) else []

    def advance(self, step: Step) -> None:
        """Note that a batch has been run: the keys and values of its tokens are cached, full pages
        can be shared. Proposed tokens are not among them.
        """
        for sequence, count in step.parts:
            if not sequence.decoding:
                self._read.charge(sequence.owner, count)
            sequence.advance(count)
            self.register(sequence)

    def trim(self, sequence: Sequence) -> None:
        """Release pages that hold nothing but rejected tokens."""
        keep = self._pages_for(max(sequence.total - 1, sequence.done))
        if len(sequence.pages) > keep:
            self.pages.release(sequence.pages[keep:])
            del sequence.pages[keep:]

    def register(self, sequence: Sequence) -> None:
        """Make the full pages of a sequence available by its keys."""
        for page, key in zip(
            sequence.pages[: sequence.done // self.pages.size], sequence.keys, strict=False
        ):
            self.pages.register(page, key)

    def restart(self, sequence: Sequence) -> None:
        """Have a running sequence forget what it has read, in its slot, with pages for all its
        tokens. Raises IndexError if there are too few.
        """
        self.pages.release(sequence.pages)
        sequence.restart([])
        sequence.pages = self.pages.take(self._pages_for(sequence.total))

    def preempt(self, sequence: Sequence) -> None:
        """Take slot and pages from a running sequence: it is the next of its owner to get some."""
        self._free(sequence)
        sequence.preempt()
        self.waiting.appendleft(sequence)

    def _admit(self) -> list[Sequence]:
        """Admit sequences in turn by owner; nobody overtakes one who waits for memory."""
        admitted = []
        running = Counter(sequence.owner for sequence in self.running)
        while self._slots and (sequence := self.waiting.next(running)) is not None:
            cached = self.pages.find(self._usable(sequence))
            need = self._pages_for(sequence.total) - len(cached)
            if need > self.pages.available - self._reserve():
                self.pages.release(cached)
                break
            self.waiting.serve(sequence)
            running[sequence.owner] += 1
            sequence.admit(self._slots.pop(0), cached, len(cached) * self.pages.size)
            self.running.append(sequence)
            admitted.append(sequence)
        return admitted

    def _usable(self, sequence: Sequence) -> abc.Sequence[bytes]:
        """Return the keys of pages that end before the last token: one has to be read anew, for its
        logits.
        """
        keys = sequence.keys[: (sequence.total - 1) // self.pages.size]
        if sequence.scores is not None:
            return ()
        if self.snapshots is None:
            return keys
        usable = 0
        for number, key in enumerate(keys, 1):
            # a page further on may be cached all the same, and is of no use
            if not self.pages.knows(key):
                break
            usable = number if key in self.snapshots else usable
        return keys[:usable]

    def _reserve(self) -> int:
        """Return how many pages running sequences still need for the tokens that they have."""
        return sum(
            max(self._pages_for(sequence.total) - len(sequence.pages), 0)
            for sequence in self.running
        )

    def _allocate(
        self, sequence: Sequence, count: int, preempted: list[Sequence], may_preempt: bool = True
    ) -> bool:
        """Allocate pages for `count` more tokens; the youngest others are preempted for it. Returns
        False if there are none to be had.
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

    def _free(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self.pages.release(sequence.pages)
        assert sequence.slot is not None
        # The lowest first, so that slots in use stay together and batches meet the same shapes.
        self._slots.append(sequence.slot)
        self._slots.sort()
        sequence.slot, sequence.pages = None, []

    def _pages_for(self, tokens: int) -> int:
        return -(-tokens // self.pages.size)


def _share(room: int, among: int) -> int:
    """Return the part of so many tokens for one of so many, as far as that is worth it."""
    return max(room // among, min(MIN_SHARE, room))
