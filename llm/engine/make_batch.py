"""Goes from the next spans of several sequences to a batch."""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from mtmd.llm.batch import Batch, BatchShape
from mtmd.llm.engine.sequence import Sequence
from mtmd.llm.engine.spans import AXES, Span, blocks, lay_out, sight
from mtmd.llm.state import PAGE, Cache


def make_batch(
    parts: abc.Sequence[tuple[Sequence, abc.Sequence[Span]]],
    cache: Cache,
    needs_logits: bool = True,
    rows: abc.Sequence[int] | None = None,
    context: abc.Mapping[Sequence, abc.Sequence[Tensor]] | None = None,
) -> Batch:
    """The next spans of one or several sequences, each in a slot of its own, as one batch. The
    sequences stay as they are: a batch may be made for nothing, where memory is short for it.

    Logits are computed for the last token of each, or, with `rows`, the last so many; or for none.
    Spans that are not laid out go on
    at the sequence's position. Rows are added up to a shape that there are few of; logits of the
    sequences come first. In a cache that is read in place, images are filled up by the last row of
    theirs, which is put where it is once more: then there is no room needed for them. `context`:
    what is to be stored for sequences' tokens to attend to (`context_of`).
    """
    made = _Making(cache)
    for sequence, spans in parts:
        made.add(sequence, spans)
        made.add_context(sequence, (context or {}).get(sequence, ()))
    return made.finish((rows or [1] * len(parts)) if needs_logits else [])


def _numbers(values: abc.Sequence[int] | abc.Sequence[abc.Sequence[int]]) -> np.ndarray:
    """int64. Here and in spans all is done in numpy: with each of torch's functions this thread
    gives the interpreter away.
    """
    return np.array(values, np.int64)


@dataclass
class _Making:
    """A batch in the making: lists that grow with every sequence."""

    cache: Cache
    tokens: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    marks: list[tuple[int, int, int, int, int]] = field(default_factory=list)
    """First row of the sequence, own row, first and last row of the block, end of the prompt."""
    positions: list[np.ndarray | range] = field(default_factory=list)  # a range: of text
    starts: list[int] = field(default_factory=lambda: [0])
    sequence_slots: list[int] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    images: list[Tensor] = field(default_factory=list)
    image_at: list[int] = field(default_factory=list)
    adapters: list[tuple[int, tuple[float, ...]]] = field(default_factory=list)
    """Tokens of a sequence, and the scales of its adapters."""
    sights: list[tuple[int, int, int, int]] = field(default_factory=list)
    context: list[Tensor] = field(default_factory=list)
    context_slots: list[int] = field(default_factory=list)

    def add_context(self, sequence: Sequence, rows: abc.Sequence[Tensor]) -> None:
        assert sequence.slot is not None
        first = sequence.slot * self.cache.context
        self.context += rows
        self.context_slots += range(first, first + sum(map(len, rows)))

    def add(self, sequence: Sequence, spans: abc.Sequence[Span]) -> None:
        assert sequence.slot is not None
        self.adapters.append((sum(map(len, spans)), sequence.adapters))
        base = len(self.pages) * PAGE  # its first row among the gathered pages of all
        length, pages = sequence.done, sequence.pages
        end = base + sequence.prompt_tokens
        # Of an answer all tokens but the last have been read when the next is computed.
        position = sequence.position + max(len(sequence.tokens) - 1 - sequence.behind, 0)
        for span in spans:
            if span.positions is None and span.grid is None and span.on_canvas is None:
                self.positions.append(range(position, position + len(span)))
                position += len(span)
            else:
                if span.positions is None:
                    (span,), position = lay_out([span], position)
                assert span.positions is not None
                self.positions.append(span.positions)
            if span.embeddings is not None and span.real is None:
                self.images.append(span.embeddings)
                self.image_at += range(len(self.tokens), len(self.tokens) + len(span))
                self.tokens += [0] * len(span)  # what stands for them may have no row in the table
            else:
                self.tokens += span.tokens
            start, stop = length, length + len(span)
            self.slots += [pages[i // PAGE] * PAGE + i % PAGE for i in range(start, stop)]
            self.marks += [(base, base + i, base + i, base + i, end) for i in range(start, stop)]
            length = stop
        if self.cache.context:
            first = len(self.sequence_slots) * self.cache.context
            for token in range(sequence.done, length):
                begin, end, sees, shown = sight(sequence.pictures, token)
                self.sights.append((first + begin, first + end, sees, shown))
        done, at = sequence.done, len(self.marks) - (length - sequence.done)
        begun = {stop: start for start, stop in sequence.blocks}
        for start, stop in blocks(spans):
            # The beginning of a block may have been cached before.
            whole = (base + begun.get(done + stop, done + start), base + done + stop - 1)
            self.marks[at + start : at + stop] = [
                (base, base + done + i, *whole, end) for i in range(start, stop)
            ]
        self.starts.append(len(self.tokens))
        self.sequence_slots.append(sequence.slot)
        self.pages += pages[: -(-length // PAGE)]

    def finish(self, counts: abc.Sequence[int]) -> Batch:
        """Logits of so many of each sequence's last tokens, of none where `counts` is empty."""
        sequences, images = len(self.sequence_slots), len(self.image_at)
        stops = self.starts[1:] if counts else []
        requested = [
            i for n, stop in zip(counts, stops, strict=True) for i in range(stop - n, stop)
        ]
        answers = len(requested)
        shape = BatchShape(
            len(self.tokens),
            images,
            answers,
            sequences,
            len(self.pages),
            self._applied(),
            len(self.context_slots),
        ).rounded(self.cache.in_place, self.cache.pages if self.cache.paged else None)
        spare = shape.tokens - len(self.tokens)
        requested += [0] * (shape.requested - answers)
        rows = torch.cat(self.images) if self.images else None
        if rows is not None and (more := shape.images - images):
            if self.cache.in_place:  # the last one once more, at its own place
                rows = torch.cat((rows, rows[-1:].expand(more, -1)))
                self.image_at += self.image_at[-1:] * more
            else:
                rows = torch.cat((rows, rows.new_zeros(more, rows.shape[1])))
                self.image_at += range(len(self.tokens), len(self.tokens) + more)
        if spare:
            self.tokens += [0] * spare
            self.slots += [i % PAGE for i in range(spare)]
            self.marks += [(0, 0, 0, 0, 0)] * spare
            self.positions += [range(1)] * spare
        context = self._context(shape)
        empty = shape.sequences - sequences
        self.starts += [self.starts[-1]] * (empty - 1) + [shape.tokens] * min(empty, 1)
        self.sequence_slots += [self.cache.sequences] * empty
        first, own, block_first, block_last, prompt_end = (
            np.array(self.marks, np.int64).reshape(-1, 5).T.copy()
        )
        return Batch(
            _numbers(self.tokens),
            self._all_positions(),
            _numbers(self.slots),
            first,
            own,
            block_first,
            block_last,
            prompt_end,
            _numbers(self.starts),
            _numbers(self.sequence_slots),
            self._table(shape.pages) if self.cache.paged else self._all_pages(shape.pages),
            rows,
            _numbers(self.image_at) if rows is not None else None,
            _numbers(requested),
            answers,
            self.cache,
            self._scales(shape.tokens),
            shape.adapters,
            *context,
        )

    def _context(
        self, shape: BatchShape
    ) -> tuple[Tensor | None, np.ndarray | None, np.ndarray | None]:
        """Return what is stored, where, and what each token sees; rows too many go unseen."""
        if not self.cache.context:
            return None, None, None
        unseen: list[tuple[int, int, int, int]] = [(0, -1, 0, 0)]
        sights = np.array(self.sights + unseen * (shape.tokens - len(self.sights)), np.int64)
        if not self.context:
            return None, None, sights
        rows = torch.cat(self.context)
        spare = shape.context - len(rows)
        rows = torch.cat((rows, rows.new_zeros(spare, rows.shape[1])))
        first = self.cache.sequences * self.cache.context
        slots = [*self.context_slots, *(first + i % self.cache.context for i in range(spare))]
        return rows, _numbers(slots), sights

    def _applied(self) -> tuple[int, ...]:
        """The adapter that some of the sequences have; all there are where these have several, as
        each choice of them is a plan of its own.
        """
        every = {number for _, scales in self.adapters for number in range(len(scales))}
        used = {n for _, scales in self.adapters for n, scale in enumerate(scales) if scale}
        return tuple(sorted(every if len(used) > 1 else used))

    def _scales(self, tokens: int) -> np.ndarray:
        """fp32 [T, N]; 0 of tokens that fill the batch up."""
        count = max((len(scales) for _, scales in self.adapters), default=0)
        result, first = np.zeros((tokens, count), np.float32), 0
        for rows, scales in self.adapters:
            result[first : first + rows, : len(scales)] = scales
            first += rows
        return result

    def _all_positions(self) -> np.ndarray:
        """[4, T]; of text alone it is made at once, as in most steps of decoding."""
        if all(isinstance(p, range) for p in self.positions):
            row = [i for part in self.positions for i in part]
            return _numbers([row] * AXES)
        parts = [
            np.broadcast_to(np.arange(p.start, p.stop, dtype=np.int64), (AXES, len(p)))
            if isinstance(p, range)
            else p
            for p in self.positions
        ]
        return np.concatenate(parts, 1)

    def _table(self, count: int) -> np.ndarray:
        """int64 [count], the pages in use and zeros behind them."""
        table = np.zeros(count, np.int64)
        table[: len(self.pages)] = self.pages
        return table

    def _all_pages(self, count: int) -> np.ndarray:
        """The same with pages behind them that nobody looks at: those that follow, where that keeps
        a run of neighbours, which need not be copied.
        """
        table, used = self._table(count), len(self.pages)
        follow = min(count - used, self.cache.pages - 1 - self.pages[-1])
        table[used : used + follow] = np.arange(follow) + self.pages[-1] + 1
        return table
