"""What the page calls: conversations, messages, answers, pictures. JSON in and out; an answer's
events as server-sent events.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import Annotated, Any, Literal

from flask import Blueprint, Response, jsonify, request
from pydantic import BaseModel, ConfigDict, Field

from mtmd.prompt.media import png_bytes
from mtmd.web import sse
from mtmd.web.errors import ApiError, response
from mtmd.web.intake.body import json_body
from mtmd.web.page.answers import follow
from mtmd.web.page.desk import Desk
from mtmd.web.store.image_files import SHOWN_BY_BROWSERS
from mtmd.web.store.records import Conversation, StoredImage
from mtmd.web.store.tables import StoreError
from mtmd.web.store.transfer import export, read

FOREVER = "private, max-age=31536000, immutable"  # of what is named by its own digest
Id = Annotated[str, Field(max_length=64)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class Chosen(_Strict):
    """As `AnswerOptions`, which checks the ranges; None leaves the choice to the server."""

    system: Annotated[str, Field(max_length=100_000)] = ""
    max_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    detail: Literal["auto", "low", "high"] | None = None

    def given(self) -> dict[str, Any]:
        return {
            name: value
            for name, value in self.model_dump(exclude={"system"}).items()
            if value is not None
        }


class Attached(_Strict):
    sha256: Id
    name: Annotated[str, Field(max_length=200)] = ""


class NewConversation(_Strict):
    title: Annotated[str, Field(max_length=200)] = ""


class Change(_Strict):
    title: Annotated[str, Field(min_length=1, max_length=200)] | None = None
    head: Id | None = None


class NewMessage(_Strict):
    parent: Id | None = None
    text: Annotated[str, Field(max_length=1 << 20)] = ""
    images: Annotated[list[Attached], Field(max_length=100)] = []


class NewAnswer(_Strict):
    parent: Id
    options: Chosen = Chosen()


class Draft(NewMessage):
    conversation: Id | None = None
    options: Chosen = Chosen()


def blueprint(desk: Desk) -> Blueprint:
    routes = Blueprint("history", __name__, url_prefix="/api")
    routes.register_error_handler(
        StoreError, lambda error: response(ApiError(507, str(error), code="not_saved"))
    )
    _conversation_routes(routes, desk)
    _file_routes(routes, desk)
    _message_routes(routes, desk)
    _answer_routes(routes, desk)
    _image_routes(routes, desk)
    return routes


def _conversation_routes(routes: Blueprint, desk: Desk) -> None:
    store = desk.store

    @routes.get("/conversations")
    def listed() -> Response:
        query = request.args.get("q", "")[:1000].strip()
        if query:
            found = [
                h.conversation.asdict() | {"around": h.around}
                for h in store.search(desk.owner(), query)
            ]
        else:
            found = [c.asdict() for c in store.conversations(desk.owner())]
        running = {a.conversation for a in desk.answers.running()}
        return jsonify(conversations=[f | {"running": f["id"] in running} for f in found])

    @routes.post("/conversations")
    def created() -> Response:
        return jsonify(store.create(desk.owner(), json_body(NewConversation).title).asdict())

    @routes.get("/conversations/<id_>")
    def shown(id_: str) -> Response:
        return jsonify(
            conversation=_conversation(desk, id_).asdict(), messages=desk.page_messages(id_)
        )

    @routes.patch("/conversations/<id_>")
    def changed(id_: str) -> Response:
        _conversation(desk, id_)
        change = json_body(Change)
        if change.title is not None:
            store.rename(id_, change.title)
        if change.head is not None:
            _check_message(desk, id_, change.head)
            store.show(id_, change.head)
        return jsonify(_conversation(desk, id_).asdict())

    @routes.delete("/conversations/<id_>")
    def deleted(id_: str) -> Response:
        _conversation(desk, id_)
        for answer in desk.answers.running(id_):
            answer.ticket.cancel()
        store.delete(id_)
        return jsonify(deleted=True)


def _file_routes(routes: Blueprint, desk: Desk) -> None:
    store = desk.store

    @routes.get("/conversations/<id_>/export")
    def exported(id_: str) -> Response:
        return _download(export(store, [_conversation(desk, id_)]), "conversation")

    @routes.get("/export")
    def exported_all() -> Response:
        return _download(export(store, store.conversations(desk.owner())[::-1]), "conversations")

    @routes.post("/import")
    def imported() -> Response:
        made = read(store, desk.owner(), request.get_data(cache=False), desk.keep)
        return jsonify(conversations=[c.asdict() for c in made])


def _message_routes(routes: Blueprint, desk: Desk) -> None:
    @routes.post("/conversations/<id_>/messages")
    def said(id_: str) -> Response:
        """Answered once the message is on the disk. To edit one is to say another under the same
        parent.
        """
        _conversation(desk, id_)
        new = json_body(NewMessage)
        if not new.text.strip():
            raise ApiError(400, "the message is empty; say what you want to know", param="text")
        if new.parent is not None:
            _check_message(desk, id_, new.parent)
        message = desk.say(id_, new.parent, new.text, _images(desk, new))
        return jsonify(message=asdict(message), conversation=_conversation(desk, id_).asdict())

    @routes.post("/conversations/<id_>/answers")
    def asked(id_: str) -> Response:
        """Start an answer to a message; another one is another branch."""
        _conversation(desk, id_)
        new = json_body(NewAnswer)
        _check_message(desk, id_, new.parent, "user")
        return jsonify(asdict(desk.ask(id_, new.parent, new.options.system, new.options.given())))

    @routes.post("/count")
    def counted() -> Response:
        draft = json_body(Draft)
        if draft.conversation is not None:
            _conversation(desk, draft.conversation)
            if draft.parent is not None:
                _check_message(desk, draft.conversation, draft.parent)
        count = desk.count(
            draft.conversation,
            draft.parent,
            draft.text,
            _images(desk, draft),
            system=draft.options.system,
            detail=draft.options.detail or "auto",
        )
        return jsonify(
            prompt_tokens=count.prompt_tokens,
            image_tokens=count.image_tokens,
            context=count.context,
        )


def _answer_routes(routes: Blueprint, desk: Desk) -> None:
    @routes.get("/answers/<id_>/events")
    def followed(id_: str) -> Response:
        """From the event after Last-Event-ID on; events that come together are told as one."""
        _check_answer(desk, id_)
        answer = desk.answers.get(id_)
        if answer is None:
            raise ApiError(
                404,
                "this answer is not being written any more; load its conversation",
                code="ended",
            )
        last = request.headers.get("Last-Event-ID", "0")

        def events() -> Iterator[str]:
            for number, event in follow(
                answer, int(last) if last.isdecimal() and len(last) < 10 else 0
            ):
                if event is None:
                    yield sse.comment("still there")
                else:
                    if event["type"] == "end":
                        event = event | {"message": desk.page_message(answer, event)}
                    yield sse.event(event, number)

        return sse.response(events(), cache_control="no-store")

    @routes.post("/answers/<id_>/stop")
    def stopped(id_: str) -> Response:
        _check_answer(desk, id_)
        if answer := desk.answers.get(id_):
            answer.ticket.cancel()
        return jsonify(stopped=answer is not None)


def _image_routes(routes: Blueprint, desk: Desk) -> None:
    @routes.post("/images")
    def uploaded() -> Response:
        """The bytes of a picture file as the body; answered once it is on the disk."""
        request.max_content_length = desk.budget.limits.bytes
        return jsonify(
            asdict(desk.keep(request.get_data(cache=False), request.args.get("name", "")))
        )

    @routes.get("/images/<sha256>")
    def picture(sha256: str) -> Response:
        image, data = desk.store.image(sha256), desk.store.image_bytes(sha256)
        if image is None or data is None:
            raise ApiError(404, "there is no such picture any more")
        if image.kind in SHOWN_BY_BROWSERS:
            return _served(data, image.kind, FOREVER)
        return _served(png_bytes(desk.budget.decode(data).pixels), "image/png", FOREVER)

    @routes.get("/processed/<sha256>")
    def processed(sha256: str) -> Response:
        tiles = _tiles(desk, sha256)
        return jsonify(tiles=[{"width": t.shape[1], "height": t.shape[0]} for t in tiles])

    @routes.get("/processed/<sha256>/<int:number>")
    def tile(sha256: str, number: int) -> Response:
        tiles = _tiles(desk, sha256)
        if number >= len(tiles):
            raise ApiError(
                404, f"found {len(tiles)} tiles of this picture, not one of number {number}"
            )
        return _served(png_bytes(tiles[number]), "image/png", "private, max-age=600")


def _conversation(desk: Desk, id_: str) -> Conversation:
    found = desk.store.conversation(desk.owner(), id_)
    if found is None:
        raise ApiError(
            404, "there is no such conversation; it may have been deleted", code="no_conversation"
        )
    return found


def _check_message(desk: Desk, conversation: str, id_: str, role: str | None = None) -> None:
    found = {m.id: m.role for m in desk.store.messages(conversation)}.get(id_)
    if found is None or role not in (None, found):
        raise ApiError(
            404,
            f"there is no such {'message' if role is None else 'message of the ' + role} in this "
            "conversation",
        )


def _check_answer(desk: Desk, id_: str) -> None:
    conversation = desk.store.conversation_of(id_)
    if conversation is None:
        raise ApiError(404, "there is no such answer; its conversation may have been deleted")
    _conversation(desk, conversation)


def _images(desk: Desk, message: NewMessage) -> list[StoredImage]:
    return desk.images([(i.sha256, i.name) for i in message.images])


def _tiles(desk: Desk, sha256: str) -> Any:
    tiles = desk.service.processed(sha256)
    if tiles is None:
        raise ApiError(
            404, "what the model saw is kept for the latest pictures only; ask again to see it"
        )
    return tiles


def _served(data: bytes, kind: str, cache: str) -> Response:
    return Response(data, mimetype=kind, headers={"Cache-Control": cache})


def _download(pieces: Iterator[str], name: str) -> Response:
    day = time.strftime("%Y-%m-%d")
    return Response(
        pieces,
        mimetype="application/json",
        headers={
            "Content-Disposition": f'attachment; filename="mtmd-{name}-{day}.json"',
            "Cache-Control": "no-store",
        },
    )
