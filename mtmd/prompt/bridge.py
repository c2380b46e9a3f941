"""The batching bridge: pictures and a rendered prompt become spans that the decoder reads.

Pictures are prepared, encoded in batches of equal tiles (`mtmd.service.encode_queue`), and put
where the chat template left their marker. Those encoded before are in the bridge's `cache`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256

from torch import Tensor

from mtmd.clip.encoder import Encoder
from mtmd.clip.image.decode import Picture
from mtmd.clip.resolution.resolution import ImagePlan
from mtmd.clip.token_budget import DEFAULT_BUDGET, Budget
from mtmd.kernels.errors import PromptError
from mtmd.kernels.resources.turns import aside
from mtmd.llm.engine.spans import Span
from mtmd.llm.tokenizer.tokenizer import Tokenizer
from mtmd.loaded.memory_admission import CACHE_BYTES, Admission
from mtmd.prompt.embedding_cache import EmbeddingCache, Key
from mtmd.receipt import ImageReceipt


@dataclass(frozen=True, eq=False)
class Prepared:
    """A picture ready to be encoded, or, with `embeddings` [T, D], encoded before."""

    key: Key
    plan: ImagePlan
    receipt: ImageReceipt
    embeddings: Tensor | None = None

    @property
    def content(self) -> bytes:
        """What its embeddings show, in a few bytes."""
        return sha256(repr(self.key).encode()).digest()[:16]


@dataclass(frozen=True)
class Piece:
    """A run of the prompt's tokens: text, or image tokens start... of a picture, on a grid where
    the family has one.
    """

    tokens: tuple[int, ...]
    picture: int | None = None
    start: int = 0
    grid: tuple[int, int] | None = None

    @property
    def is_text(self) -> bool:
        return self.picture is None


class Bridge:
    """Without an `admission`, pictures take the memory they take."""

    def __init__(
        self, encoder: Encoder | None, tokenizer: Tokenizer, admission: Admission | None = None
    ):
        self.encoder, self.tokenizer, self.admission = encoder, tokenizer, admission
        # Admission plans a run to say how much: it is not asked before there is something to keep.
        self.cache = EmbeddingCache(
            lambda: admission.embedding_cache_bytes if admission else CACHE_BYTES
        )

    def prepare(
        self,
        pictures: Sequence[Picture],
        budget: Budget = DEFAULT_BUDGET,
        anew: bool = False,
        salt: str = "",
    ) -> list[Prepared]:
        """Pictures cut and normalised, each different one once; those in the cache, of the same
        `salt`, need no more work, unless all is to be done `anew`.

        Raises OptionError for a budget that cannot be kept, ImageError for a shape that the family
        does not take, DeviceMemoryError for one that takes more memory than can be free, however
        small it is shown.
        """
        assert self.encoder is not None
        prepare = self.admission.fit if self.admission else self.encoder.family.resolution.prepare
        made: dict[Key, tuple[ImagePlan, Tensor | None]] = {}
        result = []
        for picture in pictures:
            key = picture.sha256, budget, salt
            cached = key in made
            if not cached:
                entry = None if anew else self.cache.get(key)
                cached = entry is not None
                if entry is not None:
                    made[key] = entry
                else:
                    with aside():  # mostly in numpy, beside the interpreter
                        made[key] = prepare(picture.pixels, budget), None
            plan, embeddings = made[key]
            receipt = ImageReceipt(
                picture.size,
                plan.sizes[0],
                len(plan.sizes),
                plan.tokens,
                picture.sha256,
                cached,
                (*picture.notes, *plan.notes),
            )
            result.append(Prepared(key, plan, receipt, embeddings))
        return result

    def read(self, rendered: str, prepared: Sequence[Prepared]) -> list[Piece]:
        """The rendered prompt with pictures at their markers, tokenized. Raises PromptError where
        the template wrote more or fewer markers.
        """
        if self.encoder is None:
            return [Piece(tuple(self.tokenizer.encode_prompt(rendered)))]
        family = self.encoder.family
        pieces = rendered.split(family.marker)
        if len(pieces) - 1 != len(prepared):
            raise PromptError(
                f"the chat template wrote {len(pieces) - 1} picture places for {len(prepared)} "
                "pictures; "
                "it does not fit this model"
            )
        text = pieces[0] + "".join(
            family.prompt(p.plan) + piece for p, piece in zip(prepared, pieces[1:], strict=True)
        )
        return _pieces(
            self.tokenizer.encode_prompt(text),
            self.tokenizer.id(family.image_token),
            [p.plan for p in prepared],
        )

    def spans(
        self, pieces: Sequence[Piece], prepared: Sequence[Prepared], embeddings: Sequence[Tensor]
    ) -> list[Span]:
        """Pieces with the embeddings [T, D] of the pictures, in order."""
        spans = []
        for piece in pieces:
            if piece.picture is None:
                spans.append(Span(piece.tokens))
                continue
            assert self.encoder is not None
            rows = embeddings[piece.picture][piece.start : piece.start + len(piece.tokens)]
            spans.append(
                Span(
                    piece.tokens,
                    rows,
                    self.encoder.family.bidirectional,
                    piece.grid,
                    content=prepared[piece.picture].content,
                    offset=piece.start,
                )
            )
        return spans


def _pieces(tokens: list[int], image_token: int, plans: Sequence[ImagePlan]) -> list[Piece]:
    """Runs of text, and of image tokens, which show the pictures in order."""
    pieces: list[Piece] = []
    start, pictures = 0, _Pictures(plans)
    while start < len(tokens):
        stop, is_image = start, tokens[start] == image_token
        while stop < len(tokens) and (tokens[stop] == image_token) == is_image:
            stop += 1
        run = tuple(tokens[start:stop])
        pieces += pictures.take(run) if is_image else [Piece(run)]
        start = stop
    pictures.check_all_taken()
    return pieces


class _Pictures:
    """Which image tokens of which picture come next."""

    def __init__(self, plans: Sequence[ImagePlan]):
        self._plans = plans
        self._picture = self._start = self._grid = 0

    def take(self, run: tuple[int, ...]) -> Iterator[Piece]:
        """A run of image tokens in pieces, one for each picture and grid that it shows."""
        while run:
            if self._picture == len(self._plans):
                raise PromptError(
                    f"the chat template wrote image tokens for more than {len(self._plans)} "
                    "pictures; "
                    "it does not fit this model"
                )
            plan = self._plans[self._picture]
            grid = plan.grids[self._grid] if plan.grids else None
            left = plan.tokens - self._start
            count = min(len(run), left if grid is None else grid[0] * grid[1])
            if grid is not None and count < grid[0] * grid[1]:
                raise PromptError(
                    f"{grid[0]} x {grid[1]} image tokens of a picture do not stand together in the "
                    "prompt; "
                    "the tokenizer does not fit this model"
                )
            yield Piece(run[:count], self._picture, self._start, grid)
            run = run[count:]
            self._start, self._grid = self._start + count, self._grid + 1
            if count == left:
                self._picture, self._start, self._grid = self._picture + 1, 0, 0

    def check_all_taken(self) -> None:
        if self._picture < len(self._plans):
            raise PromptError(
                f"the prompt has fewer image tokens than its {len(self._plans)} pictures take; "
                "the tokenizer does not fit this model"
            )
