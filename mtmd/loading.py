"""Goes from a name to a model, and the shortest way from a picture to an answer."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from os import PathLike
from threading import Lock
from typing import TYPE_CHECKING, Any, cast

from mtmd.base.errors import OptionError
from mtmd.checkpoint.hub import DEMO_NAME
from mtmd.finding import DEMO_MODEL, find_checkpoint
from mtmd.kernels.resources.default_device import made_on_the_host
from mtmd.model import Model
from mtmd.options.by_name import given, options, split_options
from mtmd.options.keywords import AnswerKeywords, DescribeKeywords, LoadKeywords
from mtmd.options.load import LoadOptions
from mtmd.prompt.conversation import AudioArgument, Images, Message

if TYPE_CHECKING:  # not in typing before Python 3.11
    from typing_extensions import Unpack

__all__ = ["DEMO_MODEL", "DEMO_NAME", "describe", "load"]


def load(
    model: str | PathLike[str] | None = None,
    *,
    progress: bool = False,
    **chosen: Unpack[LoadKeywords],
) -> Model:
    """A model from a checkpoint folder, a GGUF file, or, as org/name, from the Hugging Face hub,
    org/name:Q4_K_M for a GGUF of that type; None, or "demo", is the demo model that comes with the
    package.

    `chosen` are the fields of `LoadOptions` by name, most of all device, dtype, context, parallel
    and memory_limit. Raises MtmdError: ModelError for the checkpoint, OptionError for an option.
    """
    made = load_alongside(model, progress=progress, **chosen)
    try:
        made.loaded.check_room()
    except BaseException:
        made.close()
        raise
    return made


def load_alongside(
    model: str | PathLike[str] | None = None,
    *,
    progress: bool = False,
    answers: bool = True,
    **chosen: Unpack[LoadKeywords],
) -> Model:
    """Do what `load` does, where memory that is taken now may be given back before the weights are
    read, as by other models. `answers`: as of `open_checkpoint`.
    """
    settings = options(LoadOptions, chosen)
    with made_on_the_host():
        checkpoint, name = find_checkpoint(model, settings, progress, answers=answers)
        return Model(checkpoint, settings, name=name)


_last: tuple[Any, Model] | None = None
_loading = Lock()


def _begin_anew() -> None:
    """Start anew in a child that was forked while another thread of its parent loaded a model."""
    global _loading
    _loading = Lock()


if hasattr(os, "register_at_fork"):  # Windows does not fork
    os.register_at_fork(after_in_child=_begin_anew)


def describe(
    image: Images | None = None,
    prompt: str | None = None,
    *,
    audio: AudioArgument | None = None,
    messages: Sequence[Message] | None = None,
    model: str | PathLike[str] | Model | None = None,
    system: str | None = None,
    **chosen: Unpack[DescribeKeywords],
) -> str:
    """The answer to a prompt about one or several images, videos or audio files, in one call. The
    last model used is kept for the next.

    `image`, `prompt`, `audio`, `messages`, `system` as `Model.describe` takes them; `chosen` are
    the fields of `LoadOptions` (device, context, ...) and `AnswerOptions` (max_tokens, temperature,
    stop, json_schema, detail, ...) by name, of the latter alone where `model` is a loaded one.
    Raises MtmdError.
    """
    for_loading, for_answer = split_options(chosen)
    options_given = given(cast(Mapping[str, Any], chosen))
    answer_options = cast(
        AnswerKeywords, {k: v for k, v in options_given.items() if hasattr(for_answer, k)}
    )
    load_options = cast(
        LoadKeywords, {k: v for k, v in options_given.items() if k not in answer_options}
    )
    if isinstance(model, Model):
        if load_options:
            raise OptionError(
                f"{next(iter(load_options))}: the model given is already loaded; give the option "
                "to `load`"
            )
        return model.describe(
            image, prompt, audio=audio, messages=messages, system=system, **answer_options
        )
    global _last
    key = (None if model is None else str(model), for_loading)
    with _loading:  # threads that ask at once share what the first of them loads
        if _last is None or _last[0] != key:
            _last = (key, load(model, **load_options))
        last = _last
    return last[1].describe(
        image, prompt, audio=audio, messages=messages, system=system, **answer_options
    )
