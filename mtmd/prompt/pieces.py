"""A prompt's tokens in runs: text, and image tokens by what they show."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from mtmd.base.errors import PromptError
from mtmd.clip.resolution.resolution import WITHOUT_GRID, ImagePlan


@dataclass(frozen=True)
class Piece:
    """A run of the prompt's tokens: text, or image tokens start... of a picture, on a grid where
    the family has one; or those of a group of frames, counted as a picture, `later` as
    `Span` has it, and so `number`, `repeats` and `on_canvas`. `instruction`: the text that an
    encoder reads with the picture, in tokens of its own.
    """

    tokens: tuple[int, ...]
    picture: int | None = None
    start: int = 0
    grid: tuple[int, int] | None = None
    later: int | None = None
    number: int | None = None
    repeats: bool = False
    instruction: tuple[int, ...] = ()
    on_canvas: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def is_text(self) -> bool:
        return self.picture is None


@dataclass(frozen=True)
class Part:
    """Describes what a run of tokens stands for: picture `number`, counted with groups of frames
    and audio, or, of audio, its tokens from `start` to `stop`.
    """

    number: int
    plan: ImagePlan
    later: int | None = None
    start: int = 0
    stop: int | None = None

    @property
    def tokens(self) -> int:
        return (self.plan.tokens if self.stop is None else self.stop) - self.start


def pieces_of(
    tokens: list[int], image_tokens: Collection[int], parts: Sequence[Part]
) -> list[Piece]:
    """Runs of text, and of image tokens, which show pictures and groups of frames in order."""
    pieces: list[Piece] = []
    start, pictures = 0, _Pictures(parts)
    while start < len(tokens):
        stop, is_image = start, tokens[start] in image_tokens
        while stop < len(tokens) and (tokens[stop] in image_tokens) == is_image:
            stop += 1
        run = tuple(tokens[start:stop])
        pieces += pictures.take(run) if is_image else [Piece(run)]
        start = stop
    pictures.check_all_taken()
    return pieces


def with_shared_marks(pieces: Sequence[Piece], numbers: Collection[int]) -> list[Piece]:
    """The pieces with the two marks before the clip of these pictures at one position, and the two
    behind it.
    """
    at = [index for index, piece in enumerate(pieces) if piece.picture in numbers]
    before, after = pieces[at[0] - 1], pieces[at[-1] + 1]
    return [
        *pieces[: at[0] - 1],
        replace(before, tokens=before.tokens[:-1]),
        Piece(before.tokens[-1:], repeats=True),
        *pieces[at[0] : at[-1] + 1],
        replace(after, tokens=after.tokens[:1]),
        Piece(after.tokens[1:], repeats=True),
        *pieces[at[-1] + 2 :],
    ]


def on_canvases(
    pieces: Sequence[Piece], canvases: Mapping[int, np.ndarray], end: int
) -> list[Piece]:
    """The pieces with the tokens of each picture, the marks around and between them included, on
    its canvas: `canvases` int64 [3, T] are their places, by picture. Tokens `end` right behind a
    picture lie where its canvas begins.
    """
    result: list[Piece] = []
    left = np.zeros((3, 0), np.int64)  # what of the last canvas is to come
    shown = None
    for piece in pieces:
        if piece.picture is not None and piece.picture != shown:
            shown, left = piece.picture, canvases[piece.picture]
            text = result.pop()
            if len(text) > 1:
                result.append(replace(text, tokens=text.tokens[:-1]))
            result.append(Piece(text.tokens[-1:], on_canvas=left[:, :1]))
            left = left[:, 1:]
        if shown is None:
            result.append(piece)
            continue
        count = min(len(piece), left.shape[1])
        if count:
            here, left = left[:, :count], left[:, count:]
            result.append(replace(piece, tokens=piece.tokens[:count], later=0, on_canvas=here))
        rest = piece.tokens[count:]
        ends = 0
        while ends < len(rest) and rest[ends] == end:
            ends += 1
        if ends:
            result.append(Piece(rest[:ends], later=0, on_canvas=np.zeros((3, ends), np.int64)))
        if rest[ends:]:
            result.append(Piece(rest[ends:]))
    return result


class _Pictures:
    """Describes which image tokens of which picture come next."""

    def __init__(self, parts: Sequence[Part]):
        self._parts = parts
        self._part = self._start = self._grid = 0

    def take(self, run: tuple[int, ...]) -> Iterator[Piece]:
        """A run of image tokens in pieces, one for each picture and grid that it shows."""
        while run:
            if self._part == len(self._parts):
                raise PromptError(
                    f"the chat template wrote image tokens for more than {len(self._parts)} "
                    "pictures; "
                    "it does not fit this model"
                )
            part = self._parts[self._part]
            plan = part.plan
            grid = plan.grids[self._grid] if plan.grids else None
            left = part.tokens - self._start
            count = min(len(run), left if grid is None else grid[0] * grid[1])
            if grid is not None and count < grid[0] * grid[1]:
                raise PromptError(
                    f"{grid[0]} x {grid[1]} image tokens of a picture do not stand together in the "
                    "prompt; "
                    "the tokenizer does not fit this model"
                )
            number = part.number if plan.located and grid != WITHOUT_GRID else None
            start = part.start + self._start
            yield Piece(run[:count], part.number, start, grid, part.later, number)
            run = run[count:]
            self._start, self._grid = self._start + count, self._grid + 1
            if count == left:
                self._part, self._start, self._grid = self._part + 1, 0, 0

    def check_all_taken(self) -> None:
        if self._part < len(self._parts):
            raise PromptError(
                f"the prompt has fewer image tokens than its {len(self._parts)} pictures take; "
                "the tokenizer does not fit this model"
            )
