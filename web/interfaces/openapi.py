"""The OpenAPI 3.1 document of the routes for programs, its bodies written by the very models that
check them.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from pydantic.json_schema import models_json_schema

from mtmd import __version__
from mtmd.web.interfaces.embedding_requests import EmbeddingRequest
from mtmd.web.interfaces.files import PURPOSES
from mtmd.web.interfaces.openai_requests import ChatRequest, CompletionRequest
from mtmd.web.interfaces.rerank_requests import RerankRequest, ScoreRequest
from mtmd.web.interfaces.transcription import TranscriptionBody

_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_ID = {"name": "id", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}


@cache
def document() -> dict[str, Any]:
    _, schemas = models_json_schema(
        [
            (kind, "validation")
            for kind in (
                ChatRequest,
                CompletionRequest,
                EmbeddingRequest,
                RerankRequest,
                ScoreRequest,
            )
        ],
        ref_template="#/components/schemas/{model}",
    )
    return {
        "openapi": "3.1.0",
        "servers": [{"url": "./"}],  # wherever a proxy has put it
        "info": {
            "title": "mtmd",
            "version": __version__,
            "description": "Images and prompts in, answers out. Routes of /v1/ are there without "
            "it too.",
        },
        "paths": _paths(),
        "security": [{}, {"key": []}],
        "components": {
            "schemas": schemas["$defs"] | {"Error": _ERROR},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _paths() -> dict[str, Any]:
    file = {
        "type": "object",
        "required": ["file", "purpose"],
        "properties": {
            "file": {"type": "string", "contentMediaType": "application/octet-stream"},
            "purpose": {"enum": list(PURPOSES)},
        },
    }
    return {
        "/v1/chat/completions": {
            "post": _post("An answer to a conversation", "ChatRequest", stream=True)
        },
        "/v1/chat/completions/input_tokens": {
            "post": _post("What a conversation would take", "ChatRequest")
        },
        "/v1/completions": {
            "post": _post("An answer to a prompt", "CompletionRequest", stream=True)
        },
        "/v1/embeddings": {
            "post": _post("Vectors of texts and pictures, by a dual encoder", "EmbeddingRequest")
        },
        "/v1/rerank": {"post": _post("How relevant documents are to a query", "RerankRequest")},
        "/v2/rerank": {"post": _post("The same, by another address", "RerankRequest")},
        "/v1/reranking": {"post": _post("The same, as in llama.cpp's server", "RerankRequest")},
        "/v1/score": {"post": _post("Scores of pairs, in vLLM's form", "ScoreRequest")},
        "/v1/audio/transcriptions": {"post": _speech("What is said in an audio file")},
        "/v1/audio/translations": {"post": _speech("The same, translated")},
        "/v1/models": {"get": _operation("The model")},
        "/v1/models/{id}": {"get": _operation("The model"), "parameters": [_ID]},
        "/v1/files": {
            "get": _operation("Uploaded files"),
            "post": _operation("Upload a picture")
            | {
                "requestBody": {
                    "required": True,
                    "content": {"multipart/form-data": {"schema": file}},
                }
            },
        },
        "/v1/files/{id}": {
            "get": _operation("An uploaded file"),
            "delete": _operation("Delete it"),
            "parameters": [_ID],
        },
        "/v1/files/{id}/content": {
            "get": _operation("Its bytes", "application/octet-stream"),
            "parameters": [_ID],
        },
        "/health": {"get": _health()},
        "/props": {"get": _operation("What the server is and allows")},
        "/warmup": {"get": _operation("The warm-up report")},
        "/metrics": {"get": _operation("Counters", "text/plain")},
    }


def _speech(summary: str) -> dict[str, Any]:
    schema = TranscriptionBody.model_json_schema()
    file = {"type": "string", "contentMediaType": "application/octet-stream"}
    form = {
        "type": "object",
        "required": ["file"],
        "properties": {"file": file, **schema["properties"]},
    }
    body = {"required": True, "content": {"multipart/form-data": {"schema": form}}}
    return _operation(summary) | {"requestBody": body}


def _health() -> dict[str, Any]:
    operation = _operation("Whether the server lives and its device works")
    failed = {
        "description": "The device has failed or hangs; the server ends and is to be started again",
        "content": {
            "application/json": {"schema": {"type": "object", "required": ["status", "reason"]}}
        },
    }
    return operation | {"responses": operation["responses"] | {"503": failed}}


def _post(summary: str, schema: str, stream: bool = False) -> dict[str, Any]:
    operation = _operation(summary)
    if stream:
        operation["responses"]["200"]["content"]["text/event-stream"] = {}
    return operation | {
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": {"$ref": f"#/components/schemas/{schema}"}}},
        }
    }


def _operation(summary: str, kind: str = "application/json") -> dict[str, Any]:
    error = {
        "description": "Refused",
        "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}},
    }
    done = {
        "description": "Done",
        "content": {
            kind: {"schema": {"type": "string" if kind != "application/json" else "object"}}
        },
    }
    return {"summary": summary, "responses": {"200": done, "4XX": error, "5XX": error}}
