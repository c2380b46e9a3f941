"""Goes from a name to a model, and the shortest way from a picture to an answer."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from os import PathLike
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Lock
from typing import TYPE_CHECKING, Any, cast

from mtmd.base.errors import ModelError, OptionError
from mtmd.chat_template.built_in_templates import template_file
from mtmd.checkpoint.adapters import with_adapters
from mtmd.checkpoint.checkpoint import Checkpoint
from mtmd.checkpoint.headers import fetch_headers
from mtmd.checkpoint.hub import DEMO_NAME, check_name, is_demo, resolve_model
from mtmd.checkpoint.ollama_defaults import with_ollama_defaults
from mtmd.checkpoint.open import open_checkpoint
from mtmd.kernels.resources.default_device import made_on_the_host
from mtmd.loaded.fitting.context import check_length
from mtmd.model import Model
from mtmd.options.by_name import given, options, split_options
from mtmd.options.keywords import AnswerKeywords, DescribeKeywords, LoadKeywords
from mtmd.options.load import LoadOptions
from mtmd.prompt.conversation import AudioArgument, Images, Message

if TYPE_CHECKING:  # not in typing before Python 3.11
    from typing_extensions import Unpack

__all__ = ["DEMO_MODEL", "DEMO_NAME", "describe", "find_checkpoint", "load"]

DEMO_MODEL = Path(__file__).parent / "demo_model"


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


def find_checkpoint(
    model: str | PathLike[str] | None,
    settings: LoadOptions,
    progress: bool = False,
    *,
    answers: bool = True,
) -> tuple[Checkpoint, str | None]:
    """Return what `load` takes as `model`, opened, with its adapters, and the name to show where it
    is not the folder's or file's. `answers`: as of `open_checkpoint`.
    """
    checkpoint, name = _opened(model, settings, progress, answers)
    return with_adapters(checkpoint, settings.lora, progress), name


def _opened(
    model: str | PathLike[str] | None, settings: LoadOptions, progress: bool, answers: bool
) -> tuple[Checkpoint, str | None]:
    projector = Path(settings.mmproj).expanduser() if settings.mmproj else None
    template = template_file(settings.chat_template) if settings.chat_template else None
    if is_demo(model):
        return open_checkpoint(DEMO_MODEL, projector, template), DEMO_NAME
    if not isinstance(model, (str, PathLike)):
        raise ModelError(
            f"model is an object of type {type(model).__name__}; expected a checkpoint folder, a "
            "GGUF file, or org/name on the Hugging Face hub"
        )
    _check_ahead(str(model), projector, settings)
    result = resolve_model(model, progress)
    is_local = Path(model).expanduser().exists()  # else the folder is named by a hash
    checkpoint = open_checkpoint(
        result.path, projector or result.projector, template, answers=answers
    )
    if result.stored:
        system, parameters = result.stored.system, result.stored.parameters
        checkpoint = with_ollama_defaults(checkpoint, system, parameters, str(model))
    return checkpoint, None if is_local else str(model)


def _check_ahead(model: str, projector: Path | None, settings: LoadOptions) -> None:
    """A context that is too long for a model which has to be fetched first, which may take hours:
    its headers are some MB. Fetching it reports what else is wrong. Raises OptionError.
    """
    if settings.context is None or check_name(model):
        return
    with suppress(ModelError):
        resolve_model(model, fetch=False)
        return  # it is here
    with TemporaryDirectory(prefix="mtmd-headers-", ignore_cleanup_errors=True) as folder:
        try:
            result = fetch_headers(model, Path(folder))
            checkpoint = open_checkpoint(result.path, projector or result.projector, answers=False)
        except ModelError:
            return
        check_length(settings.context, checkpoint, model)


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
