"""Between the stored conversations and the service: branches as prompts, answers started, counted,
and told to the page.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from mtmd import ImageError, Picture, PromptError, Service, TokenCount
from mtmd.web.auth import ANYBODY, owner
from mtmd.web.errors import ApiError
from mtmd.web.intake.budget import PictureBudget
from mtmd.web.page.answers import Answer, Answers
from mtmd.web.page.grounding import find_regions
from mtmd.web.page.markdown import render
from mtmd.web.settings import ServerSettings
from mtmd.web.store.records import COMPLETE, RUNNING, Message, StoredImage, branch
from mtmd.web.store.store import Store

# of decoded pictures, three bytes each, so that a long conversation does not decode them for every
# turn
HELD_PIXELS = 32_000_000
TITLE_LENGTH = 60


class Desk:
    """What the routes of the page share."""

    def __init__(
        self, service: Service, store: Store, settings: ServerSettings, budget: PictureBudget
    ) -> None:
        self.service, self.store, self.budget = service, store, budget
        self.answers, self._shared = Answers(store), len(settings.api_keys) < 2
        self._pictures, self._asking = _Pictures(store, budget), threading.Lock()

    def owner(self) -> str:
        """Whose conversations this request may see. With one key there is one person, who may
        change it and keep the history.
        """
        return ANYBODY if self._shared else owner()

    def keep(self, data: bytes, name: str) -> StoredImage:
        """The file of a picture into the store, once it is seen to decode. Raises ImageError."""
        picture = self.budget.decode(data)
        image = self.store.put_image(data, *picture.size, name[:200])
        self._pictures.hold(image.sha256, picture)
        return image

    def images(self, wanted: Sequence[tuple[str, str]]) -> list[StoredImage]:
        """By (SHA-256, name). Raises ImageError for one that is not there any more."""
        found = [self.store.image(sha256, name) for sha256, name in wanted]
        if None in found:
            raise ImageError(
                f"picture {found.index(None) + 1} is not here any more; attach it again"
            )
        return [f for f in found if f]

    def say(
        self, conversation: str, parent: str | None, text: str, images: Sequence[StoredImage]
    ) -> Message:
        """A message of the user's, in the store when this returns; the first one gives the
        conversation its title.
        """
        message = self.store.add(conversation, parent, "user", text, images=images)
        if parent is None:
            first = " ".join(text.split())[:TITLE_LENGTH] or (images[0].name if images else "")
            self.store.name(conversation, first or "Picture")
        return message

    def ask(self, conversation: str, parent: str, system: str, chosen: dict[str, Any]) -> Message:
        """Start an answer to the branch that ends in `parent`. Raises ApiError where one is being
        written, and what `submit` raises.
        """
        with self._asking:
            if self.answers.running(conversation):
                raise ApiError(
                    409,
                    "an answer is being written in this conversation; wait for its end, or stop it",
                )
            path = branch(self._by_id(conversation), parent)
            ticket = self.service.submit(self._prompt(path, system), **chosen)
            try:
                message = self.store.add(
                    conversation,
                    parent,
                    "assistant",
                    "",
                    state=RUNNING,
                    options={**chosen, "system": system},
                )
            except BaseException:
                ticket.cancel()
                raise
            self.answers.start(message.id, conversation, ticket)
        return message

    def count(
        self,
        conversation: str | None,
        parent: str | None,
        text: str,
        images: Sequence[StoredImage],
        *,
        system: str,
        detail: str,
    ) -> TokenCount:
        """What the branch would take with this message added to it."""
        path = branch(self._by_id(conversation), parent) if conversation else []
        draft = Message(
            "",
            "",
            parent,
            "user",
            text if text.strip() else ".",
            COMPLETE,
            tuple(images),
            None,
            None,
            None,
            0.0,
        )
        return self.service.count(self._prompt([*path, draft], system), detail)

    def page_messages(self, conversation: str) -> list[dict[str, Any]]:
        """Every branch, as the page shows it."""
        messages = self._by_id(conversation)
        return [self._shown(m) for m in messages.values()]

    def page_message(self, answer: Answer, end: dict[str, Any]) -> dict[str, Any]:
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
        """An answer that says it is running, and is not known to run here, was cut off when a
        server ended.
        """
        live = message.state == RUNNING and self.answers.get(message.id) is not None
        state = message.state if live or message.state != RUNNING else "interrupted"
        shown = asdict(message) | {"state": state, "html": None, "regions": None}
        if message.role == "assistant" and not live:
            shown["html"] = render(message.text)
            seen = (message.receipt or {}).get("images") or [{}]
            found = (
                find_regions(
                    message.text, seen[-1].get("processed_size"), seen[-1].get("original_size")
                )
                if message.receipt
                else None
            )
            shown["regions"] = found and found.asdict()
        return shown

    def _by_id(self, conversation: str) -> dict[str, Message]:
        return {m.id: m for m in self.store.messages(conversation)}

    def _prompt(self, path: Sequence[Message], system: str) -> list[dict[str, Any]]:
        """A branch as the model takes it: turns alternate, so what was said twice in a row, for
        want of an answer, is one turn.

        Raises PromptError where its pictures are more than one request may bring.
        """
        self._check([i for m in path for i in m.images])
        turns: list[tuple[str, list[dict[str, Any]]]] = []
        for m in path:
            parts: list[dict[str, Any]] = [
                {"type": "image", "image": self._pictures.get(i)} for i in m.images
            ]
            if m.text:
                parts.append({"type": "text", "text": m.text})
            if turns and turns[-1][0] == m.role:
                turns[-1][1].extend(parts)
            elif parts:
                turns.append((m.role, parts))
        first = [{"role": "system", "content": system}] if system.strip() else []
        return [*first, *({"role": role, "content": _plain(parts)} for role, parts in turns)]

    def _check(self, images: Sequence[StoredImage]) -> None:
        excess = self.budget.excess(
            pictures=len(images),
            bytes_=sum(i.bytes for i in images),
            pixels=sum(i.width * i.height for i in images),
        )
        if excess:
            raise PromptError(
                f"found {excess.count:,} {excess.what} in this conversation, expected at most "
                f"{excess.most:,}; start a new one, or edit an earlier message to leave some out"
            )


def _plain(parts: list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """A turn of text alone as a text: some templates take the assistant's no other way."""
    texts = [str(p["text"]) for p in parts if "text" in p]
    return "\n\n".join(texts) if len(texts) == len(parts) else parts


class _Pictures:
    """Decoded pictures, those used last, as far as there is room. Thread-safe."""

    def __init__(self, store: Store, budget: PictureBudget) -> None:
        self._store, self._budget, self._lock = store, budget, threading.Lock()
        self._held: OrderedDict[str, Picture] = OrderedDict()

    def get(self, image: StoredImage) -> Picture:
        with self._lock:
            if image.sha256 in self._held:
                self._held.move_to_end(image.sha256)
                return self._held[image.sha256]
        data = self._store.image_bytes(image.sha256)
        if data is None:
            raise ImageError(
                f"picture {image.name or image.sha256[:12]!r} is not here any more; edit the "
                "message and attach it again"
            )
        picture = self._budget.decode(data)
        self.hold(image.sha256, picture)
        return picture

    def hold(self, sha256: str, picture: Picture) -> None:
        with self._lock:
            self._held[sha256] = picture
            self._held.move_to_end(sha256)
            while (
                len(self._held) > 1
                and sum(p.size[0] * p.size[1] for p in self._held.values()) > HELD_PIXELS
            ):
                self._held.popitem(last=False)
