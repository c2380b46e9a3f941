"""OpenAI's route for vectors, of texts and pictures: answered where the model is a dual encoder,
refused where it is not.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from flask import Blueprint

from mtmd.web.access import owner
from mtmd.web.answering.answer import Answering
from mtmd.web.answering.request import Piece
from mtmd.web.errors import ApiError
from mtmd.web.intake.media import Reference
from mtmd.web.intake.request_limits import Body, Work, takes
from mtmd.web.intake.typed_body import json_body
from mtmd.web.interfaces.embedding_requests import EmbeddingRequest, NamedModel
from mtmd.web.interfaces.openai_requests import ignored
from mtmd.web.models.choice import Models

if TYPE_CHECKING:
    from mtmd.embedding.service import RetrievalService


def no_vectors(models: Models, name: str | None) -> ApiError:
    """Return what a request for vectors is refused with where models write answers. `name`: of the
    model it asks for. Raises ApiError (404) for one that is not here.
    """
    return ApiError(
        400,
        f"{models.find(name).name!r} gives no vectors; serve a dual encoder for them, such as "
        "openai/clip-vit-base-patch32",
        param="model",
        code="no_embeddings",
    )


def blueprint(answering: Answering, service: RetrievalService | None = None) -> Blueprint:
    """`service` None: the models give no vectors."""
    routes = Blueprint("embeddings", __name__)
    models, media = answering.models, answering.media

    @routes.post("/v1/embeddings")
    @takes(Body.JSON_WITH_PICTURES, Work.ANSWER)
    def embeddings() -> dict[str, Any]:
        if service is None:  # nothing else that may be wrong with the request matters then
            raise no_vectors(models, json_body(NamedModel).model)
        body = json_body(EmbeddingRequest)
        models.find(body.model)
        warnings = ignored(answering.check_unknown(body))
        inputs = body.inputs()
        shown = [item for item in inputs if isinstance(item, Reference)]
        texts = [item for item in inputs if isinstance(item, str)]
        with media.opened(shown, owner()) as pictures:
            made = service.embeddings(
                pictures, texts, normalize=body.of_length_one, whole=body.truncate is False
            )
        receipt = made.receipt.asdict()
        tokens = sum(i.tokens for i in made.receipt.images)
        tokens += sum(t.tokens for t in made.receipt.texts)
        return {
            "object": "list",
            "model": models.choose(body.model).called(body.model),
            "data": [
                {"object": "embedding", "index": i, "embedding": _written(vector, body.is_base64)}
                for i, vector in enumerate(_in_order(made.vectors, inputs))
            ],
            "usage": {
                "prompt_tokens": tokens,
                "total_tokens": tokens,
                "mtmd_receipt": receipt | {"warnings": [*receipt["warnings"], *warnings]},
            },
        }

    return routes


def _in_order(vectors: Any, inputs: Sequence[Piece]) -> list[Any]:
    """Vectors come with those of pictures first."""
    pictures = sum(isinstance(item, Reference) for item in inputs)
    of_pictures, of_texts = iter(vectors[:pictures]), iter(vectors[pictures:])
    return [next(of_pictures if isinstance(item, Reference) else of_texts) for item in inputs]


def _written(vector: Any, as_base64: bool) -> str | list[Any]:
    """Numbers, or the bytes of little-endian fp32 in base64; of a vector for each token always
    numbers, whose shape bytes would not tell.
    """
    if as_base64 and vector.ndim == 1:
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    numbers: list[Any] = vector.tolist()
    return numbers
