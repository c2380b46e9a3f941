"""The routes of the chat page: the page itself, which comes without a key, and what it calls for
conversations, messages, answers and pictures. JSON in and out; an answer's events as server-sent
events.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from flask import Blueprint, Response, g, jsonify, render_template, request

from mtmd.checkpoint.hub import DEMO, DEMO_NAME
from mtmd.prompt.load_image import jpeg_bytes, png_bytes
from mtmd.prompt.video_input import can_read_videos
from mtmd.web import sse
from mtmd.web.access import owner, without_key
from mtmd.web.errors import ApiError, response
from mtmd.web.intake.request_limits import Body, Work, checked_json, keep_slot, takes, whole_body
from mtmd.web.intake.typed_body import json_body
from mtmd.web.native_threads import in_thread
from mtmd.web.page.answers import follow
from mtmd.web.page.chat import Chat
from mtmd.web.page.requests import (
    Change,
    Draft,
    NewAnswer,
    NewConversation,
    NewMessage,
    Read,
    Requested,
)
from mtmd.web.page.samples import offered
from mtmd.web.store.conversation import Conversation, StoredImage
from mtmd.web.store.errors import (
    NewerTurnError,
    StoreBusyError,
    StoreDamagedError,
    StoreError,
    StoreReadOnlyError,
)
from mtmd.web.store.image_files import SHOWN_BY_BROWSERS
from mtmd.web.store.import_export import export_file, import_file, read_file

LAST_ANSWERS = 20  # whose stages the diagnostics show
FOREVER = "private, max-age=31536000, immutable"  # of what is named by its own digest


def blueprint(chat: Chat) -> Blueprint:
    routes = Blueprint("page", __name__)
    routes.register_error_handler(StoreError, lambda error: response(_not_stored(error)))
    _page_routes(routes, chat)
    _conversation_routes(routes, chat)
    _import_export_routes(routes, chat)
    _message_routes(routes, chat)
    _reading_routes(routes, chat)
    _answer_routes(routes, chat)
    _image_routes(routes, chat)
    return routes


def _not_stored(error: StoreError) -> ApiError:
    """409 for a message that another window was faster with, 503 for what passes by itself or with
    a start of the server, 507 for what needs room, or another folder.
    """
    if isinstance(error, NewerTurnError):
        return ApiError(409, str(error), code="newer_turn")
    if isinstance(error, StoreBusyError):
        return ApiError(503, str(error), code="history_busy", headers={"Retry-After": "1"})
    if isinstance(error, StoreDamagedError):
        return ApiError(503, str(error), code="history_damaged")
    code = "history_read_only" if isinstance(error, StoreReadOnlyError) else "not_saved"
    return ApiError(507, str(error), code=code)


def _page_routes(routes: Blueprint, chat: Chat) -> None:
    @routes.get("/")
    @routes.get("/c/<id_>")
    @takes(Body.NOTHING)
    @without_key
    def chat_page(id_: str = "") -> str:  # noqa: ARG001  # the page reads it from its address
        return render_template("chat.html")

    @routes.get("/favicon.ico")
    @takes(Body.NOTHING)
    @without_key
    def icon() -> Response:
        return Response(status=308, headers={"Location": "static/icon.svg"})

    @routes.get("/api/about")
    @takes(Body.NOTHING)
    def about() -> dict[str, Any]:
        """`context` and `sampling`, how the model's files recommend to choose tokens, and whether
        it can think are None for a model of several that was not opened yet.
        """
        models = chat.models
        model = models.find(request.args.get("model"))
        fault, notice = models.fault, chat.store.notice
        demo = model.name in (DEMO_NAME, DEMO)
        sees = model.sees is not False
        facts, there = model.checkpoint, models.at_hand(model.name)
        return {
            "model": model.name,
            "many": models.many,
            "preset": dict(model.preset),
            "demo": demo,
            "samples": offered(demo, can_read_videos()) if sees else [],
            "fault": str(fault) if fault else None,
            "key": caller.name if (caller := g.get("caller")) else None,
            "context": model.context,
            "vision": sees,
            "thinks": there.service.thinks if there else None,
            "adapters": [one.name for one in model.adapters],
            "tasks": {} if facts is None else dict(facts.tasks),
            "kept": chat.store.keeps,
            "shared": chat.store.shared,
            "notice": notice.asdict() if notice else None,
            "sampling": None if facts is None else asdict(facts.sampling),
            "images": chat.budget.limits.images,
            "places": max(1, models.slots),
            "image_bytes": chat.budget.limits.bytes,
            "video": model.sees and can_read_videos(),
            "audio": model.hears,
            "video_sound": facts is not None and facts.video_sound,
        }


def _last_answers(chat: Chat) -> list[dict[str, Any]]:
    """Return what the diagnostics draw of each: its stages, in milliseconds, and its tokens."""
    fields = (
        "queued_ms",
        "preprocess_ms",
        "encode_ms",
        "prefill_ms",
        "decode_ms",
        "prompt_tokens",
        "output_tokens",
    )
    return [
        {"conversation": conversation, "created": created}
        | {name: receipt.get(name, 0) for name in fields}
        for conversation, created, receipt in chat.store.last_receipts(owner(), LAST_ANSWERS)
    ]


def _conversation_routes(routes: Blueprint, chat: Chat) -> None:
    store = chat.store

    @routes.get("/api/last")
    @takes(Body.NOTHING)
    def last_answers() -> Response:
        return jsonify(answers=_last_answers(chat))

    @routes.get("/api/conversations")
    @takes(Body.NOTHING, Work.DOWNLOAD)
    def list_conversations() -> Response:
        query = request.args.get("q", "")[:1000].strip()
        if query:
            rows = [
                hit.conversation.asdict() | {"around": hit.around, "message": hit.message}
                for hit in store.search(owner(), query)
            ]
        else:
            rows = [c.asdict() for c in store.conversations(owner())]
        running = {a.conversation for a in chat.answers.running()}
        pictures = store.first_pictures(owner())
        return jsonify(
            conversations=[
                r | {"running": r["id"] in running, "picture": pictures.get(r["id"])} for r in rows
            ]
        )

    @routes.post("/api/conversations")
    @takes(Body.SMALL_JSON)
    def create_conversation() -> Response:
        return jsonify(store.create(owner(), json_body(NewConversation).title).asdict())

    @routes.get("/api/conversations/<id_>")
    @takes(Body.NOTHING, Work.DOWNLOAD)
    def show_conversation(id_: str) -> Response:
        result = _conversation(chat, id_)
        return jsonify(conversation=result.asdict(), **chat.shown_tree(id_, result.head))

    @routes.patch("/api/conversations/<id_>")
    @takes(Body.SMALL_JSON)
    def change_conversation(id_: str) -> Response:
        _conversation(chat, id_)
        change = json_body(Change)
        if change.title is not None:
            store.rename(id_, change.title)
        if change.head is not None:
            _check_message(chat, id_, change.head)
            store.show(id_, change.head)
        if change.pinned is not None:
            store.pin(id_, change.pinned)
        return jsonify(_conversation(chat, id_).asdict())

    @routes.delete("/api/conversations/<id_>")
    @takes(Body.NOTHING)
    def delete_conversation(id_: str) -> Response:
        _conversation(chat, id_)
        for answer in chat.answers.running(id_):
            answer.ticket.cancel()
        store.delete(id_)
        return jsonify(deleted=True)


def _import_export_routes(routes: Blueprint, chat: Chat) -> None:
    store = chat.store

    @routes.get("/api/conversations/<id_>/export")
    @takes(Body.NOTHING, Work.DOWNLOAD)
    def export_conversation(id_: str) -> Response:
        return _download(export_file(store, [_conversation(chat, id_)]), "conversation")

    @routes.get("/api/export")
    @takes(Body.NOTHING, Work.DOWNLOAD)
    def export_all() -> Response:
        return _download(export_file(store, store.conversations(owner())[::-1]), "conversations")

    @routes.post("/api/import")
    @takes(Body.HISTORY, Work.ANSWER)
    def import_conversations() -> Response:
        body = checked_json()
        file = in_thread(body.read, lambda data: read_file(data, body.take_base64))
        made = import_file(store, owner(), file, chat.add_picture)
        return jsonify(conversations=[c.asdict() for c in made])


def _message_routes(routes: Blueprint, chat: Chat) -> None:
    @routes.post("/api/conversations/<id_>/messages")
    @takes(Body.SMALL_JSON)
    def add_message(id_: str) -> Response:
        """Answered once the message is on the disk. To edit one is to add another under the
        same parent.
        """
        _conversation(chat, id_)
        new = json_body(NewMessage)
        if not new.text.strip() and not new.images:
            raise ApiError(400, "the message is empty; say what you want to know", param="text")
        if new.parent is not None:
            _check_message(chat, id_, new.parent)
        message = chat.add_message(
            id_, new.parent, new.text, _images(chat, new), table=new.table, newest=new.newest
        )
        return jsonify(message=asdict(message), conversation=_conversation(chat, id_).asdict())

    @routes.post("/api/conversations/<id_>/answers")
    @takes(Body.SMALL_JSON, Work.ANSWER)
    def start_answer(id_: str) -> Response:
        """Start an answer to a message; another one is another branch, also one that continues
        one that ended early.
        """
        _conversation(chat, id_)
        new = json_body(NewAnswer)
        _check_message(chat, id_, new.parent, "user")
        return jsonify(asdict(chat.start_answer(id_, new, keep_slot)))

    @routes.post("/api/count")
    @takes(Body.SMALL_JSON, Work.ANSWER)
    def count_tokens() -> Response:
        draft = json_body(Draft)
        if draft.conversation is not None:
            _conversation(chat, draft.conversation)
            if draft.parent is not None:
                _check_message(chat, draft.conversation, draft.parent)
        count = chat.count(
            draft.conversation,
            draft.parent,
            draft.text,
            _images(chat, draft),
            system=draft.options.system,
            detail=draft.options.detail or "auto",
            model=draft.options.model,
            since=draft.options.since,
            no_sound=draft.options.no_sound,
        )
        if count is None:
            return jsonify(in_memory=False)
        return jsonify(
            in_memory=True,
            prompt_tokens=count.prompt_tokens,
            image_tokens=count.image_tokens,
            video_tokens=count.video_tokens,
            audio_tokens=count.audio_tokens,
            context=count.context,
        )


def _reading_routes(routes: Blueprint, chat: Chat) -> None:
    @routes.post("/api/conversations/<id_>/messages/read")
    @takes(Body.SMALL_JSON, Work.DOWNLOAD)
    def read_messages(id_: str) -> Response:
        """Return those of a long conversation that it was shown without."""
        _conversation(chat, id_)
        return jsonify(messages=chat.shown_messages(id_, json_body(Requested).ids))


def _answer_routes(routes: Blueprint, chat: Chat) -> None:
    @routes.get("/api/answers/<id_>/events")
    @takes(Body.NOTHING, Work.FOLLOW)
    def answer_events(id_: str) -> Response:
        """Return the events from the one after Last-Event-ID on; texts that come together are one
        event.
        """
        _check_answer(chat, id_)
        answer = chat.answers.get(id_)
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
                        event = event | {"message": chat.shown_answer(answer, event)}
                    yield sse.event(event, number)

        give_back = chat.readers.take(id_)
        response = sse.response(events(), cache_control="no-store")
        response.call_on_close(give_back)
        return response

    @routes.post("/api/answers/<id_>/read")
    @takes(Body.SMALL_JSON)
    def keep_read(id_: str) -> Response:
        """Return what a page was told of an answer before the server ended, which saves twice a
        second.
        """
        conversation = _check_answer(chat, id_)
        return jsonify(chat.keep_read(conversation, id_, json_body(Read).text))

    @routes.post("/api/answers/<id_>/stop")
    @takes(Body.NOTHING)
    def stop_answer(id_: str) -> Response:
        _check_answer(chat, id_)
        if answer := chat.answers.get(id_):
            answer.ticket.cancel()
        return jsonify(stopped=answer is not None)


def _image_routes(routes: Blueprint, chat: Chat) -> None:
    @routes.post("/api/images")
    @takes(Body.PICTURE, Work.ANSWER)
    def upload_image() -> Response:
        """The bytes of a picture or video file as the body; answered once it is on the disk."""
        return jsonify(asdict(chat.add_picture(whole_body(), request.args.get("name", ""))))

    @routes.post("/api/pages")
    @takes(Body.PICTURE, Work.ANSWER)
    def upload_pages() -> Response:
        """The bytes of a PDF as the body; its pages as pictures."""
        pages, count = chat.add_pages(whole_body(), request.args.get("name", ""))
        return jsonify(images=[asdict(page) for page in pages], pages=count)

    @routes.get("/api/images/<sha256>")
    @takes(Body.NOTHING, Work.DOWNLOAD)
    def image(sha256: str) -> Response:
        stored = chat.store.image_of(owner(), sha256)
        data = chat.store.image_bytes(sha256) if stored else None
        if stored is None or data is None:
            raise ApiError(404, "this picture no longer exists")
        if not stored.is_still:  # browsers ask for parts of it
            whole = _served(data, stored.kind, FOREVER)
            whole.make_conditional(request, accept_ranges=True, complete_length=len(data))
            return whole
        if stored.kind in SHOWN_BY_BROWSERS:
            return _served(data, stored.kind, FOREVER)
        pixels = chat.budget.decode_counted(data).pixels
        if stored.kind == "image/heif":  # a photo: as PNG it would be many times as large
            return _served(in_thread(jpeg_bytes, pixels), "image/jpeg", FOREVER)
        return _served(in_thread(png_bytes, pixels), "image/png", FOREVER)

    @routes.get("/api/images/<sha256>/small")
    @takes(Body.NOTHING, Work.DOWNLOAD)
    def small_image(sha256: str) -> Response:
        """Return a small image for lists: `THUMBNAIL_SIDE` at most."""
        if chat.store.image_of(owner(), sha256) is None:
            raise ApiError(404, "this picture no longer exists")
        data = chat.thumbnail(sha256)
        if data is None:
            raise ApiError(404, "this picture no longer exists")
        return _served(data, "image/jpeg", FOREVER)

    @routes.get("/api/processed/<sha256>")
    @takes(Body.NOTHING)
    def processed(sha256: str) -> Response:
        tiles = _tiles(chat, sha256)
        return jsonify(tiles=[{"width": t.shape[1], "height": t.shape[0]} for t in tiles])

    @routes.get("/api/processed/<sha256>/<int:number>")
    @takes(Body.NOTHING, Work.DOWNLOAD)
    def tile(sha256: str, number: int) -> Response:
        tiles = _tiles(chat, sha256)
        if number >= len(tiles):
            raise ApiError(
                404, f"found {len(tiles)} tiles of this picture, not one of number {number}"
            )
        data = in_thread(png_bytes, tiles[number])
        return _served(data, "image/png", "private, max-age=600")


def _conversation(chat: Chat, id_: str) -> Conversation:
    conversation = chat.store.conversation(owner(), id_)
    if conversation is None:
        raise ApiError(
            404, "there is no such conversation; it may have been deleted", code="no_conversation"
        )
    return conversation


def _check_message(chat: Chat, conversation: str, id_: str, role: str | None = None) -> None:
    actual = chat.store.role_of(conversation, id_)
    if actual is None or role not in (None, actual):
        raise ApiError(
            404,
            f"there is no such {'message' if role is None else 'message of the ' + role} in this "
            "conversation",
        )


def _check_answer(chat: Chat, id_: str) -> str:
    """Check the answer and return its conversation."""
    conversation = chat.store.conversation_of(id_)
    if conversation is None:
        raise ApiError(404, "there is no such answer; its conversation may have been deleted")
    return _conversation(chat, conversation).id


def _images(chat: Chat, message: NewMessage) -> list[StoredImage]:
    return chat.images(
        [(i.sha256, i.name) for i in message.images], [(i.start, i.end) for i in message.images]
    )


def _tiles(chat: Chat, sha256: str) -> Any:
    tiles = chat.models.processed(sha256, owner())
    if tiles is None:
        raise ApiError(
            404, "what the model saw is kept for the latest pictures only; ask again to see it"
        )
    return tiles


def _served(data: bytes, kind: str, cache: str) -> Response:
    return Response(data, mimetype=kind, headers={"Cache-Control": cache, "Vary": "Authorization"})


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
