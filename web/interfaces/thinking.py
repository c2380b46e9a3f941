"""Fields of requests that say whether and how much a model thinks, in every way that clients write
them, as options of an answer.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict

from mtmd.thinking.request import Effort
from mtmd.web.intake.typed_body import WHOLE, Loose
from mtmd.web.interfaces.fields import within

Budget: TypeAlias = Annotated[int, within("think_budget"), WHOLE]


class Thinking(Loose):
    """Thinking options as in Anthropic's interface. `adaptive` leaves it to the model."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Budget | None = None

    def options(self) -> dict[str, Any]:
        """The fields of AnswerOptions."""
        if self.type == "disabled":
            return {"think": False}
        on = {"think": True} if self.type == "enabled" else {}
        return on | ({} if self.budget_tokens is None else {"think_budget": self.budget_tokens})


class Reasoning(Loose):
    """Reasoning options as in OpenAI's Responses, and in OpenRouter's chat completions. `exclude`:
    the thought is not sent.
    """

    effort: Effort | None = None
    max_tokens: Budget | None = None
    enabled: bool | None = None
    exclude: bool | None = None

    def options(self) -> dict[str, Any]:
        """The fields of AnswerOptions."""
        think = self.effort if self.enabled is not False and self.effort else self.enabled
        made: dict[str, Any] = {} if think is None else {"think": think}
        return made | ({} if self.max_tokens is None else {"think_budget": self.max_tokens})


class ThinkingFields(BaseModel):
    """Fields of thinking in a chat completion: of OpenAI, vLLM, llama.cpp, OpenRouter, DeepSeek and
    Ollama.
    """

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)

    think: bool | Effort | Literal["auto"] | None = None
    think_budget: Budget | None = None
    thinking_budget: Budget | None = None
    thinking_token_budget: Budget | None = None
    enable_thinking: bool | None = None
    reasoning_effort: Effort | None = None
    reasoning: Reasoning | None = None
    thinking: Thinking | None = None
    include_reasoning: bool | None = None
    reasoning_format: Literal["auto", "none", "deepseek", "deepseek-legacy"] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def shows_thoughts(self) -> bool:
        return self.include_reasoning is not False and not (
            self.reasoning and self.reasoning.exclude
        )

    def thinking_options(self) -> dict[str, Any]:
        """The fields of AnswerOptions that were given. What turns thinking off comes before what
        says how much; "auto" is what the model does by itself, also where a preset says otherwise.
        """
        made: dict[str, Any] = {}
        for part in (self.reasoning, self.thinking):
            made |= part.options() if part else {}
        switches = [self.think, self.enable_thinking, self.reasoning_effort, made.get("think")]
        given = [value for value in switches if value is not None]
        if given:
            is_off = any(value in (False, "none") for value in given)
            efforts = [value for value in given if isinstance(value, str) and value != "auto"]
            made["think"] = False if is_off else next(iter(efforts), True in given or "auto")
        for budget in (self.thinking_token_budget, self.thinking_budget, self.think_budget):
            made |= {} if budget is None else {"think_budget": budget}
        if self.chat_template_kwargs:
            made["chat_template_kwargs"] = self.chat_template_kwargs
        return made

    def thinking_warnings(self) -> tuple[str, ...]:
        if self.reasoning_format == "none":
            return ("reasoning_format: thoughts are in reasoning_content here",)
        return ()
