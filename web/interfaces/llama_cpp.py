"""Routes of llama.cpp's server (tools/server/README.md of github.com/ggml-org/llama.cpp) that have
no counterpart in OpenAI's interface: completions of plain prompts in its own form, a prompt's text
and its tokens, slots, whether it is ready.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar

from flask import Blueprint, Response, jsonify, request
from pydantic import Field, RootModel

from mtmd import Answer, Event, Finished, Receipt, TextPiece, TokenInfo, __version__
from mtmd.web import sse
from mtmd.web.access import without_key
from mtmd.web.answering.answer import Answering, Form, check_length, error_response
from mtmd.web.answering.request import AnswerRequest
from mtmd.web.answering.response_streams import Collected, Writer
from mtmd.web.errors import ApiError, in_llama_cpp_form
from mtmd.web.intake.request_limits import Body, Work, takes
from mtmd.web.intake.typed_body import WHOLE, Loose, Request, json_body
from mtmd.web.interfaces.fields import (
    LONGEST_GRAMMAR,
    MAX_PROMPTS,
    MAX_TOKENS,
    Additive,
    Fraction,
    Logprobs,
    LoraScales,
    ModelName,
    Penalty,
    Schema,
    Stops,
    Temperature,
    TokenId,
    given,
    promised,
    scales,
    within,
)
from mtmd.web.interfaces.openai_requests import Bias, ChatRequest
from mtmd.web.models.choice import state_of
from mtmd.web.served_model import ServedModel


class Tokenize(Loose):
    """`add_special`: with what the tokenizer puts around a prompt; `parse_special`: spellings of
    special tokens become those tokens. vLLM's clients send a `prompt`, around which their server
    puts special tokens unless `add_special_tokens` is false.
    """

    content: str | None = None
    prompt: str | None = None
    model: ModelName | None = None
    add_special: bool = False
    add_special_tokens: bool = True
    parse_special: bool = True
    with_pieces: bool = False

    def text(self) -> tuple[str, str]:
        """Return the name of the field that has the text, and the text. Raises ApiError."""
        given = [
            (n, t) for n, t in (("content", self.content), ("prompt", self.prompt)) if t is not None
        ]
        if len(given) != 1:
            raise ApiError(
                400,
                f"content: found {'it and prompt' if given else 'neither it nor prompt'}, expected "
                "one of them, a text",
                param="content",
            )
        return given[0]


class Detokenize(Loose):
    tokens: list[TokenId] = Field(max_length=1 << 17, fail_fast=True)
    model: ModelName | None = None


class Scales(RootModel[LoraScales]):
    """Scales of adapters, for requests that choose none."""


Ids = list[TokenId]
Mixed = list[str | TokenId]


class Completion(Request):
    """`prompt`: a text, ids of tokens, both mixed in one list, or a list of several of these. What
    only says how llama.cpp keeps its cache is left aside.
    """

    harmless: ClassVar[frozenset[str]] = frozenset(
        ("cache_prompt", "id_slot", "n_keep", "n_discard", "n_cache_reuse", "timings_per_token")
    )
    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = {
        "typical_p": (1,),
        "mirostat": (0,),
        "dry_multiplier": (0,),
        "xtc_probability": (0,),
        "dynatemp_range": (0,),
        "n_indent": (0,),
        "samplers": ([],),
        "image_data": ([],),
        "post_sampling_probs": (False,),
        "t_max_predict_ms": (0, -1),
    }

    prompt: str | Mixed | list[str | Ids | Mixed] = Field(union_mode="left_to_right")
    model: ModelName | None = None
    n_predict: Annotated[int, Field(ge=-1, le=MAX_TOKENS), WHOLE] | None = None
    max_tokens: Annotated[int, Field(ge=-1, le=MAX_TOKENS), WHOLE] | None = None
    stream: bool = False
    temperature: Temperature | None = None
    top_k: Annotated[int, within("top_k", -1), WHOLE] | None = None
    top_p: Fraction | None = None
    min_p: Fraction | None = None
    repeat_penalty: Penalty | None = None
    presence_penalty: Additive | None = None
    frequency_penalty: Additive | None = None
    seed: Annotated[int, within("seed", -1), WHOLE] | None = None
    stop: Stops | None = None
    ignore_eos: bool | None = None
    lora: LoraScales | None = None
    logit_bias: Bias | None = None
    grammar: str | None = Field(default=None, max_length=LONGEST_GRAMMAR)
    json_schema: Schema | None = None
    n_probs: Logprobs = 0
    return_tokens: bool = False
    response_fields: list[str] = Field(default_factory=list, max_length=64)

    def prompts(self) -> list[str | Mixed]:
        """Each a text, or texts and ids to be joined."""
        if isinstance(self.prompt, list) and any(isinstance(p, list) for p in self.prompt):
            return list(self.prompt)  # type: ignore[arg-type]  # no single ids stand in it
        texts = isinstance(self.prompt, list) and all(isinstance(p, str) for p in self.prompt)
        return list(self.prompt) if texts else [self.prompt]  # type: ignore[arg-type,list-item]

    def request(self) -> AnswerRequest:
        """Raises ApiError for too few or too many prompts, or several in a stream."""
        prompts = self.prompts()
        if not 0 < len(prompts) <= MAX_PROMPTS:
            raise ApiError(400, f"prompt: expected 1 to {MAX_PROMPTS} prompts", param="prompt")
        if self.stream and len(prompts) > 1:
            raise ApiError(
                400, "stream: found with several prompts, expected one of them", param="stream"
            )
        return AnswerRequest(
            self.model, self.stream, prompts=tuple(prompts), options=self._options()
        )

    def _options(self) -> dict[str, Any]:
        """The fields of AnswerOptions that were given."""
        maximum = self.n_predict if self.n_predict is not None else self.max_tokens
        needs_tokens = self.n_probs or self.stream or self.return_tokens
        return given(
            max_tokens=None if maximum == -1 else maximum,
            temperature=self.temperature,
            top_k=None if self.top_k == -1 else self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repeat_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            seed=None if self.seed == -1 else self.seed,
            stop=tuple(self.stop) if self.stop else None,
            ignore_eos=self.ignore_eos,
            lora=scales(self.lora),
            logit_bias=self.logit_bias or None,
            grammar=self.grammar or None,
            json_schema=promised(self.json_schema),
            logprobs=self.n_probs if needs_tokens else None,
        )


def blueprint(answering: Answering) -> Blueprint:
    routes = Blueprint("llama_cpp", __name__)
    routes.register_error_handler(Exception, lambda error: error_response(error, in_llama_cpp_form))

    def chosen(body: Tokenize | Detokenize) -> ServedModel:
        return answering.models.choose(body.model if answering.models.many else None)

    @routes.post("/completion")
    @takes(Body.JSON, Work.ANSWER)
    def completion() -> Response:
        body = answering.read(Completion)
        requested = body.request()
        if not answering.models.many:  # a server with one model does not mind what it is called
            requested = replace(requested, model=None)
        return answering.answer(requested, CompletionForm(body))

    @routes.post("/tokenize")
    @takes(Body.JSON, Work.ANSWER)
    def tokenize() -> dict[str, Any]:
        body = json_body(Tokenize)
        model = chosen(body)
        field, text = body.text()
        check_length(model, field, len(text))
        around = body.add_special if field == "content" else body.add_special_tokens
        tokens = model.service.tokens_of(text, special=body.parse_special, around=around)
        if field == "prompt":
            return {"tokens": tokens, "count": len(tokens), "max_model_len": model.context}
        if not body.with_pieces:
            return {"tokens": tokens}
        spell = model.service.spelling_of
        return {"tokens": [{"id": token, "piece": spell([token])} for token in tokens]}

    @routes.post("/detokenize")
    @takes(Body.JSON, Work.ANSWER)
    def detokenize() -> dict[str, str]:
        """The text as llama.cpp's server names it, and as vLLM's does."""
        body = json_body(Detokenize)
        text = chosen(body).service.spelling_of(body.tokens)
        return {"content": text, "prompt": text}

    @routes.get("/tokenizer_info")
    @takes(Body.NOTHING)
    def tokenizer_info() -> dict[str, Any]:
        """vLLM's: special tokens and the chat template."""
        model = answering.models.choose(request.args.get("model"))
        service = model.service
        return {
            "tokenizer_class": "mtmd",
            "bos_token": None,
            "eos_token": None,
            **service.special_tokens,
            "chat_template": service.chat_template,
            "max_model_len": model.context,
        }

    @routes.post("/apply-template")
    @takes(Body.JSON_WITH_PICTURES, Work.ANSWER)
    def apply_template() -> dict[str, str]:
        """The prompt that a chat request would read, tools and the beginning of the answer
        included; pictures stand in it as the template writes them.
        """
        return {"prompt": answering.rendered(json_body(ChatRequest).request())}

    @routes.get("/lora-adapters")
    @takes(Body.NOTHING)
    def adapters() -> Response:
        """Adapters by number, each with its scale for requests that choose none."""
        model = answering.models.choose(request.args.get("model"))
        return jsonify(
            [
                {
                    "id": number,
                    "name": one.name,
                    "path": one.file,
                    "scale": model.applied.get(one.name, 0.0),
                }
                for number, one in enumerate(model.adapters)
            ]
        )

    @routes.post("/lora-adapters")
    @takes(Body.JSON)
    def apply_adapters() -> dict[str, bool]:
        """Set these scales, for requests that choose no adapter; 0 for the others."""
        model = answering.models.choose(request.args.get("model"))
        model.applied = model.scales_of(scales(json_body(Scales).root) or [])
        return {"success": True}

    @routes.get("/slots")
    @takes(Body.NOTHING)
    def slots() -> Any:
        """Answers belong to no slot by number: as many as are computed are shown as busy."""
        model = answering.models.at_hand(request.args.get("model"))
        if model is None:
            return jsonify([])
        stats = model.service.stats()
        if "fail_on_no_slot" in request.args and stats.running >= stats.slots:
            raise ApiError(503, "no slot is free", code="server_busy", headers={"Retry-After": "1"})
        return jsonify(
            [
                {
                    "id": number,
                    "n_ctx": model.context,
                    "speculative": False,
                    "is_processing": number < stats.running,
                }
                for number in range(stats.slots)
            ]
        )

    @routes.get("/load")
    @takes(Body.NOTHING)
    def load() -> dict[str, int]:
        """vLLM's: requests being answered or waiting."""
        all_stats = [measured.stats for measured in answering.models.measured()]
        return {"server_load": sum(stats.running + stats.waiting for stats in all_stats)}

    @routes.get("/version")
    @takes(Body.NOTHING)
    @without_key
    def version() -> dict[str, str]:
        return {"version": __version__}

    @routes.get("/ready")
    @takes(Body.NOTHING)
    @without_key
    def ready() -> tuple[dict[str, Any], int]:
        """Answered from when the model is in memory, or, of several, may be asked for; without the
        device, which may hang.
        """
        return state_of(answering.models, "ready")

    return routes


class CompletionForm(Form):
    """Completions as llama.cpp writes them."""

    def __init__(self, body: Completion) -> None:
        self._body = body

    def whole(self, model: ServedModel, answers: Sequence[Collected]) -> Any:
        made = [
            _CompletionWriter(model, self._body, prompt, index).whole(one.answer, one.tokens)
            for index, (prompt, one) in enumerate(zip(self._body.prompts(), answers, strict=True))
        ]
        return made[0] if len(made) == 1 else made

    def writer(self, model: ServedModel) -> Writer:
        return _CompletionWriter(model, self._body, self._body.prompts()[0], 0)

    def error(self, error: ApiError) -> dict[str, Any]:
        return in_llama_cpp_form(error)


class _CompletionWriter(Writer):
    """Writes one completion."""

    def __init__(
        self, model: ServedModel, body: Completion, prompt: str | Mixed, index: int
    ) -> None:
        self._model, self._body, self._prompt, self._index = model, body, prompt, index
        self._count = 0  # tokens that were written

    def write(self, _: int, event: Event) -> Iterator[str]:
        if isinstance(event, TextPiece):
            self._count += len(event.tokens)
            yield sse.event(
                {
                    "index": self._index,
                    "content": event.text,
                    "tokens": [token.id for token in event.tokens],
                    "stop": False,
                    "id_slot": -1,
                    "tokens_predicted": self._count,
                }
                | self._probabilities(event.tokens)
            )
        elif isinstance(event, Finished):
            end = self._end(event.answer) | {"content": "", "tokens": []}
            yield sse.event(self._fields(end))

    def whole(self, answer: Answer, tokens: Sequence[TokenInfo]) -> dict[str, Any]:
        ids = list(answer.output_token_ids) if self._body.return_tokens else []
        content = {"content": answer.text, "tokens": ids}
        return self._fields(self._end(answer) | content | self._probabilities(tokens))

    def _end(self, answer: Answer) -> dict[str, Any]:
        receipt, body, context = answer.receipt, self._body, self._model.context
        limit, used = receipt.finish == "length", receipt.sampling.get("temperature")
        stopped = "word" if answer.stop is not None else "limit" if limit else "eos"
        prompt = self._prompt
        if not isinstance(prompt, str):
            prompt = self._model.service.spelling_of(list(answer.prompt_token_ids))
        return {
            "index": self._index,
            "id_slot": -1,
            "stop": True,
            "model": self._model.name,
            "tokens_predicted": receipt.output_tokens,
            "tokens_evaluated": receipt.prompt_tokens,
            "tokens_cached": receipt.prompt_tokens + receipt.output_tokens,
            "generation_settings": {
                "n_predict": -1 if body.n_predict is None else body.n_predict,
                "seed": receipt.seed,
                "temperature": used.value if used else body.temperature or 0.0,
                "stop": list(body.stop or ()),
                "stream": body.stream,
                "n_probs": body.n_probs,
            },
            "prompt": prompt,
            "has_new_line": "\n" in answer.text,
            "truncated": limit and receipt.prompt_tokens + receipt.output_tokens >= context,
            "stop_type": stopped,
            "stopping_word": answer.stop or "",
            "timings": _timings(receipt),
            "mtmd_receipt": receipt.asdict(),
        }

    def _probabilities(self, tokens: Sequence[TokenInfo]) -> dict[str, Any]:
        if not self._body.n_probs:
            return {}
        return {
            "completion_probabilities": [
                {
                    "id": token.id,
                    "token": token.text,
                    "logprob": token.logprob,
                    "bytes": list(token.text.encode()),
                    "top_logprobs": [
                        {"token": text, "logprob": logprob, "bytes": list(text.encode())}
                        for text, logprob in token.top
                    ],
                }
                for token in tokens
            ]
        }

    def _fields(self, made: dict[str, Any]) -> dict[str, Any]:
        """Return those that were asked for: "generation_settings/n_predict" is one inside
        another.
        """
        if not self._body.response_fields:
            return made
        chosen = {}
        for name in self._body.response_fields:
            value: Any = made
            for part in name.split("/"):
                value = value.get(part, _MISSING) if isinstance(value, dict) else _MISSING
            if value is not _MISSING:
                chosen[name] = value
        return chosen


_MISSING = object()


def _timings(receipt: Receipt) -> dict[str, Any]:
    read = receipt.prompt_tokens - receipt.reused_tokens
    prompt_ms, written_ms = receipt.encode_ms + receipt.prefill_ms, receipt.decode_ms
    return {
        "cache_n": receipt.reused_tokens,
        "prompt_n": read,
        "prompt_ms": prompt_ms,
        "prompt_per_second": read / prompt_ms * 1e3 if prompt_ms else 0.0,
        "predicted_n": receipt.output_tokens,
        "predicted_ms": written_ms,
        "predicted_per_second": receipt.output_tokens / written_ms * 1e3 if written_ms else 0.0,
    }
