"""Requests made of conversations: all that can be done, and go wrong, on the caller's thread."""

from __future__ import annotations

import time
from collections import abc
from dataclasses import replace
from functools import cached_property, partial

from mtmd.base.errors import ContextError, OptionError
from mtmd.kernels.resources.default_device import made_on_the_host
from mtmd.llm.engine.prompt import Constraint
from mtmd.llm.sampling.json_schema import left_out
from mtmd.llm.sampling.sampler import Sampler
from mtmd.llm.tokenizer.text_stream import StopChecker
from mtmd.loaded.loaded_model import LoadedModel
from mtmd.options.answer import AnswerOptions
from mtmd.prompt.conversation import Message, RawPrompt
from mtmd.prompt.prompts import PreparedPrompt, Prompts
from mtmd.prompt.tasks import shown_tokens
from mtmd.prompt_logprobs import check_prompt_logprobs
from mtmd.service.call_plan import CallPlan, check_ids, plan_calls
from mtmd.service.prompt_scores import PromptScores
from mtmd.service.request import Request
from mtmd.service.ticket import Ticket
from mtmd.thinking.marks import Marks
from mtmd.thinking.thought import AfterThought, MarkTokens, Thought


def salted(salt: str, adapters: tuple[float, ...]) -> str:
    """The salt of what is kept of answers with these adapters."""
    return f"{salt}\0{adapters}" if adapters else salt


class RequestMaker:
    """Request maker of one service."""

    def __init__(self, loaded: LoadedModel, prompts: Prompts) -> None:
        self._loaded, self._prompts = loaded, prompts

    @made_on_the_host()
    def prepare(
        self,
        messages: abc.Sequence[Message] | RawPrompt,
        settings: AnswerOptions,
        salt: str,
        made: abc.Callable[[], CallPlan | None],
        scores: PromptScores,
        cancel: abc.Callable[[Ticket], None],
    ) -> Request:
        """Return a request. `made` plans its calls, `cancel` is what its ticket calls. Raises
        PromptError, ImageError, OptionError or DeviceMemoryError.
        """
        clock, loaded = time.perf_counter(), self._loaded
        adapters = loaded.adapter_scales(settings.adapter)
        on_pictures = loaded.adapters_of_pictures(adapters)
        box = settings.toolbox
        prompt = (
            self._prompts.prepare_raw(messages)
            if isinstance(messages, RawPrompt)
            else self._prompts.prepare(
                messages,
                settings.detail,
                salt=salted(salt, on_pictures),
                box=box,
                open_end=settings.continue_final_message,
                thinking=settings.thinking,
                reserve=settings.max_tokens,
            )
        )
        adapters = loaded.adapter_scales(
            settings.adapter,
            has_pictures=len(prompt.pictures) > len(prompt.audio),
            has_audio=bool(prompt.audio),
        )
        try:
            loaded.runner.check(prompt.pieces)
        except ContextError as error:
            described = 0 if box is None or isinstance(messages, RawPrompt) else len(box.tools)
            raise error.with_tools(described) if described and error.advice else error from None
        if settings.prompt_logprobs is not None and prompt.pictures:
            raise OptionError(
                f"prompt_logprobs: found with {len(prompt.pictures)} pictures, whose tokens have "
                "no probabilities, expected a prompt of text"
            )
        if (alternatives := settings.prompt_logprobs) is not None:
            check_prompt_logprobs(
                "prompt_logprobs", len(prompt.tokens), alternatives, scores.answers
            )
        preprocess_ms = (time.perf_counter() - clock) * 1e3
        stop = frozenset() if settings.ignore_eos else loaded.checkpoint.stop_tokens
        tokenizer = loaded.checkpoint.tokenizer
        check_ids(settings, len(tokenizer))
        plan = made()
        thought = self._thought(prompt, settings, plan)
        constraint, warnings = self._constraint(settings, plan, stop, thought)
        keep = frozenset(plan.marks if plan else ())
        if (shown := shown_tokens(loaded.checkpoint.vision)) is not None:
            keep |= {i for text, i in tokenizer.silent.items() if shown.fullmatch(text)}
        stream = tokenizer.stream(keep=keep) if thought is None else thought.stream
        return Request(
            Ticket(cancel, sum(one.stored for one in prompt.pictures)),
            prompt,
            settings,
            Sampler(settings),
            preprocess_ms,
            stream,
            StopChecker(settings.stop),
            stop | frozenset(settings.stop_token_ids),
            constraint,
            salted(salt, adapters),
            plan.parser() if plan else None,
            warnings,
            thought,
            scores,
            adapters,
            on_pictures,
        )

    def plan(self, settings: AnswerOptions) -> CallPlan | None:
        """Return the plan of the tools that an answer may call, if there are any. Raises
        OptionError.
        """
        if not settings.toolbox.callable:
            return None
        loaded, template = self._loaded, self._prompts.text.tools
        return plan_calls(
            settings, template, loaded.checkpoint.tokenizer.silent, loaded.grammars.check
        )

    def _thought(
        self, prompt: PreparedPrompt, settings: AnswerOptions, plan: CallPlan | None
    ) -> Thought | None:
        """Return what reads the thought of an answer that may have one."""
        if prompt.inside_thought is None:
            return None
        marks, tokens = self._marks
        calls = frozenset(plan.marks if plan else ())
        is_prescribed = bool(settings.json_schema or settings.grammar)
        is_prescribed |= bool(plan and plan.grammar and not marks.answer)
        tokenizer = self._loaded.checkpoint.tokenizer
        return Thought(
            marks,
            replace(tokens, special=tokens.special - calls),
            tokenizer.stream(keep=tokens.special | calls),
            tokenizer.encode,
            inside=prompt.inside_thought,
            budget=settings.think_budget,
            bound=is_prescribed,
        )

    @cached_property
    def _marks(self) -> tuple[Marks, MarkTokens]:
        """Return those of thoughts, where there are any."""
        marks, tokenizer = self._prompts.thinking_template.marks, self._loaded.checkpoint.tokenizer
        assert marks is not None
        return marks, MarkTokens.of(marks, tokenizer.encode, tokenizer.skipped)

    def _constraint(
        self,
        settings: AnswerOptions,
        plan: CallPlan | None,
        stop: frozenset[int],
        thought: Thought | None,
    ) -> tuple[Constraint | None, tuple[str, ...]]:
        """Return what an answer has to look like after its thought, None for anything, and what of
        that is not held to. Raises OptionError. The first call reads the vocabulary, which takes
        time.
        """
        schema = settings.json_schema

        def make(source: str) -> Constraint:
            new = partial(self._loaded.grammars.constraint, source, stop)
            return new() if thought is None else AfterThought(new, thought)

        warnings = left_out(schema) if isinstance(schema, str) else ()
        if plan is None:
            source = settings.grammar or schema
            assert source is None or isinstance(source, str)  # the options made it so
            return (None if source is None else make(source)), warnings
        warnings = (*warnings, *plan.warnings)
        if plan.grammar is None:
            return None, warnings
        try:
            return make(plan.grammar), warnings
        except OptionError as error:
            if settings.toolbox.choice.mode == "required" or settings.json_schema:
                raise
            return None, (*warnings, f"tool calls do not follow their schemas: {error}")
