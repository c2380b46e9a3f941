"""The shapes of batch that an engine can meet, for what has to be ready before it does."""

from __future__ import annotations

from collections.abc import Iterator

from mtmd.llm.batch import FEW, BatchShape
from mtmd.llm.engine.runner import Runner
from mtmd.llm.state import Cache

FORESEEN = 96  # batches of few rows, of those that are kept
MOST_VERIFIED = 64  # rows with proposals: what runs them differs by little from there on


def foreseen_batches(runner: Runner) -> list[BatchShape]:
    """Every number of sequences that decode; prompts from one token to the most that are read at
    once, with and without a picture, alone and beside others, with and without proposals. Of
    lengths and of numbers of prompts there are some: few programs differ by them.
    """
    paged = runner.reads_pages
    shapes = dict.fromkeys(
        shape.rounded(False, runner.pages if paged else None)
        for batch in _batches(runner)
        for shape in ([batch] if paged else _with_pages(batch, runner))
    )
    return list(shapes)


def few_rows(runner: Runner, cache: Cache) -> Iterator[BatchShape]:
    """Batches of few rows in which somebody waits for the next token, those with a short past
    first; of a cache that is read in place, for which each is a plan of its own.
    """
    if not cache.in_place or runner.lead is not None:
        return
    least = BatchShape(1).rounded(True).pages
    most, made = runner.sequences * runner.pages_for(runner.context), set[BatchShape]()
    for pages in (least, 4 * least, 16 * least):
        for tokens in range(1, FEW + 1):
            for count in range(1, min(tokens, runner.sequences) + 1):
                past = min(max(pages, count), most)
                shape = BatchShape(tokens, 0, count, count, past).rounded(True)
                if shape.pages <= pages and shape not in made and len(made) < FORESEEN:
                    made.add(shape)
                    yield shape


def _batches(runner: Runner) -> Iterator[BatchShape]:
    slots = runner.sequences
    lengths = _lengths(runner.sizes()["prefill"].tokens + slots)
    for count in range(1, slots + 1):
        yield BatchShape(count, wanted=count, sequences=count)
    for count in _together(slots):
        few = _few(lengths, 4)
        for tokens in few if count > 1 else _few(lengths, 2):
            if count < tokens:
                yield BatchShape(tokens, wanted=count, sequences=count)
                if tokens in few and tokens <= MOST_VERIFIED:
                    yield BatchShape(tokens, wanted=tokens, sequences=count)
    if runner.image_tokens:
        for tokens in lengths[:1] + lengths[-1:]:
            yield BatchShape(tokens, images=min(tokens, runner.image_tokens))


def _together(slots: int) -> list[int]:
    """Prompts of a batch: one, the most, and between them where the most are many, for then each
    is short, and who reads a token is looked for in more steps.
    """
    return sorted({1, slots} | ({2, min(16, slots)} if slots > 4 else set()))


def _with_pages(batch: BatchShape, runner: Runner) -> Iterator[BatchShape]:
    """Where pages are gathered: by how many, of few tokens, keys are shared out."""
    most = batch.sequences * runner.pages_for(runner.context)
    for pages in _lengths(most) if batch.tokens <= FEW else [most]:
        yield BatchShape(batch.tokens, batch.images, batch.wanted, batch.sequences, pages)


def _lengths(most: int) -> list[int]:
    """What batches up to so many tokens are rounded to."""
    return sorted({BatchShape(tokens).rounded().tokens for tokens in range(1, most + 1)})


def _few(lengths: list[int], apart: int) -> list[int]:
    """The shortest, and of each octave every so manieth, of which some are multiples of 16 and some
    are not: beside that, programs are told apart by a few bounds on the length.
    """
    return sorted({*lengths[:8], *lengths[8::8], *lengths[9::apart]})
