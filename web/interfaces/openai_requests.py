"""Describes what requests look like. Fields that nobody knows are ignored, and the receipt says so;
what is known and cannot be done is refused by name.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import BeforeValidator, Field, Tag, WithJsonSchema, field_validator, model_validator
from pydantic_core import PydanticCustomError

from mtmd.options.answer import STOP_CHARS_MAX, STOP_IDS_MAX, STOPS_MAX
from mtmd.web.answering.request import AnswerRequest, Piece, RawText, Turn, closest
from mtmd.web.answering.tools import GivenTools, chosen_tool, given_tools
from mtmd.web.errors import TAG
from mtmd.web.intake.media import Reference
from mtmd.web.intake.typed_body import WHOLE, Loose, Request
from mtmd.web.interfaces.fields import (
    LONGEST_GRAMMAR,
    MAX_MESSAGES,
    MAX_PROMPTS,
    Adapters,
    Additive,
    Fraction,
    Logprobs,
    LoraScales,
    ModelName,
    Penalty,
    Schema,
    Seed,
    Task,
    Temperature,
    TokenId,
    Tools,
    TopK,
    by_type,
    given,
    none_for_minus_one,
    pieces,
    promised,
    scales,
    within,
)
from mtmd.web.interfaces.openai_messages import (
    CalledFunction,
    FrameChoice,
    ImagePart,
    MediaOptions,
    Message,
)
from mtmd.web.interfaces.thinking import ThinkingFields

MAX_CHOICES = 128


def _prompts(value: Any) -> Any:
    """A list of prompts, each a text or a list of ids."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value and all(type(item) is int for item in value):
        return [value]
    return value


Count: TypeAlias = Annotated[
    Annotated[int, within("max_tokens"), WHOLE] | None,
    BeforeValidator(none_for_minus_one),
    WithJsonSchema({"type": "integer", "minimum": -1, "maximum": 1 << 20}),
]


Prompt: TypeAlias = str | Annotated[list[TokenId], Field(min_length=1)]


_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}


_PROMPT_SCHEMA = {
    "anyOf": [
        {"type": "string"},
        _IDS,
        {"type": "array", "items": {"anyOf": [{"type": "string"}, _IDS]}, "minItems": 1},
    ]
}


def _several(value: Any) -> Any:
    """A list; empty texts, which some clients send for none, are left out."""
    values = [value] if isinstance(value, str) else value
    return [v for v in values if v != ""] if isinstance(values, list) else values


Texts: TypeAlias = Annotated[
    list[Annotated[str, Field(min_length=1, max_length=STOP_CHARS_MAX)]],
    Field(max_length=STOPS_MAX, fail_fast=True),
    BeforeValidator(_several),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string", "minLength": 1, "maxLength": STOP_CHARS_MAX},
                {
                    "type": "array",
                    "items": {"type": "string", "minLength": 1, "maxLength": STOP_CHARS_MAX},
                    "maxItems": STOPS_MAX,
                },
            ]
        }
    ),
]


def _bias(value: Any) -> Any:
    """llama.cpp's lists of pairs, in which false stands for never."""
    if not isinstance(value, list) or not all(
        isinstance(pair, list) and len(pair) == 2 and type(pair[0]) is int for pair in value
    ):
        return value
    return {str(token): -100.0 if bias is False else bias for token, bias in value}


_BIAS = {"type": "number", "minimum": -100, "maximum": 100}


Bias: TypeAlias = Annotated[
    dict[str, Annotated[float, Field(ge=-100, le=100)]],
    Field(max_length=1024),
    BeforeValidator(_bias),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "object", "additionalProperties": _BIAS, "maxProperties": 1024},
                {
                    "type": "array",
                    "items": {
                        "type": "array",
                        "prefixItems": [
                            {"type": "integer", "minimum": 0},
                            {"anyOf": [_BIAS, {"const": False}]},
                        ],
                        "minItems": 2,
                        "maxItems": 2,
                    },
                    "maxItems": 1024,
                },
            ]
        }
    ),
]


class StreamOptions(Loose):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None

    @field_validator("continuous_usage_stats")
    @classmethod
    def _refused(cls, value: bool | None) -> bool | None:
        if value:
            raise PydanticCustomError(
                "unsupported",
                "{param}: not supported here; leave it out",
                {"param": "stream_options.continuous_usage_stats", "code": "unsupported_parameter"},
            )
        return value


class NamedSchema(Loose):
    name: str = Field(default="answer", max_length=64)
    schema_: Schema = Field(alias="schema")
    strict: bool | None = None


class PlainFormat(Loose):
    """`schema` beside json_object is llama.cpp's way to ask for one."""

    type: Literal["text", "json_object"]
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")


class SchemaFormat(Loose):
    type: Literal["json_schema"]
    json_schema: NamedSchema


ResponseFormat: TypeAlias = Annotated[
    Annotated[PlainFormat, Tag(f"{TAG}text")]
    | Annotated[PlainFormat, Tag(f"{TAG}json_object")]
    | Annotated[SchemaFormat, Tag(f"{TAG}json_schema")],
    by_type("format", "expected type text, json_object or json_schema"),
]


class Structured(Loose):
    """vLLM's `structured_outputs`: one of them."""

    json_: dict[str, Any] | str | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


class Generation(Request):
    """Describes what chat and plain completions have in common. `top_k`, `min_p`,
    `repetition_penalty`, `min_tokens`, `stop_token_ids`, `ignore_eos`, adapters, tasks and grammars
    are not OpenAI's.
    """

    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = {
        "best_of": (1,),
        "use_beam_search": (False,),
        "length_penalty": (1,),
        "early_stopping": (False,),
        "truncate_prompt_tokens": (),
        "typical_p": (1,),
        "mirostat": (0,),
        "dry_multiplier": (0,),
        "xtc_probability": (0,),
        "bad_words": ([],),
        "allowed_token_ids": ([],),
        "logits_processors": ([],),
    }
    # fields of OpenAI's that say who asks and how the answer is kept, and nothing of the answer
    harmless: ClassVar[frozenset[str]] = frozenset(
        [
            "user",
            "metadata",
            "store",
            "service_tier",
            "safety_identifier",
            "prompt_cache_key",
            "prompt_cache_retention",
            "prediction",
            "client_metadata",
        ]
    )

    model: ModelName | None = None
    max_tokens: Count | None = None
    temperature: Temperature | None = None
    top_p: Fraction | None = None
    top_k: Annotated[TopK | None, BeforeValidator(none_for_minus_one)] = None
    min_p: Fraction | None = None
    repetition_penalty: Penalty | None = None
    repeat_penalty: Penalty | None = None
    frequency_penalty: Additive | None = None
    presence_penalty: Additive | None = None
    no_repeat_ngram: Annotated[int, within("no_repeat_ngram"), WHOLE] | None = None
    no_repeat_window: Annotated[int, within("no_repeat_window"), WHOLE] | None = None
    no_repeat_except: Annotated[list[TokenId], Field(max_length=STOP_IDS_MAX)] | None = None
    logit_bias: Bias | None = None
    seed: Annotated[Seed | None, BeforeValidator(none_for_minus_one)] = None
    stop: Texts | None = None
    min_tokens: Annotated[int, within("min_tokens"), WHOLE] | None = None
    stop_token_ids: list[Annotated[int, Field(ge=0, lt=1 << 31), WHOLE]] | None = Field(
        default=None, max_length=STOP_IDS_MAX
    )
    ignore_eos: bool | None = None
    sampling: Literal["model", "greedy", "off"] | None = None
    stop_repeating: bool | None = None
    adapter: Adapters | None = None
    task: Task | None = None
    lora: LoraScales | None = None  # llama.cpp's
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_progress: bool | None = None  # llama.cpp's: chunks that say how far the prompt is
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES), WHOLE] | None = None
    prompt_logprobs: Logprobs | None = None  # vLLM's
    grammar: str | None = Field(default=None, max_length=LONGEST_GRAMMAR)
    json_schema: dict[str, Any] | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    structured_outputs: Structured | None = None

    def warnings(self) -> tuple[str, ...]:
        """Return what was asked for, and is not answered to."""
        return ignored(self.unknown)

    def _structures(self) -> Iterator[tuple[str, str, Any]]:
        """(field, option, value) of each way to say what the answer has to look like."""
        requested = self.structured_outputs or Structured()
        for field, option, value in (
            ("json_schema", "json_schema", promised(self.json_schema)),
            ("guided_json", "json_schema", promised(self.guided_json)),
            ("structured_outputs", "json_schema", promised(requested.json_)),
            ("structured_outputs", "json_schema", True if requested.json_object else None),
            ("grammar", "grammar", self.grammar),
            ("guided_grammar", "grammar", self.guided_grammar),
            ("ebnf", "grammar", self.ebnf),
            ("structured_outputs", "grammar", requested.grammar),
        ):
            if value is not None and value != "":
                yield field, option, value
        for field, kind, text in (
            ("guided_regex", "regex", self.guided_regex),
            ("regex", "regex", self.regex),
            ("structured_outputs", "regex", requested.regex),
            ("guided_choice", "choice", self.guided_choice),
            ("structured_outputs", "choice", requested.choice),
        ):
            if text:
                yield field, "grammar", {kind: text}

    @model_validator(mode="after")
    def _scored_whole(self) -> Generation:
        if self.prompt_logprobs is not None and self.stream:
            raise PydanticCustomError(
                "stream",
                "{param}: found with prompt_logprobs, expected one of the two: log probabilities "
                "of a prompt come with the whole answer",
                {"param": "stream"},
            )
        return self

    @model_validator(mode="after")
    def _one_structure(self) -> Generation:
        fields = [field for field, *_ in self._structures()]
        if len(fields) > 1:
            raise PydanticCustomError(
                "structures",
                "{param}: given beside {other}; an answer follows one of them",
                {"param": fields[1], "other": fields[0]},
            )
        return self

    def options(self) -> dict[str, Any]:
        """The fields of AnswerOptions that were given."""
        names = (
            "max_tokens",
            "temperature",
            "top_p",
            "top_k",
            "min_p",
            "repetition_penalty",
            "frequency_penalty",
            "presence_penalty",
            "no_repeat_ngram",
            "no_repeat_window",
            "no_repeat_except",
            "seed",
            "prompt_logprobs",
            "min_tokens",
            "ignore_eos",
            "sampling",
            "stop_repeating",
            "adapter",
            "task",
        )
        options = given(**{name: getattr(self, name) for name in names}, lora=scales(self.lora))
        if self.repetition_penalty is None and self.repeat_penalty is not None:
            options["repetition_penalty"] = self.repeat_penalty
        if self.logit_bias:
            options["logit_bias"] = self.logit_bias
        if self.stop_token_ids:
            options["stop_token_ids"] = tuple(self.stop_token_ids)
        options |= {option: value for _, option, value in self._structures()}
        return options | ({"stop": tuple(self.stop)} if self.stop else {})


def ignored(unknown: list[str]) -> tuple[str, ...]:
    """Return the warning of fields that nobody knows."""
    names = ["".join(c for c in name[:60] if c.isprintable()) for name in unknown[:20]]
    return (f"unknown and ignored: {', '.join(names)}",) if names else ()


class ChatRequest(ThinkingFields, Generation):
    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = Generation.unsupported | {
        "audio": (),
        "chat_template": ("",),
        "documents": ([],),
        "modalities": ([], ["text"]),
    }

    messages: list[Message] = Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Logprobs | None = None
    response_format: ResponseFormat | None = None
    tools: Tools | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    functions: Tools | None = None
    function_call: str | CalledFunction | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    media_io_kwargs: MediaOptions | None = None
    mm_processor_kwargs: FrameChoice | None = None

    @cached_property
    def given_tools(self) -> GivenTools:
        """Return the given tools of `functions`, the old form of `tools`, where there are no
        others.
        """
        if self.tools or not self.functions:
            return given_tools(self.tools)
        return given_tools([{"type": "function", "function": f} for f in self.functions])

    @property
    def calls_old_way(self) -> bool:
        """Return whether a call is to be a `function_call`."""
        return bool(self.functions and not self.tools)

    @property
    def unknown(self) -> list[str]:
        return [*super().unknown, *self.given_tools.left_out]

    @property
    def continues(self) -> bool:
        """Return whether the answer goes on from the last message: as asked for, else where that is
        a text of the assistant.
        """
        if self.continue_final_message is not None:
            return self.continue_final_message
        last = self.messages[-1]
        says = last.role == "assistant" and (last.content or last.thought) and not last.tool_calls
        return bool(says) and not self.add_generation_prompt

    def _structures(self) -> Iterator[tuple[str, str, Any]]:
        yield from super()._structures()
        requested = self.response_format
        if isinstance(requested, SchemaFormat):
            named = requested.json_schema
            yield "response_format", "json_schema", promised(named.schema_, named.strict)
        elif requested is not None and requested.type == "json_object":
            yield (
                "response_format",
                "json_schema",
                promised(requested.schema_ or {"type": "object"}),
            )

    @model_validator(mode="after")
    def _calls_one_way(self) -> ChatRequest:
        """Not by fields of both ways, of which one would mean nothing."""
        both = None
        if self.tools and self.functions:
            both = "functions", "tools"
        elif self.tool_choice is not None and self.function_call is not None:
            both = "function_call", "tool_choice"
        if both:
            raise PydanticCustomError(
                "calls",
                "{param}: found with {other}, expected one of them",
                {"param": both[0], "other": both[1]},
            )
        if self.function_call not in (None, "none", "auto") and not self.functions:
            raise PydanticCustomError(
                "function_call",
                "{param}: found without functions, expected some in functions",
                {"param": "function_call"},
            )
        return self

    @model_validator(mode="after")
    def _need_logprobs(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise PydanticCustomError(
                "top_logprobs",
                "{param}: given without logprobs; set logprobs to true",
                {"param": "top_logprobs"},
            )
        return self

    def options(self) -> dict[str, Any]:
        options = super().options()
        if self.max_completion_tokens is not None:
            options["max_tokens"] = self.max_completion_tokens
        if self.logprobs:
            options["logprobs"] = self.top_logprobs or 0
        return options

    def warnings(self) -> tuple[str, ...]:
        return (*super().warnings(), *self.thinking_warnings())

    def request(self) -> AnswerRequest:
        """Raises ApiError for tools that a server would run."""
        return AnswerRequest(
            self.model,
            bool(self.stream),
            turns=tuple(self._turns()),
            options=self.options(),
            prompt_options=self._prompt_options(),
            detail=closest(self._details()),
            number=self.n or 1,
            custom_tools=self.given_tools.custom,
        )

    def _prompt_options(self) -> dict[str, Any]:
        options: dict[str, Any] = {"continue_final_message": True} if self.continues else {}
        options |= self.thinking_options()
        tools = list(self.given_tools.tools)
        choice = chosen_tool(self.tool_choice, self.given_tools)
        several = self.parallel_tool_calls
        if self.calls_old_way:
            named: Any = self.function_call
            several = False
            if isinstance(named, CalledFunction):
                named = {"type": "function", "function": {"name": named.name}}
            choice = choice or named
        if tools:
            options |= {"tools": tools, "parallel_tool_calls": several}
        if choice not in (None, "none", "auto") or tools:
            options["tool_choice"] = choice
        return options

    def _turns(self) -> Iterator[Turn]:
        usual: dict[str, Any] = {}  # choice of frames
        for options in ((self.media_io_kwargs or MediaOptions()).video, self.mm_processor_kwargs):
            usual |= options.chosen() if options else {}
        for i, message in enumerate(self.messages):
            content: str | tuple[Piece, ...] | None = None
            if isinstance(message.content, str):
                content = message.content
            elif message.content is not None:
                content = tuple(
                    replace(piece, frames=usual | dict(piece.frames))
                    if isinstance(piece, Reference) and piece.kind in ("video", None)
                    else piece
                    for piece in pieces(message.content, f"messages[{i}].content")
                )
            yield Turn(
                "system" if message.role == "developer" else message.role,
                content,
                message.calls,
                answers=message.tool_call_id,
                thought=message.thought or "",
                name=message.name,
            )

    def _details(self) -> Iterator[str]:
        """Yield how closely each picture is to be looked at."""
        for message in self.messages:
            for part in message.content if isinstance(message.content, list) else ():
                if isinstance(part, ImagePart):
                    yield part.image_url.detail


class CompletionRequest(Generation):
    """`prompt` is what the model goes on from: text, in which the spellings of special tokens are
    those tokens, or tokens' ids; one or several.
    """

    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = Generation.unsupported | {"suffix": ("",)}

    prompt: Annotated[list[Prompt], BeforeValidator(_prompts), WithJsonSchema(_PROMPT_SCHEMA)] = (
        Field(min_length=1, max_length=MAX_PROMPTS)
    )
    logprobs: Logprobs | None = None
    echo: bool | None = None

    @property
    def scores_prompt(self) -> bool:
        """Return whether the log probabilities of an answer begin with those of its prompt."""
        return bool(self.echo) and self.logprobs is not None

    @model_validator(mode="after")
    def _whole(self) -> CompletionRequest:
        if self.scores_prompt and self.stream:
            raise PydanticCustomError(
                "stream",
                "{param}: found with echo and logprobs, expected two of the three: log "
                "probabilities of a prompt come with the whole answer",
                {"param": "stream"},
            )
        return self

    def options(self) -> dict[str, Any]:
        options = super().options()
        if self.logprobs is not None:
            options["logprobs"] = self.logprobs
        if self.scores_prompt:
            options["prompt_logprobs"] = max(self.logprobs or 0, self.prompt_logprobs or 0)
        return options

    def request(self) -> AnswerRequest:
        prompts: tuple[RawText, ...] = tuple(self.prompt)
        return AnswerRequest(
            self.model,
            bool(self.stream),
            prompts=prompts,
            options=self.options(),
            number=self.n or 1,
        )
