"""Goes from a name to an opened checkpoint, without what answers or computes."""

from __future__ import annotations

from contextlib import suppress
from os import PathLike
from pathlib import Path
from tempfile import TemporaryDirectory

from mtmd.base.errors import ModelError
from mtmd.chat_template.built_in_templates import template_file
from mtmd.checkpoint.adapters import with_adapters
from mtmd.checkpoint.checkpoint import Checkpoint
from mtmd.checkpoint.headers import fetch_headers
from mtmd.checkpoint.hub import DEMO_NAME, check_name, is_demo, resolve_model
from mtmd.checkpoint.ollama_defaults import with_ollama_defaults
from mtmd.checkpoint.open import open_checkpoint
from mtmd.options.load import LoadOptions

DEMO_MODEL = Path(__file__).parent / "demo_model"


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
        # What it imports computes how models fit in memory, which converting one does without
        from mtmd.loaded.fitting.context import check_length

        check_length(settings.context, checkpoint, model)
