"""Answers that follow a JSON schema of somebody else's: grammars are made, and walked, in worker
processes with limits of memory and time.

A schema of some hundred bytes can have a grammar of any size, and the library's own limits count
neither all of its memory nor all of its time; states are made while an answer is written, too. So
no schema is looked into here. It is tried once in a worker, when it comes; when an answer begins, a
worker of its own makes the grammar while the prompt is read, and then says which tokens may come
next while the model computes the next logits. There are as many workers as answers at once, each of
`ANSWER_LIMITS` at most; who is slow to say what may come next waits alone, as the others' batches
go on without his sequence.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict

import numpy as np
from torch import Tensor

from mtmd.base.errors import BusyError, MtmdError, OptionError
from mtmd.base.isolation.fork_server import ForkServer, Worker, WorkerFailed
from mtmd.base.isolation.limits import Limits
from mtmd.base.isolation.worker_slots import PATIENCE_S
from mtmd.llm.sampling.constraint import allowed_bits, check_end, masked
from mtmd.llm.sampling.grammar_worker import ANSWER, GOES_ON, MAY_END, TOKEN, TRIAL, WRONG, pack
from mtmd.llm.sampling.json_schema import CheckedSchema, schema_text
from mtmd.llm.tokenizer.tokenizer import Tokenizer

AT_ONCE = 2  # schemas being tried
TRIALS = 256  # whose outcomes are kept
TRIAL_LIMITS = Limits(2.0, 256 << 20)
ANSWER_LIMITS = Limits(3.0, 256 << 20)  # the time for its grammar; each token has its own
WAITED_S = 10.0  # for all of an answer's tokens together
_ERROR_BYTES = 1 << 12


class IsolatedGrammars:
    """Does what `constraint.Grammars` does."""

    def __init__(self, tokenizer: Tokenizer):
        self._server = ForkServer(
            "mtmd.llm.sampling.grammar_worker", lambda: self._setup(tokenizer), AT_ONCE
        )
        self._tokens = 0
        self._tried: OrderedDict[str, str] = OrderedDict()
        """What is wrong with schemas, nothing where they are right."""
        self._lock = threading.Lock()

    def start(self) -> None:
        """Begin to read the vocabulary, which the first answer would wait for."""
        self._server.start()

    def checked(self, schema: object) -> CheckedSchema | None:
        """Do what `schema_text` does, tried in a worker."""
        text = schema_text(schema, self._try)
        return None if text is None else CheckedSchema(text)

    def check(self, text: str) -> None:
        """Do what `Grammars.check` does, tried in a worker."""
        self._try(text)

    def constraint(self, schema: str, stop: frozenset[int]) -> IsolatedConstraint:
        """Return the constraint of one answer. Raises OptionError where no token can end it."""
        check_end(stop)
        return IsolatedConstraint(self, schema, stop)

    def open(self) -> Worker:
        return self._server.open(ANSWER_LIMITS)

    @property
    def tokens(self) -> int:
        """Return the tokens of the vocabulary, once a worker has been opened."""
        return self._tokens

    def close(self) -> None:
        self._server.close()

    def _setup(self, tokenizer: Tokenizer) -> bytes:
        tokens = tokenizer.token_bytes()
        self._tokens = len(tokens)
        return pack(tokens)

    def _try(self, schema: str) -> None:
        with self._lock:
            wrong = self._tried.get(schema)
        if wrong is None:
            wrong = self._tried_now(schema)
            with self._lock:
                self._tried[schema] = wrong
                if len(self._tried) > TRIALS:
                    self._tried.popitem(last=False)
        if wrong:
            raise OptionError(wrong)

    def _tried_now(self, schema: str) -> str:
        try:
            with self._server.job(TRIAL_LIMITS) as worker:
                worker.send(TRIAL + schema.encode())
                return worker.receive(_ERROR_BYTES).decode(errors="replace")
        except WorkerFailed as error:
            return f"json_schema: found a schema that needs {error.needs}, expected a simpler one"


class IsolatedConstraint:
    """An `mtmd.llm.engine.engine.Constraint`: one answer under way. Used by one thread."""

    def __init__(self, grammars: IsolatedGrammars, schema: str, stop: frozenset[int]):
        self._grammars, self._schema, self._stop = grammars, schema, stop
        self._worker: Worker | None = None
        self._error: MtmdError | None = None
        self._opened = threading.Event()
        self._lock = threading.Lock()
        self._has_begun = self._is_closed = self._is_slow = False
        self._requested: float | None = None
        """When the next tokens were first asked for, and not known yet."""
        self._waited = 0.0  # seconds

    def begin(self) -> None:
        """Make the grammar, without waiting for it."""
        if not self._has_begun:
            self._has_begun = True
            try:
                threading.Thread(target=self._open, name="mtmd schema", daemon=True).start()
            except RuntimeError as error:  # no thread can be had
                self._error = BusyError(f"json_schema: {error}; try again later")
                self._opened.set()

    def ready(self, wait_s: float = 0) -> bool:
        """Return whether `mask` would wait for nothing, after `wait_s` at the latest."""
        self.begin()
        if self._opened.wait(wait_s) and (self._worker is None or self._worker.ready(wait_s)):
            return True
        if self._worker is None:  # the server of workers starts, which no schema is the cause of
            return False
        # A prompt that is read, or a step of the model, meanwhile is nobody's waiting.
        now = time.monotonic()
        self._requested = now if self._requested is None else self._requested
        waiting = now - self._requested
        if waiting > PATIENCE_S and not self._is_slow:
            self._is_slow = True
            self._worker.lower_priority()
        if self._waited + waiting > WAITED_S:
            self._fail(f"more than {WAITED_S:g} s")
            return True
        return False

    def mask(self, logits: Tensor) -> Tensor:
        """Logits [V] with -inf at every token that may not come next. A copy. Raises OptionError as
        `allowed`.
        """
        return masked(logits, self.allowed(len(logits)))

    def allowed(self, size: int) -> np.ndarray:
        """Do what `allowed_bits` does. Raises OptionError where no token may come next, and for a
        schema that cannot be followed.
        """
        while not self.ready(1.0):
            pass
        if self._requested is not None:
            self._waited += max(time.monotonic() - self._requested - PATIENCE_S, 0)
            self._requested = None
        if self._error is not None:
            raise self._error
        assert self._worker is not None
        try:
            stated = memoryview(self._worker.receive(max(self._grammars.tokens, _ERROR_BYTES)))
        except WorkerFailed as error:
            raise self._fail(error.needs) from error
        if bytes(stated[:1]) == WRONG:
            raise OptionError(bytes(stated[1:]).decode(errors="replace"))
        if bytes(stated[:1]) not in (GOES_ON, MAY_END) or len(stated) * 8 < self._grammars.tokens:
            raise self._fail("more than can be")
        may_end = bytes(stated[:1]) == MAY_END
        return allowed_bits(stated[1:], size, self._grammars.tokens, self._stop, may_end)

    def accept(self, token: int) -> None:
        """The token has been taken; what may follow is found out meanwhile. Raises OptionError."""
        assert self._worker is not None
        try:
            self._worker.send(TOKEN.pack(token))
        except WorkerFailed as error:
            raise self._fail(error.needs) from error

    def close(self) -> None:
        """The answer is over."""
        with self._lock:
            self._is_closed = True
        if self._worker is not None:
            self._worker.end()

    def _open(self) -> None:
        worker = None
        try:
            worker = self._grammars.open()
            worker.send(ANSWER + self._schema.encode())
        except MtmdError as error:
            self._error = error
        except WorkerFailed as error:
            self._fail(error.needs)
        with self._lock:
            self._worker = worker
            if self._is_closed and worker is not None:
                worker.end()
        self._opened.set()

    def _fail(self, needs: str) -> OptionError:
        error = OptionError(f"json_schema: to follow the schema takes {needs}; simplify it")
        self._error = error
        if self._worker is not None:
            self._worker.end()
        return error
