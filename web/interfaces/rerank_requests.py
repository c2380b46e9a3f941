"""Describes what requests for scores look like: those of Jina and Cohere, with pictures as clients
of Jina (`{"image": ...}`) and vLLM (`{"content": [...]}`) send them, those of
text-embeddings-inference (`texts`), and vLLM's for pairs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, ClassVar, TypeAlias

from pydantic import AliasChoices, BeforeValidator, Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from mtmd.web.answering.request import Piece
from mtmd.web.errors import TAG, ApiError
from mtmd.web.intake.long_texts import CutText, PictureText, as_data_url, beginning
from mtmd.web.intake.media import Reference
from mtmd.web.intake.typed_body import WHOLE, Loose, Request
from mtmd.web.interfaces.fields import ModelName, Several, pieces
from mtmd.web.interfaces.openai_messages import Part

MAX_DOCUMENTS = 2048
LONGEST_TEXT = 1 << 20
_SCHEMES = ("data:", "http:", "https:", "file:")


def _listed(value: Any) -> Any:
    return value if value is None or isinstance(value, list) else [value]


Text: TypeAlias = Annotated[str, Field(max_length=LONGEST_TEXT)]
Texts: TypeAlias = Annotated[list[Text], Field(max_length=64), BeforeValidator(_listed)]
Media: TypeAlias = Annotated[list[PictureText], Field(max_length=64), BeforeValidator(_listed)]


class Mixed(Loose):
    """A text, a picture (a URL, the id of an upload, or base64 alone) and a video, or several."""

    text: Texts | None = None
    image: Media | None = None
    video: Media | None = None

    @model_validator(mode="after")
    def _has_something(self) -> Mixed:
        if not (self.text or self.image or self.video):
            raise PydanticCustomError(
                "document", "expected a text, an image or a video in it, or content"
            )
        return self

    def pieces(self, location: str) -> Iterator[Piece]:
        for kind, media in (("video", self.video), ("image", self.image)):
            for i, one in enumerate(media or ()):
                at = f"{location}.{kind}" + (f"[{i}]" if len(media or ()) > 1 else "")
                yield Reference(at, _url(one, kind), kind)
        yield from self.text or ()


class Parts(Loose):
    """vLLM's: parts as those of a message."""

    content: Annotated[Several[Part], Field(min_length=1)]

    def pieces(self, location: str) -> Iterator[Piece]:
        """Pictures stand before texts, as the model was shown them."""
        every = list(pieces(self.content, f"{location}.content"))
        for piece in every:
            if isinstance(piece, Reference) and piece.kind == "audio":
                raise ApiError(
                    400,
                    f"{piece.location}: found audio, expected a text, a picture or a video",
                    param=piece.location,
                )
        yield from (one for one in every if isinstance(one, Reference))
        yield from (one for one in every if isinstance(one, str))


def _url(text: str | CutText, kind: str) -> str | CutText:
    begin = beginning(text)
    known = begin[:6].lower().startswith(_SCHEMES) or begin.startswith("file-")
    media = "image/unknown" if kind == "image" else "video/mp4"
    return text if known else as_data_url(text, media)


def _kind(value: Any) -> str | None:
    if isinstance(value, str):
        return f"{TAG}plain"
    if isinstance(value, dict):
        return f"{TAG}parts" if "content" in value else f"{TAG}mixed"
    if isinstance(value, (Mixed, Parts)):
        return f"{TAG}mixed" if isinstance(value, Mixed) else f"{TAG}parts"
    return None


Content: TypeAlias = Annotated[
    Annotated[Text, Tag(f"{TAG}plain")]
    | Annotated[Mixed, Tag(f"{TAG}mixed")]
    | Annotated[Parts, Tag(f"{TAG}parts")],
    Discriminator(
        _kind,
        custom_error_type="document",
        custom_error_message='expected a text, {{"text": ..., "image": ..., "video": ...}} with '
        'one or more of them, or {{"content": [...]}}',
    ),
]
Contents: TypeAlias = Annotated[
    list[Content],
    Field(min_length=1, max_length=MAX_DOCUMENTS, fail_fast=True),
    BeforeValidator(_listed),
]


def pieces_of(content: str | Mixed | Parts, location: str) -> list[Piece]:
    """Return texts, and references to pictures and videos, in order."""
    return [content] if isinstance(content, str) else list(content.pieces(location))


class Judged(Request):
    """Request for scores. `instruction`: what makes a document relevant."""

    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = {
        "truncate_prompt_tokens": (),
        "max_tokens_per_doc": (),
        "max_chunks_per_doc": (),
        "rank_fields": (),
        "truncate": (False,),
        "raw_scores": (False,),
        "use_activation": (True,),
        "mm_processor_kwargs": (),
        "return_embeddings": (False,),
    }
    harmless: ClassVar[frozenset[str]] = frozenset(
        ["user", "priority", "request_id", "truncation_direction"]
    )

    model: ModelName | None = None
    instruction: Annotated[str, Field(max_length=LONGEST_TEXT)] | None = None


class RerankRequest(Judged):
    """`documents` are ranked, or `texts`, of which the answer is as that of
    text-embeddings-inference. `top_n`: the best so many, 0 for all.
    """

    query: Content
    documents: Contents | None = None
    texts: Contents | None = None
    top_n: Annotated[int, Field(ge=0), WHOLE] | None = None
    return_documents: bool | None = None
    return_text: bool | None = None

    @model_validator(mode="after")
    def _one(self) -> RerankRequest:
        if (self.documents is None) == (self.texts is None):
            raise PydanticCustomError(
                "documents", "{param}: expected either documents or texts", {"param": "documents"}
            )
        return self

    @property
    def name(self) -> str:
        """Return the field that has the documents."""
        return "documents" if self.texts is None else "texts"

    @property
    def listed(self) -> Sequence[str | Mixed | Parts]:
        return self.documents or self.texts or ()


class ScoreRequest(Judged):
    """vLLM's: the first with each of the second, or each with its like."""

    first: Contents = Field(validation_alias=AliasChoices("text_1", "data_1", "queries"))
    second: Contents = Field(
        validation_alias=AliasChoices("text_2", "data_2", "documents", "items")
    )

    @model_validator(mode="after")
    def _fit(self) -> ScoreRequest:
        if len(self.first) not in (1, len(self.second)):
            raise PydanticCustomError(
                "pairs",
                "{param}: found {first} and {second}, expected one with any number, or as many",
                {"param": "text_1", "first": len(self.first), "second": len(self.second)},
            )
        return self
