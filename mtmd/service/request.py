"""One request on its way through the service: what was asked, how far it is, what was written."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from mtmd.events import TokenInfo
from mtmd.kernels.gpu.ahead.compilations import Compilations, compilations
from mtmd.kernels.resources.compiled import KernelsCompiled, kernels_compiled
from mtmd.llm.engine.prompt import Constraint
from mtmd.llm.engine.sequence import Sequence
from mtmd.llm.sampling.sampler import Sampler
from mtmd.llm.tokenizer.repetition import RepetitionFinder
from mtmd.llm.tokenizer.text_stream import StopChecker, TextStream
from mtmd.options.answer import AnswerOptions
from mtmd.prompt.prompts import PreparedPrompt
from mtmd.service.encode_queue import Job
from mtmd.service.prompt_scores import PromptScores
from mtmd.service.ticket import Ticket
from mtmd.thinking.thought import Thought
from mtmd.tools.parser import CallParser


@dataclass(eq=False)
class Request:
    """The caller holds its `ticket`; the engine knows it as `sequence`, once its pictures are
    encoded. `jobs` are those of its pictures, by their place, that were not known.
    """

    ticket: Ticket
    prompt: PreparedPrompt
    settings: AnswerOptions
    sampler: Sampler
    preprocess_ms: float
    stream: TextStream
    checker: StopChecker
    stop: frozenset[int]
    constraint: Constraint | None
    salt: str = ""
    """Of the caches: what is kept of it is known only to requests of the same, and of the same
    adapters.
    """
    parser: CallParser | None = None
    warnings: tuple[str, ...] = ()
    thought: Thought | None = None
    """Where the answer may begin with one."""
    scores: PromptScores = field(default_factory=PromptScores)
    """The log probabilities of its prompt, where they were requested."""
    adapters: tuple[float, ...] = ()
    """The scale of each adapter that answers may choose, none of any where it is empty."""
    picture_adapters: tuple[float, ...] = ()
    """The same of those that change the encoder."""
    owner: str = ""
    """Among whom the device is shared out."""

    compiled_before: Compilations = field(default_factory=compilations)
    kernels_before: KernelsCompiled = field(default_factory=kernels_compiled)
    began: float = field(default_factory=time.perf_counter)
    """When it was ready to be taken, after `preprocess_ms`."""
    reported: float | None = None
    """When its last tokens were handed out."""
    is_bulk: bool = False
    """Whether its caller has one of `Service.bulk_slots`."""
    waits: bool = False
    """For another to read the prompt of both."""
    followers: list[Request] = field(default_factory=list)
    """Requests for the same prompt: they begin when this one has read it, and need not read it."""
    jobs: dict[int, Job] = field(default_factory=dict)
    encode_ms: float = 0.0
    tiles_reported: int = -1
    sequence: Sequence | None = None
    texts: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    undecided: tuple[TokenInfo, ...] = ()
    """Of tokens that may be of the thought, or of the answer."""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenInfo] = field(default_factory=list)
    repetition: RepetitionFinder = field(default_factory=RepetitionFinder)
    closed_loop: bool = False
    """Whether a thought that repeated itself was closed."""
