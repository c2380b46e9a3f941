"""The shapes of batch that an engine can meet, for what has to be ready before it does."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from mtmd.llm.batch import FEW, BatchShape
from mtmd.llm.engine.runner import Runner
from mtmd.llm.state import Cache

FORESEEN_ADAPTERS = 8  # each of which is alone in a batch that decodes
FORESEEN = 96  # batches of few rows, of those that are kept
MAX_VERIFIED = 64  # rows with proposals: what runs them differs by little from there on


def foreseen_batches(runner: Runner) -> list[BatchShape]:
    """Every number of sequences that decode; prompts from one token to the most that are read at
    once, with and without a picture, alone and beside others, with and without proposals. Of
    lengths and of numbers of prompts there are some: few programs differ by them. With all adapters
    and with none: by which of them there are, no programs differ.
    """
    paged = runner.reads_pages
    shapes = dict.fromkeys(
        replace(shape, adapters=adapters).rounded(False, runner.pages if paged else None)
        for adapters in ((), runner.all_adapters)
        for batch in _batches(runner)
        for shape in ([batch] if paged else _with_pages(batch, runner))
    )
    return list(shapes)


def few_rows(runner: Runner, cache: Cache, proposals: bool = True) -> list[BatchShape]:
    """Batches of few rows, the likeliest first; none where plans are not made beside. All in which
    somebody waits for the next token, as far as there is room, and with `proposals` those, too.
    """
    if not runner.plans_alongside(cache):
        return []
    whole, tables = runner.pages_for(runner.context), list[int]()
    while not tables or tables[-1] < runner.sequences * whole:
        tables.append(BatchShape(1, pages=tables[-1] + 1 if tables else 1).rounded(True).pages)
    choices = [(), *((n,) for n in runner.all_adapters[:FORESEEN_ADAPTERS])]
    kinds = [(_next_tokens, choices), (_of_answers, choices[:1])]
    kinds += [(_of_proposals, choices[:1])] if proposals else []
    shapes = (
        replace(batch, pages=min(pages, batch.sequences * whole), adapters=adapters).rounded(True)
        for kind, chosen in kinds
        for adapters in chosen
        for pages in tables
        for batch in kind(runner)
    )
    return list(dict.fromkeys(shapes))[:FORESEEN]


def _next_tokens(runner: Runner) -> Iterator[BatchShape]:
    for count in range(1, min(runner.sequences, FEW) + 1):
        yield BatchShape(count, requested=count, sequences=count)


def _of_answers(runner: Runner) -> Iterator[BatchShape]:
    """Next tokens alone; the middle of a prompt, which is read a few rows at a time; next tokens
    beside parts of prompts, without and with pictures; then such parts alone.
    """
    maximum = runner.sequences
    yield from _next_tokens(runner)
    pictures = (0, 1) if runner.image_tokens else (0,)
    for images in pictures:
        yield BatchShape(FEW, images, 0, 1)
    for several in (range(2, maximum + 1), range(1, 2)):
        for images in pictures:
            for tokens in range(1, FEW + 1):
                for count in several:
                    if count + (not images) <= tokens:
                        yield BatchShape(tokens, images, count, count)


def _of_proposals(runner: Runner) -> Iterator[BatchShape]:
    for tokens in range(2, FEW + 1):
        for count in range(1, min(tokens, runner.sequences + 1)):
            yield BatchShape(tokens, requested=tokens, sequences=count)


def _batches(runner: Runner) -> Iterator[BatchShape]:
    slots = runner.sequences
    lengths = _lengths(runner.sizes()["prefill"].tokens + slots)
    for count in range(1, slots + 1):
        yield BatchShape(count, requested=count, sequences=count)
    for count in _together(slots):
        few = _few(lengths, 4)
        for tokens in few if count > 1 else _few(lengths, 2):
            if count < tokens:
                yield BatchShape(tokens, requested=count, sequences=count)
                if tokens in few and tokens <= MAX_VERIFIED:
                    yield BatchShape(tokens, requested=tokens, sequences=count)
    if runner.image_tokens:
        for tokens in lengths[:1] + lengths[-1:]:
            yield BatchShape(tokens, images=min(tokens, runner.image_tokens))


def _together(slots: int) -> list[int]:
    """Prompts of a batch: one, the most, and between them where the most are many, for then each
    is short, and who reads a token is looked for in more steps.
    """
    return sorted({1, slots} | ({2, min(16, slots)} if slots > 4 else set()))


def _with_pages(batch: BatchShape, runner: Runner) -> Iterator[BatchShape]:
    """Yield where pages are gathered: by how many, of few tokens, keys are shared out."""
    maximum = batch.sequences * runner.pages_for(runner.context)
    for pages in _lengths(maximum) if batch.tokens <= FEW else [maximum]:
        yield BatchShape(batch.tokens, batch.images, batch.requested, batch.sequences, pages)


def _lengths(maximum: int) -> list[int]:
    """Return what batches up to so many tokens are rounded to."""
    return sorted({BatchShape(tokens).rounded().tokens for tokens in range(1, maximum + 1)})


def _few(lengths: list[int], separate: int) -> list[int]:
    """The shortest, and of each octave every so manieth, of which some are multiples of 16 and some
    are not: beside that, programs are told apart by a few bounds on the length.
    """
    return sorted({*lengths[:8], *lengths[8::8], *lengths[9::separate]})
