"""LoRA adapters that a model is loaded with: found, opened, checked against its weights, merged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from mtmd.base.errors import ModelError, OptionError
from mtmd.checkpoint.checkpoint import Checkpoint, ModelAdapter
from mtmd.checkpoint.hub import resolve_adapter
from mtmd.clip.family import HasAdapter
from mtmd.kernels.checkpoint.adapter import Adapter, adapters_of, merged
from mtmd.kernels.checkpoint.adapter_file import AdapterFile, open_adapter
from mtmd.kernels.checkpoint.canonical import CanonicalWeights
from mtmd.kernels.checkpoint.magic import ADAPTER_CONFIG
from mtmd.options.adapters import AdapterOption

# Names of the adapters in the folder of a model that takes audio, or pictures and audio
AUDIO, PICTURES = "audio", "pictures"


def with_adapters(
    checkpoint: Checkpoint, requested: Sequence[str], progress: bool = False
) -> Checkpoint:
    """The checkpoint with adapters as `LoadOptions.lora` names them, and the one that a model which
    takes audio has in its folder. No values are read. Raises ModelError for what is none of this
    model, OptionError for two of one name.
    """
    checkpoint = _with_own(checkpoint)
    options = [AdapterOption.parse(text) for text in requested]
    files = [open_adapter(resolve_adapter(one.path, progress)) for one in options]
    for one, file in zip(options, files, strict=True):
        checkpoint = _with(checkpoint, one, file)
    names = [one.name for one in checkpoint.adapters]
    if twice := [name for name in names if names.count(name) > 1]:
        raise OptionError(f"lora: found two adapters named {twice[0]}, expected a name for each")
    again = tuple(
        str(replace(one, path=str(file.path.absolute())))
        for one, file in zip(options, files, strict=True)
    )
    return replace(checkpoint, opened_from=(*checkpoint.opened_from, *again))


def _with_own(checkpoint: Checkpoint) -> Checkpoint:
    """Return it with the adapters of its folder, for answers about audio and about pictures. Where
    a family has one in a folder of its own that is not there, a note says so.
    """
    for name, family in ((PICTURES, checkpoint.vision), (AUDIO, checkpoint.audio)):
        own: object = family
        if isinstance(own, HasAdapter):
            folder = checkpoint.folder / own.adapter
            if not (folder / ADAPTER_CONFIG).is_file():
                note = f"answers about {name} are those of the decoder alone: {folder} is missing"
                checkpoint = replace(checkpoint, notes=(*checkpoint.notes, note))
                continue
        elif name == AUDIO and family is not None:
            folder = checkpoint.folder
            if not (folder / ADAPTER_CONFIG).is_file():
                continue
        else:
            continue
        checkpoint = _with(checkpoint, AdapterOption(name, str(folder), 1.0), open_adapter(folder))
        *others, adapter = checkpoint.adapters
        adapter = replace(adapter, with_pictures=name == PICTURES, with_audio=name == AUDIO)
        checkpoint = replace(checkpoint, adapters=(*others, adapter))
    return checkpoint


def _with(checkpoint: Checkpoint, one: AdapterOption, file: AdapterFile) -> Checkpoint:
    kind = checkpoint.architecture
    canonical = checkpoint.text_weights.file.canonical
    if file.architecture and canonical and file.architecture != kind:
        raise ModelError(
            f"{file.where} is for the architecture {file.architecture!r:.40}, and the model is of "
            f"{kind!r:.40}; expected an adapter that was trained for it"
        )
    name = one.name or _name_of(file.path, [each.name for each in checkpoint.adapters])
    parameters = [checkpoint.text.parameters()]
    families = (checkpoint.vision, checkpoint.audio)
    parameters += [family.parameters() for family in families if family is not None]
    text, *towers = adapters_of(name, file, parameters)
    count = sum(len(part.targets) for part in (text, *towers))
    text_weights, vision_weights = checkpoint.text_weights, checkpoint.vision_weights
    audio_weights = checkpoint.audio_weights
    vision = towers[0] if checkpoint.vision else None
    if audio_weights is not None and (audio := towers[-1]).targets:
        audio_weights = _merged_audio(audio_weights, audio, one)
    if one.name is None:
        text_weights, text = merged(text_weights, text, one.scale)
        if vision is not None and vision_weights is not None:
            vision_weights, vision = merged(vision_weights, vision, one.scale)
    left = [part for part in (text, vision) if part is not None]
    for part in left:
        _check_live(part, one)
    count -= sum(len(part.targets) for part in left)
    adapter = ModelAdapter(
        name, file.path, one.scale, one.name is not None, text, vision, file.base, count
    )
    return replace(
        checkpoint,
        text_weights=text_weights,
        vision_weights=vision_weights,
        audio_weights=audio_weights,
        adapters=(*checkpoint.adapters, adapter),
    )


def _merged_audio(
    weights: CanonicalWeights, adapter: Adapter, one: AdapterOption
) -> CanonicalWeights:
    """The audio encoder with the changes in it. Raises ModelError for an adapter that answers are
    to choose, and for weights that no changes are made to.
    """
    result, left = merged(weights, adapter, one.scale)
    if one.name is not None or left.targets:
        weight = next(iter(adapter.targets))
        advice = (
            "leave its name out, and it becomes part of the weights"
            if one.name is not None
            else "which the model has quantized; load one in BF16 or F16"
        )
        raise ModelError(
            f"{adapter.where} changes {weight}, and audio encoders are changed in their weights "
            f"alone; {advice}"
        )
    return result


def _check_live(adapter: Adapter, one: AdapterOption) -> None:
    """Raises ModelError for changes that can be made to weights alone."""
    for weight, target in adapter.targets.items():
        if (reason := target.why_not_live()) is None:
            continue
        advice = (
            "leave its name out, and it becomes part of the weights"
            if one.name is not None
            else "which the model has quantized; load one in BF16 or F16"
        )
        raise ModelError(
            f"{adapter.where} changes {weight}, and {reason}: that can be done to weights alone; "
            f"{advice}"
        )


def _name_of(path: Path, taken: Sequence[str]) -> str:
    """A name for one that was given none."""
    stem = path.resolve().stem[:48] or "adapter"
    others = (stem, *(f"{stem}-{number}" for number in range(2, len(taken) + 3)))
    return next(name for name in others if name not in taken)
