"""The shapes of the page's requests. Unlike the API's, they are strict: the page sends nothing that
is not known here.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from mtmd.options.answer import STOPS_MAX
from mtmd.thinking.request import Effort

Id = Annotated[str, Field(max_length=64)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class Options(_Strict):
    """Does what `AnswerOptions` does, which checks the ranges; None leaves the choice to the
    server. `think` "auto" is what the model does by itself, also where a preset says otherwise.
    `model`: of several. `since`: the first message that the model is to see. `no_sound`: it sees
    videos, and does not hear them.
    """

    model: Annotated[str, Field(max_length=512)] | None = None
    system: Annotated[str, Field(max_length=100_000)] = ""
    max_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: Annotated[list[str], Field(max_length=STOPS_MAX, fail_fast=True)] | None = None
    json_schema: Annotated[str, Field(max_length=1 << 16)] | None = None
    detail: Literal["auto", "low", "high"] | None = None
    think: Literal["auto", "on", "off"] | Effort | None = None
    think_budget: int | None = None
    adapter: Annotated[str, Field(max_length=80)] | None = None
    no_sound: bool | None = None
    since: Id | None = None

    def chosen(self) -> dict[str, Any]:
        values = self.model_dump(exclude={"model", "system", "since", "no_sound"})
        if self.adapter == "":  # none, also where a preset says otherwise
            values["adapter"] = ()
        return {name: value for name, value in values.items() if value is not None}


class Attached(_Strict):
    """A picture, or, with `start` and `end` seconds, a part of a video."""

    sha256: Id
    name: Annotated[str, Field(max_length=200)] = ""
    start: Annotated[float, Field(ge=0, le=1e6)] | None = None
    end: Annotated[float, Field(ge=0, le=1e6)] | None = None


class NewConversation(_Strict):
    title: Annotated[str, Field(max_length=200)] = ""


class Change(_Strict):
    title: Annotated[str, Field(min_length=1, max_length=200)] | None = None
    head: Id | None = None
    pinned: bool | None = None


class NewMessage(_Strict):
    """`table`: one of many pictures that are asked the same. `newest`: refuse the message where its
    parent has a reply already, which another window has added.
    """

    parent: Id | None = None
    text: Annotated[str, Field(max_length=1 << 20)] = ""
    images: Annotated[list[Attached], Field(max_length=100, fail_fast=True)] = []
    table: bool = False
    newest: bool = False


class Requested(_Strict):
    """Messages of one conversation, by id."""

    ids: Annotated[list[Id], Field(max_length=200, fail_fast=True)]


class NewAnswer(_Strict):
    """`continues`: an answer to the same message that ended early, to go on from its end. `side`:
    the place of one that is written beside others to the same message.
    """

    parent: Id
    continues: Id | None = None
    side: Annotated[int, Field(ge=0, lt=4)] | None = None
    options: Options = Options()


class Read(_Strict):
    """Describes what somebody has read of an answer that was cut off."""

    text: Annotated[str, Field(max_length=1 << 20)]


class Draft(NewMessage):
    conversation: Id | None = None
    options: Options = Options()
