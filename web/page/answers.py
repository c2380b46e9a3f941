"""Answers while they are written: each keeps its events, so that a page can go away and come back,
and is saved as it grows.

An answer belongs to the server, not to the page that asked for it: only `stop` ends it early.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import groupby
from operator import itemgetter
from typing import Any

from mtmd import Finished, Progress, TextPiece, ThinkingPiece, Ticket
from mtmd.thinking.written import Writing, parts
from mtmd.web.answering.response_streams import cancel
from mtmd.web.errors import as_api_error
from mtmd.web.page.once_loaded import Loading, NotBegun, OnceLoaded
from mtmd.web.store.conversation import COMPLETE, FAILED, STOPPED, title_from
from mtmd.web.store.errors import StoreBusyError, StoreError
from mtmd.web.store.store import Store

SAVE_SECONDS = 0.5
END_SECONDS = 5.0
BUSY_SECONDS = 60.0  # for a database that another program holds, at the end of an answer
FINISHED_SAVED = 64  # for pages that come back; later ones read the store
log = logging.getLogger("mtmd.web")


@dataclass
class Answer:
    """One answer under way. `events` grow; a reader that has seen n of them waits for the next."""

    id: str
    conversation: str
    ticket: Ticket | OnceLoaded
    row: str = ""  # the message of a table that it answers
    stored: ExitStack = field(default_factory=ExitStack)  # closed at its end
    events: list[dict[str, Any]] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    saved: int = 0  # pieces in the store
    changed: threading.Condition = field(default_factory=threading.Condition)

    @property
    def ended(self) -> bool:
        return bool(self.events) and self.events[-1]["type"] == "end"

    def add(self, event: dict[str, Any]) -> None:
        with self.changed:
            if event["type"] == "text":
                self.pieces.append(event["text"])
            self.events.append(event)
            self.changed.notify_all()

    def after(self, seen: int, wait_seconds: float) -> tuple[int, list[dict[str, Any]]]:
        """Events from number `seen` on, texts in a row as one and of progress, or of a model that
        loads, the last, with the number to go on from; [] after `wait_seconds` without news.
        """
        with self.changed:
            self.changed.wait_for(lambda: len(self.events) > seen, wait_seconds)
            news, count = self.events[seen:], len(self.events)
        merged: list[dict[str, Any]] = []
        for kind, run in groupby(news, key=itemgetter("type")):
            if kind == "text":
                texts = list(run)
                merged.append(
                    {
                        "type": kind,
                        "text": "".join(event["text"] for event in texts),
                        "tokens": sum(event["tokens"] for event in texts),
                    }
                )
            elif kind in ("progress", "loading"):
                *_, last = run
                merged.append(last)
            else:
                merged.extend(run)
        return max(seen, count), merged


class Answers:
    """Answers being written, and the last ones that were. One thread each reads the model's events;
    one saves what has grown.
    """

    def __init__(self, store: Store) -> None:
        self._store, self._lock = store, threading.Lock()
        self._answers: OrderedDict[str, Answer] = OrderedDict()
        self._saver: threading.Thread | None = None
        store.before_close.append(self.end)

    def start(
        self,
        id_: str,
        conversation: str,
        ticket: Ticket | OnceLoaded,
        stored: ExitStack,
        begun: str = "",
        *,
        row: str = "",
    ) -> Answer:
        """`id_`: the message in the store, in state running, that the answer is written to.
        `stored`: what is let go at its end. `begun`: the text that it goes on from.
        """
        answer = Answer(id_, conversation, ticket, row, stored)
        if begun:
            answer.add({"type": "text", "text": begun, "tokens": 0})
        with self._lock:
            self._answers[id_] = answer
            ended = [a.id for a in self._answers.values() if a.ended]
            for old in ended[:-FINISHED_SAVED]:
                del self._answers[old]
            if self._saver is None:
                self._saver = threading.Thread(target=self._save_all, name="answers", daemon=True)
                self._saver.start()
        writer = threading.Thread(
            target=self._write, args=(answer,), name=f"answer {id_[:8]}", daemon=True
        )
        writer.start()
        return answer

    def get(self, id_: str) -> Answer | None:
        with self._lock:
            return self._answers.get(id_)

    def running(self, conversation: str | None = None) -> list[Answer]:
        """All, or those of one conversation."""
        with self._lock:
            return [
                a
                for a in self._answers.values()
                if not a.ended and conversation in (None, a.conversation)
            ]

    def end(self) -> None:
        """Stop all that are running, and wait until they are saved."""
        running, latest = self.running(), time.monotonic() + END_SECONDS
        for answer in running:
            cancel(answer.ticket)
        for answer in running:
            with answer.changed:
                answer.changed.wait_for(
                    partial(_has_ended, answer), max(0.0, latest - time.monotonic())
                )

    def _write(self, answer: Answer) -> None:
        """Reads the ticket to its end. The end is the last event, added once it is saved, so that
        who sees it may reload.
        """
        state, receipt, error = FAILED, None, None
        try:
            with answer.stored:
                state, receipt = self._read(answer)
        except Exception as failure:
            error = as_api_error(failure, answer.id).message
        unsaved = self._finish(answer, state, receipt, error)
        answer.add(
            {"type": "end", "state": state, "receipt": receipt, "error": error, "unsaved": unsaved}
        )

    def _finish(
        self, answer: Answer, state: str, receipt: dict[str, Any] | None, error: str | None
    ) -> str | None:
        """None once it is saved, otherwise why it is not. Another program that holds the database
        is waited for: nobody can ask for this answer again.
        """
        latest = time.monotonic() + BUSY_SECONDS
        text = "".join(answer.pieces)
        while True:
            try:
                self._store.finish(answer.id, text, state, receipt, error)
                if stated := parts(text)[1]:
                    self._store.name(answer.conversation, title_from(stated, ()))
                return None
            except StoreError as failure:
                if isinstance(failure, StoreBusyError) and time.monotonic() < latest:
                    continue
                log.error("answer %s was not saved: %s", answer.id, failure)
                return str(failure)

    def _read(self, answer: Answer) -> tuple[str, dict[str, Any] | None]:
        """(state, receipt) at the end."""
        state, receipt = FAILED, None
        writing = Writing("".join(answer.pieces))
        for event in answer.ticket:
            if isinstance(event, Loading):
                answer.add({"type": "loading", **asdict(event)})
            elif isinstance(event, NotBegun):
                state = STOPPED
            elif isinstance(event, Progress):
                answer.add({"type": "progress", **asdict(event)})
            elif isinstance(event, (ThinkingPiece, TextPiece)):
                is_thought = isinstance(event, ThinkingPiece)
                text = writing.thought(event.text) if is_thought else writing.answer(event.text)
                answer.add({"type": "text", "text": text, "tokens": 1})
            elif isinstance(event, Finished):
                receipt = event.answer.receipt.asdict()
                state = STOPPED if receipt["finish"] == "cancelled" else COMPLETE
        return state, receipt

    def _save_all(self) -> None:
        """Until nothing is running: what has come since the last time goes to the store, so that a
        crash loses no more than that.
        """
        while True:
            time.sleep(SAVE_SECONDS)
            with self._lock:
                running = [a for a in self._answers.values() if not a.ended]
                if not running:
                    self._saver = None
                    return
            for answer in running:
                count = len(answer.pieces)
                if count > answer.saved:
                    try:
                        self._store.save_text(answer.id, "".join(answer.pieces[:count]))
                        answer.saved = count
                    except StoreError as error:
                        log.error("answer %s was not saved so far: %s", answer.id, error)


def follow(
    answer: Answer, seen: int, beat_seconds: float = 10.0
) -> Iterator[tuple[int, dict[str, Any] | None]]:
    """(number to go on from, event) until the end; event None is a sign of life, which also
    shows that nobody listens.

    `seen`: events the listener has; one that claims to have more, or all of them, gets the end.
    """
    seen = min(seen, len(answer.events) - 1 if answer.ended else len(answer.events))
    while True:
        seen, events = answer.after(seen, beat_seconds)
        for event in events:
            yield seen, event
        if not events:
            yield seen, None
        if events and events[-1]["type"] == "end":
            return


def _has_ended(answer: Answer) -> bool:
    return answer.ended
