"""Describes what the page does with conversations: messages added, answers started, prompts
counted, and all of it as the page shows it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import copy_context
from dataclasses import asdict, replace
from typing import Any

from mtmd import ImageError, Ticket, TokenCount
from mtmd.base.cancellation import shielded
from mtmd.display.grounding import find_regions
from mtmd.prompt.conversation import DEFAULT_PROMPT
from mtmd.thinking.written import parts
from mtmd.web.access import owner
from mtmd.web.answering.answer import Answering
from mtmd.web.answering.request import AnswerRequest
from mtmd.web.errors import ApiError
from mtmd.web.intake.picture_budget import PictureBudget
from mtmd.web.intake.slots import Slots
from mtmd.web.page.answers import Answer, Answers
from mtmd.web.page.branch_turns import branch_turns, checked_pixels, text_turn
from mtmd.web.page.once_loaded import OnceLoaded
from mtmd.web.page.pictures import PictureCache
from mtmd.web.page.requests import NewAnswer
from mtmd.web.served_model import ServedModel
from mtmd.web.settings import ServerSettings
from mtmd.web.store.conversation import COMPLETE, RUNNING, Message, StoredImage, branch, title_from
from mtmd.web.store.store import Store

SHOWN_WHOLE = 300  # messages: a conversation of so many is shown with all of them
SHOWN_AT_FIRST = 80  # of a longer one
HALF_CHARACTER = "\ufffd"  # stands for bytes of a character whose others did not come
READERS_EACH = 16  # of one answer: a few devices of one person


class Chat:
    """Describes what the routes of the page work with."""

    def __init__(
        self, answering: Answering, store: Store, settings: ServerSettings, budget: PictureBudget
    ) -> None:
        self.models, self.store, self.budget = answering.models, store, budget
        self._answering = answering
        self.answers, self.pictures = Answers(store), PictureCache(store, budget, settings)
        self.readers = Slots("readers follow answers", settings.followers, READERS_EACH)
        self._lock, self._starting = threading.Lock(), set[str]()  # conversations

    def add_picture(self, data: bytes, name: str) -> StoredImage:
        """Add a picture of the owner. Raises ImageError."""
        return self.pictures.add(data, name, owner())

    def add_pages(self, data: bytes, name: str) -> tuple[list[StoredImage], int]:
        """Add pages of a PDF, as many as one message takes, and how many there are. Raises
        ImageError.
        """
        return self.pictures.add_pages(data, name, owner(), self.budget.limits.images)

    def thumbnail(self, sha256: str) -> bytes | None:
        """A JPEG; None where the store has no such picture any more."""
        return self.pictures.thumbnail(sha256)

    def images(
        self,
        requested: Sequence[tuple[str, str]],
        parts: Sequence[tuple[float | None, float | None]] = (),
    ) -> list[StoredImage]:
        """Return the images by (SHA-256, name); `parts` of those that are videos, in seconds.
        Raises ImageError for one that is not there any more, or is another owner's.
        """
        images = []
        for number, (sha256, name) in enumerate(requested, 1):
            image = self.store.image_of(owner(), sha256, name)
            if image is None:
                raise ImageError(f"picture {number} is not here any more; attach it again")
            if image.is_video and parts:
                start, end = parts[number - 1]
                image = replace(image, start=start, end=end)
            images.append(image)
        return images

    def add_message(
        self,
        conversation: str,
        parent: str | None,
        text: str,
        images: Sequence[StoredImage],
        *,
        table: bool = False,
        newest: bool = False,
    ) -> Message:
        """A message of the user's, in the store when this returns; pictures alone are to be
        described. The first message gives the conversation its title, unless it says no more than
        that: then the answer will. `table`: one of many pictures that are asked the same, each
        answered by itself. Raises NewerTurnError where it is to be the `newest` and its parent has
        a reply.
        """
        text = text if text.strip() else DEFAULT_PROMPT
        options = {"table": True} if table else None
        message = self.store.add(
            conversation, parent, "user", text, images=images, options=options, newest=newest
        )
        if parent is None and text.strip() != DEFAULT_PROMPT:
            self.store.name(conversation, title_from(text, images))
        return message

    def start_answer(
        self, conversation: str, new: NewAnswer, keep_slot: Callable[[], Callable[[], None]]
    ) -> Message:
        """An answer to the branch that ends in `new.parent`. Of the branch the model sees what
        stands from `new.options.since` on. Raises ApiError where one is being written, and what
        `Service.submit` raises; where the model has to be loaded first, that is the end of an
        answer which can be stopped meanwhile. `keep_slot` is called once there is one; what that
        returns, and the pixels of its pictures, are let go at its end.
        """
        parent, side = new.parent, new.side
        model, system, since = new.options.model, new.options.system, new.options.since
        options, no_sound = new.options.chosen(), new.options.no_sound
        known = self._with(conversation, parent)
        row = parent if (known[parent].options or {}).get("table") else ""
        if side is not None:
            row = f"{parent} {side}"
        # Who leaves the page finds the answer when they come back.
        with shielded(), self._alone(conversation, row, side is not None), ExitStack() as resources:
            claim = self.models.claim(model)
            resources.callback(claim.give_back)
            pixels = resources.enter_context(ExitStack())
            begun = _text_to_continue(known, parent, new.continues)

            def begin(served: ServedModel) -> Ticket:
                path = _seen(branch(self._with(conversation, parent), parent), since)
                pixels.enter_context(self.budget.stored(checked_pixels(path, self.budget)))
                turns = [*branch_turns(path, system, self.pictures, bool(no_sound))]
                turns += [text_turn("assistant", begun)] if begun else []
                request = AnswerRequest(
                    model,
                    turns=tuple(turns),
                    options=options,
                    prompt_options={"continue_final_message": True} if begun else {},
                    detail=options.get("detail") or "auto",
                    usual_system=False,  # the page shows it, and sends it where it is to hold
                )
                (ticket,) = self._answering.submit(served, request, pixels)
                return ticket

            whose = copy_context()
            ticket: Ticket | OnceLoaded
            if claim.wait(0.0):
                ticket = begin(claim.chosen())
            else:
                name = self.models.find(model).name
                ticket = OnceLoaded(name, claim, lambda served: whose.run(begin, served))
            try:
                message = self.store.add(
                    conversation,
                    parent,
                    "assistant",
                    begun,
                    state=RUNNING,
                    options=options
                    | _reported(
                        system=system, since=since, model=model, side=side, no_sound=no_sound
                    ),
                )
            except BaseException:
                ticket.cancel()
                raise
            resources.callback(keep_slot())
            self.answers.start(
                message.id, conversation, ticket, resources.pop_all(), begun, row=row
            )
        return message

    @contextmanager
    def _alone(self, conversation: str, row: str, alongside: bool = False) -> Iterator[None]:
        """Raises ApiError where an answer is being written or begun. One conversation waits for the
        disk, or for its pictures, without the others; so does each `row` of a table, or each answer
        `alongside` others to one message.
        """
        location = row or conversation
        with self._lock:
            running = self.answers.running(conversation)
            taken = any(a.row == (row or a.row) or (alongside and not a.row) for a in running)
            if (
                location in self._starting
                or taken
                or (alongside and conversation in self._starting)
            ):
                raise ApiError(
                    409,
                    "an answer is being written in this conversation; wait for its end, or stop it",
                )
            self._starting.add(location)
        try:
            yield
        finally:
            with self._lock:
                self._starting.discard(location)

    def count(
        self,
        conversation: str | None,
        parent: str | None,
        text: str,
        images: Sequence[StoredImage],
        *,
        system: str,
        detail: str,
        model: str | None = None,
        since: str | None = None,
        no_sound: bool | None = None,
    ) -> TokenCount | None:
        """Return what the branch would take with this message added to it; None where the model is
        not in memory, as nothing is loaded for it.
        """
        served = self.models.at_hand(self.models.find(model).name)
        if served is None:
            return None
        path: list[Message] = []
        if conversation and parent is not None:
            path = _seen(branch(self._with(conversation, parent), parent), since)
        draft = Message(
            id="",
            conversation="",
            parent=parent,
            role="user",
            text=text if text.strip() else ".",
            state=COMPLETE,
            images=tuple(images),
            options=None,
            receipt=None,
            error=None,
            created=0.0,
        )
        path.append(draft)
        with self.budget.stored(checked_pixels(path, self.budget)):
            turns = branch_turns(path, system, self.pictures, bool(no_sound))
            messages = [turn.message(iter(())) for turn in turns]
            return served.service.count(messages, detail, tenant=owner())

    def shown_messages(
        self, conversation: str, requested: Collection[str] | None = None
    ) -> list[dict[str, Any]]:
        """Every branch, as the page shows it; or the messages that are `requested`."""
        return [self._shown(m) for m in self.store.messages(conversation, requested)]

    def shown_tree(self, conversation: str, head: str | None) -> dict[str, Any]:
        """Every branch. Of a long conversation `messages` are the end of the branch that is shown,
        and `outline` has the place of each message in the tree; the page asks for the others as it
        comes to them.
        """
        outline = self.store.outline(conversation)
        in_table = any((m.options or {}).get("table") for m in outline[:1])
        if len(outline) <= SHOWN_WHOLE or in_table:
            return {"messages": self.shown_messages(conversation)}
        by_id = {m.id: m for m in outline}
        end = {m.id for m in branch(by_id, head or outline[-1].id)[-SHOWN_AT_FIRST:]}
        end |= {m.id for m in outline if m.state == RUNNING}
        return {"messages": self.shown_messages(conversation, end), "outline": _outline(outline)}

    def keep_read(self, conversation: str, id_: str, text: str) -> dict[str, Any]:
        """Keep as much as somebody has read of an answer that was cut off when a server ended:
        nothing of it goes with that page. Raises ApiError where it was deleted meanwhile, was not
        cut off, or says something else.
        """
        answer = next(iter(self.store.messages(conversation, [id_])), None)
        if answer is None:
            raise _gone()
        cut = answer.state == RUNNING and self.answers.get(id_) is None
        if not cut or not text.startswith(answer.text):
            raise ApiError(409, "this answer was not cut off, or says something else")
        self.store.save_text(id_, text)
        return self._shown(replace(answer, text=text))

    def shown_answer(self, answer: Answer, end: dict[str, Any]) -> dict[str, Any]:
        """An answer at its end: from its last event, for the store may have had no room for it."""
        stored = self._by_id(answer.conversation).get(answer.id)
        if stored is None:
            return {}
        return self._shown(
            replace(
                stored,
                text="".join(answer.pieces),
                state=end["state"],
                receipt=end["receipt"],
                error=end["error"],
            )
        )

    def _shown(self, message: Message) -> dict[str, Any]:
        """An answer that is running in the store, and is not known to run here, was cut off when a
        server ended.
        """
        live = message.state == RUNNING and self.answers.get(message.id) is not None
        state = message.state if live or message.state != RUNNING else "interrupted"
        shown = asdict(message) | {"state": state, "regions": None}
        if message.role == "assistant" and not live:
            shown["regions"] = _regions(message)
        return shown

    def _with(self, conversation: str, message: str) -> dict[str, Message]:
        """Do what `_by_id` does. Raises ApiError where that message was deleted meanwhile."""
        known = self._by_id(conversation)
        if message not in known:
            raise _gone()
        return known

    def _by_id(self, conversation: str) -> dict[str, Message]:
        return {m.id: m for m in self.store.messages(conversation)}


def _gone() -> ApiError:
    return ApiError(
        404, "this conversation was deleted in the meantime; start another", code="no_conversation"
    )


def _reported(*, system: str, **others: Any) -> dict[str, Any]:
    """Return what is kept of how an answer was asked for, beside its sampling."""
    return {"system": system} | {name: v for name, v in others.items() if v is not None}


def _outline(messages: list[Message]) -> dict[str, Any]:
    """Return the outline by columns, which a browser reads in a fraction of the time that as many
    objects take. `up`: how far before each message its parent stands, 0 for none.
    """
    location = {m.id: n for n, m in enumerate(messages)}
    first_seen = ((n, (m.options or {}).get("since")) for n, m in enumerate(messages))
    return {
        "ids": [m.id for m in messages],
        "up": [n - location.get(m.parent or "", n) for n, m in enumerate(messages)],
        "roles": "".join(m.role[0] for m in messages),
        "images": {n: [asdict(i) for i in m.images] for n, m in enumerate(messages) if m.images},
        "since": {n: since for n, since in first_seen if since},
    }


def _seen(path: list[Message], since: str | None) -> list[Message]:
    """Return the events from `since` on; all where that is not among them: then it was of another
    branch.
    """
    start = next((n for n, message in enumerate(path) if message.id == since), 0)
    return path[start:]


def _text_to_continue(messages: dict[str, Message], parent: str, answer: str | None) -> str:
    """Return the text to continue of an answer to `parent`, empty for None; without the half of a
    character that its end may be cut in. Raises ApiError where there is no such answer, or nothing
    in it.
    """
    if answer is None:
        return ""
    result = messages.get(answer)
    if result is None or result.role != "assistant" or result.parent != parent:
        raise ApiError(404, "there is no such answer to this message", param="continues")
    text = result.text.rstrip(HALF_CHARACTER)
    if not text:
        raise ApiError(400, "this answer has no text to go on from; ask again", param="continues")
    return text


def _regions(answer: Message) -> dict[str, Any] | None:
    """Boxes and points in an answer, taken to be about the last picture that the model saw."""
    if not answer.receipt:
        return None
    images = answer.receipt.get("images") or []
    if not images:
        return None
    seen = images[-1]
    sizes = seen.get("processed_size"), seen.get("original_size")
    regions = find_regions(parts(answer.text)[1], *sizes, seen.get("box_scale", ""))
    return regions.asdict() if regions else None
