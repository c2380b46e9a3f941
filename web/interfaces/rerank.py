"""Routes for scores: how relevant documents are to a query. In the form of Jina and Cohere, as vLLM
and llama.cpp's server answer it, in that of text-embeddings-inference, and in vLLM's for pairs.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from flask import Blueprint, Response, json

from mtmd import ContextError, PromptError, Ranking
from mtmd.web.access import owner
from mtmd.web.answering.answer import Answering
from mtmd.web.answering.request import Piece
from mtmd.web.errors import ApiError, ContextApiError
from mtmd.web.intake.media import Reference, Shown
from mtmd.web.intake.request_limits import Body, Work, takes
from mtmd.web.intake.typed_body import json_body
from mtmd.web.interfaces.embedding_requests import NamedModel
from mtmd.web.interfaces.openai_requests import ignored
from mtmd.web.interfaces.rerank_requests import Judged, RerankRequest, ScoreRequest, pieces_of
from mtmd.web.models.choice import Models

if TYPE_CHECKING:
    from mtmd.embedding.service import RetrievalService

RERANK = ("/v1/rerank", "/v2/rerank", "/v1/reranking")
SCORE = "/v1/score"
_LOCATION = re.compile(r"(query|documents\[(\d+)\]): ")


def no_scores(models: Models, name: str | None) -> ApiError:
    """Return what a request for scores is refused with where models give none. `name`: of the model
    it asks for. Raises ApiError (404) for one that is not here.
    """
    return ApiError(
        400,
        f"{models.find(name).name!r} gives no scores of documents; serve a reranker for them, "
        "one of those in docs/embed.md",
        param="model",
        code="no_scores",
    )


def blueprint(answering: Answering, service: RetrievalService | None = None) -> Blueprint:
    """`service` None: the models give no scores."""
    routes = Blueprint("rerank", __name__)
    models, media = answering.models, answering.media

    def read(kind: type[Any]) -> tuple[Any, Sequence[str]]:
        """The body, and what of it is not known."""
        if service is None:
            raise no_scores(models, json_body(NamedModel).model)
        body = json_body(kind)
        models.find(body.model)
        return body, ignored(answering.check_unknown(body))

    def ranking(
        body: Judged, query: Sequence[Piece], documents: Sequence[Sequence[Piece]], name: str
    ) -> Ranking:
        assert service is not None
        every = [piece for pieces in (query, *documents) for piece in pieces]
        references = [piece for piece in every if isinstance(piece, Reference)]
        with media.shown(references, owner()) as shown, _located(name):
            opened = iter(shown)
            query_parts, *listed = [_parts(pieces, opened) for pieces in (query, *documents)]
            return service.rank(query_parts, listed, body.instruction)

    def called(body: Judged) -> str:
        return models.choose(body.model).called(body.model)

    @takes(Body.JSON_WITH_PICTURES, Work.ANSWER)
    def rerank() -> Response:
        body, warnings = read(RerankRequest)
        documents = [pieces_of(d, f"{body.name}[{i}]") for i, d in enumerate(body.listed)]
        made = ranking(body, pieces_of(body.query, "query"), documents, body.name)
        best = made.results[: body.top_n or None]
        if body.texts is not None:
            return _json(
                [
                    {"index": one.index, "score": one.score}
                    | ({"text": _text(documents[one.index])} if body.return_text else {})
                    for one in best
                ]
            )
        shown = body.return_documents is not False
        results = [
            {"index": one.index, "relevance_score": one.score}
            | ({"document": {"text": _text(documents[one.index])}} if shown else {})
            for one in best
        ]
        return _json(
            {
                "id": f"rerank-{uuid4().hex}",
                "object": "list",
                "model": called(body),
                "results": results,
                "usage": _usage([made], warnings),
            }
        )

    @takes(Body.JSON_WITH_PICTURES, Work.ANSWER)
    def score() -> Response:
        body, warnings = read(ScoreRequest)
        queries = [pieces_of(q, f"text_1[{i}]") for i, q in enumerate(body.first)]
        documents = [pieces_of(d, f"text_2[{i}]") for i, d in enumerate(body.second)]
        if len(queries) == 1:
            made = [ranking(body, queries[0], documents, "text_2")]
        else:
            pairs = zip(queries, documents, strict=True)
            made = [ranking(body, query, [document], "text_2") for query, document in pairs]
        scores = [float(score) for one in made for score in one.scores]
        return _json(
            {
                "id": f"score-{uuid4().hex}",
                "object": "list",
                "created": int(time.time()),
                "model": called(body),
                "data": [
                    {"index": i, "object": "score", "score": score}
                    for i, score in enumerate(scores)
                ],
                "usage": _usage(made, warnings),
            }
        )

    for path in RERANK:
        routes.add_url_rule(path, f"rerank {path}", rerank, methods=["POST"])
    routes.add_url_rule(SCORE, "score", score, methods=["POST"])
    return routes


def _json(value: Any) -> Response:
    return Response(json.dumps(value), mimetype="application/json")


def _parts(pieces: Sequence[Piece], shown: Iterator[Shown]) -> list[dict[str, Any]]:
    """A query or a document as parts of a message."""
    return [
        {"type": "text", "text": piece} if isinstance(piece, str) else next(shown).part
        for piece in pieces
    ]


def _text(pieces: Sequence[Piece]) -> str | None:
    """The text of a document, None for one of pictures alone: those are not sent back."""
    texts = [piece for piece in pieces if isinstance(piece, str)]
    return "\n".join(texts) if texts else None


def _usage(made: Sequence[Ranking], warnings: Sequence[str]) -> dict[str, Any]:
    tokens = sum(one.receipt.prompt_tokens for one in made)
    receipts = [one.receipt.asdict() for one in made]
    receipts[0]["warnings"] = [*receipts[0]["warnings"], *warnings]
    return {
        "prompt_tokens": tokens,
        "total_tokens": tokens,
        "mtmd_receipt": receipts[0] if len(receipts) == 1 else receipts,
    }


@contextmanager
def _located(name: str) -> Iterator[None]:
    """Names the document of the request, as it calls it, in an error about one."""
    try:
        yield
    except PromptError as error:
        match = _LOCATION.match(str(error))
        if match is None:
            raise
        where = match[1] if match[2] is None else f"{name}[{match[2]}]"
        if not isinstance(error, ContextError):
            message = f"{where}: {str(error)[match.end() :]}"
            raise ApiError(400, message, param=where) from error
        refused = ContextApiError(error)
        refused.message, refused.param = f"{where}: {refused.message}", where
        raise refused from error
