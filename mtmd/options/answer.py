"""Describes how an answer is generated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from mtmd.base.errors import OptionError
from mtmd.base.options import (
    FLAG,
    Kind,
    as_given,
    check_options,
    integer,
    one_of,
    option,
    refuse,
    texts,
    whole,
)
from mtmd.clip.tasks import TASKS
from mtmd.clip.token_budget import DETAILS
from mtmd.llm.sampling.options import WAYS, AppliedSampling, Sampling
from mtmd.options.adapters import CHOSEN, AdapterChoice
from mtmd.thinking.request import EFFORTS, ThinkingRequest, checked_variables

if TYPE_CHECKING:  # read when a request has some, as help has no use for them
    from mtmd.tools.tool import Tool, Toolbox

TOKENS_MAX = 1 << 20
WHOLE_CONTEXT = -1  # as max_tokens: llama.cpp and Ollama write it so
STOPS_MAX = 16
STOP_CHARS_MAX = 256
STOP_IDS_MAX = 256


@dataclass(frozen=True)
class PresetSampling:
    """`AnswerOptions.sampling` of a request to a server with a preset. `way`: as there; `names`:
    options that have the preset's values, as the request gave no others.
    """

    way: str
    names: tuple[str, ...]


def _max_tokens(name: str, value: object) -> int:
    """No context is longer than the largest number, which -1 becomes."""
    is_whole = type(value) is int and value == WHOLE_CONTEXT
    return TOKENS_MAX if is_whole else integer(name, value, 0, TOKENS_MAX)


def _logprobs(name: str, value: object) -> int | None:
    """True and False as in OpenAI's interface."""
    if isinstance(value, bool):
        return 0 if value else None
    return integer(name, value, 0, 20)


def _ids(name: str, value: object) -> tuple[int, ...]:
    """Ids of tokens: how many there are, the model knows."""
    if not isinstance(value, (list, tuple)) or len(value) > STOP_IDS_MAX:
        refuse(name, value, f"a list of at most {STOP_IDS_MAX} ids of tokens")
    return tuple(integer(name, item, 0, (1 << 31) - 1) for item in value)


def _stops(name: str, value: object) -> tuple[str, ...]:
    stops: tuple[str, ...] = texts().check(name, value)
    if len(stops) > STOPS_MAX:
        raise OptionError(f"{name}: found {len(stops)} texts, expected at most {STOPS_MAX}")
    longest = max(map(len, stops), default=0)
    if longest > STOP_CHARS_MAX:
        raise OptionError(
            f"{name}: found a text of {longest} characters, expected at most {STOP_CHARS_MAX}"
        )
    return stops


def _way(name: str, value: object) -> object:
    if not isinstance(value, AppliedSampling):
        given = value.way if isinstance(value, PresetSampling) else value
        one_of(*WAYS).check(name, given)
    return value


def _think(name: str, value: object) -> object:
    """Convert on and off as a command has them, auto as a request may give it in place of a
    preset's.
    """
    if type(value) is bool:
        return value
    one_of("on", "off", "auto", *EFFORTS).check(name, value)
    words: dict[object, bool | None] = {"on": True, "off": False, "auto": None}
    return words.get(value, value)


def _schema(_: str, value: object) -> str | None:
    from mtmd.llm.sampling.json_schema import schema_text

    return schema_text(value)


def _grammar(_: str, value: object) -> str | None:
    from mtmd.llm.sampling.grammar_notations import grammar_source

    return grammar_source(value)


@dataclass(frozen=True)
class AnswerOptions(Sampling):
    """Describes how an answer is generated: how its tokens are chosen, and when it ends. Raises
    OptionError naming the field, what was found and what is expected.

    `json_schema` is stored as JSON text, `grammar` in Lark notation, `tools`, `tool_choice` and
    `parallel_tool_calls` as a `Toolbox`, `sampling` as `AppliedSampling` once the model is known.
    """

    max_tokens: int = option(
        256,
        Kind(_max_tokens, parse=int, metavar="N", low=0, high=TOKENS_MAX),
        "max tokens of the answer; -1 for the end of the context",
        preset=True,
    )
    adapter: AdapterChoice = option(
        (),
        CHOSEN,
        "answer with the LoRA adapter that was loaded under this name (--lora NAME=PATH); may "
        "be repeated",
        preset=True,
    )
    detail: str = option(
        "auto",
        one_of(*DETAILS, takes="Detail", metavar="HOW"),
        "detail of pictures: auto, low (few tokens, no tiles) or high",
        preset=True,
    )
    task: str | None = option(
        None,
        one_of(*TASKS, takes="Task"),
        "ask for a task in the words of the model's authors, in place of a prompt: markdown, text, "
        "table, formula, layout (boxes with text), a caption, or objects (boxes with names); 'mtmd "
        "info' shows which the model has",
        default="the prompt",
    )
    stop: tuple[str, ...] = option(
        (),
        Kind(_stops, "str | Sequence[str]", repeated=True, metavar="TEXT"),
        "end the answer before TEXT; may be repeated",
    )
    ignore_eos: bool = option(False, FLAG, "continue after the end-of-answer token")
    sampling: str | AppliedSampling | PresetSampling = option(
        "greedy",
        Kind(_way, one_of(*WAYS).takes, values=WAYS, metavar="WHICH"),
        "which of the model's own sampling settings apply where you give none: model (all), "
        "greedy (its penalties), off (none); 'mtmd info' shows them",
        preset=True,
    )
    stop_repeating: bool = option(False, FLAG, "stop an answer that loops", preset=True)
    think: bool | str | None = option(
        None,
        Kind(_think, metavar="HOW"),
        "thinking: on, off, or an effort if the model supports it: minimal, low, medium, high, "
        "xhigh, max",
        default="the default of the model's template",
        suggested=("on", "off", "low", "medium", "high"),
        preset=True,
    )
    think_budget: int | None = option(
        None,
        whole(0, 1 << 20),
        "end the thought after N tokens and start the answer",
        default="no limit",
        preset=True,
    )
    chat_template_kwargs: Mapping[str, Any] | None = option(
        None,
        Kind(lambda _, value: checked_variables(value), metavar="JSON"),
        "variables for the chat template, as a JSON object",
    )
    json_schema: Mapping[str, Any] | str | bool | type[Any] | None = option(
        None,
        Kind(_schema, metavar="FILE"),
        "a JSON schema that the answer must follow, as a file or as JSON text; {} is any JSON",
    )
    grammar: Mapping[str, Any] | str | None = option(
        None,
        Kind(_grammar),
        'what the answer must follow, in another notation: {"regex": ...}, {"choice": [...]}, '
        '{"lark": ...} or {"gbnf": ...}, or a text in one of the last two',
        flag=None,
    )
    min_tokens: int = option(0, whole(0, TOKENS_MAX), "min tokens of the answer", flag=None)
    stop_token_ids: tuple[int, ...] = option(
        (), Kind(_ids, "Sequence[int]"), "ids of further tokens that end the answer", flag=None
    )
    logprobs: int | bool | None = option(
        None,
        Kind(_logprobs, low=0, high=20),
        "log probability of each token, and of the N most probable ones (True: 0)",
        flag=None,
    )
    prompt_logprobs: int | bool | None = option(
        None,
        Kind(_logprobs, low=0, high=20),
        "as logprobs, for the prompt; only without pictures",
        flag=None,
    )
    continue_final_message: bool = option(
        False, FLAG, "the answer continues the last message", flag=None
    )
    tools: Sequence[Mapping[str, Any] | Tool] | Toolbox | None = option(
        None,
        as_given(),
        "functions that the model may call, as OpenAI's interface describes them",
        flag=None,
    )
    tool_choice: Mapping[str, Any] | str | None = option(
        None, as_given(), "none, auto, required, or one of the tools", flag=None
    )
    parallel_tool_calls: bool | None = option(
        None, as_given(), "whether an answer may have several calls", default="True", flag=None
    )

    def __post_init__(self) -> None:
        from mtmd.tools.tool import read_toolbox

        check_options(self)
        if self.grammar is not None and self.json_schema is not None:
            raise OptionError("grammar: found with json_schema, expected one of them")
        box = read_toolbox(self.tools, self.tool_choice, self.parallel_tool_calls)
        object.__setattr__(self, "tools", box)
        if self.grammar is not None and box.callable:
            raise OptionError("grammar: found with tools, expected one of them")

    @property
    def thinking(self) -> ThinkingRequest:
        """Return what the request says of thinking, and of the chat template."""
        return ThinkingRequest(self.think, self.think_budget, self.chat_template_kwargs or {})

    @property
    def toolbox(self) -> Toolbox:
        return cast("Toolbox", self.tools)  # made so when this was


# What holds in a conversation, and for `mtmd ask`, where nothing else is said.
CONVERSATION: dict[str, Any] = {"sampling": "model", "max_tokens": WHOLE_CONTEXT}
