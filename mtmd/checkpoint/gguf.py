"""A GGUF file and its projector (mmproj), opened."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from mtmd.base.errors import ModelError
from mtmd.chat_template.built_in_templates import built_in_file, fitting, how_to_give_one
from mtmd.chat_template.template import ChatTemplate
from mtmd.checkpoint import relevance
from mtmd.checkpoint.checkpoint import (
    Checkpoint,
    added_tokens,
    check_vocabulary,
    end_of_turn,
    placeholders,
    unread_audio,
)
from mtmd.checkpoint.ollama_layout import (
    NOTE,
    WITHOUT_TEMPLATE,
    View,
    decoder_of,
    is_one_file,
    tower_of,
)
from mtmd.checkpoint.sampling import of_gguf
from mtmd.clip.audio_family import AudioFamily, gguf_audio_family
from mtmd.clip.family import VisionFamily, gguf_vision_family, own_template
from mtmd.kernels.checkpoint.canonical import CanonicalWeights, check_no_extra
from mtmd.kernels.checkpoint.open_weights import GgufFile
from mtmd.kernels.checkpoint.rotary import FACTORS, with_factors
from mtmd.kernels.graph import Shape
from mtmd.llm.family import gguf_text_family, usual_pre_tokenizer
from mtmd.llm.tokenizer.gguf_tokenizer import PRE, TEMPLATE
from mtmd.llm.tokenizer.tokenizer import Tokenizer

PROJECTOR = "clip"  # general.architecture of projector files
PICTURES = "v."  # how tensors of an image encoder begin
TOWER = (PICTURES, "mm.", "a.", "resampler.")  # and of projectors, and of what hears
AUDIO = ("a.", "mm.a.")  # those of audio encoders
AROUND = {"v.boi", "v.eoi"}  # vectors around media, audio as well
FACTORS_MAX = 4096
UNREAD = (r"a\..*", r"mm\.a\..*")  # where the family of these is not read


def open_gguf(
    path: Path, projector: Path | None = None, template: Path | None = None, *, answers: bool = True
) -> Checkpoint:
    """The decoder in `path`, with the projector given, or with its own, or with the one that
    lies beside it. `answers`: a model is expected that writes them.

    Raises ModelError saying which file is wrong and how, DualEncoderError for one that gives scores
    where one is expected that writes.
    """
    whole, where = GgufFile(path), path.name
    architecture = _architecture(whole, where)
    file: GgufFile | View = whole
    own: GgufFile | View | None = None
    notes: tuple[str, ...] = ()
    if is_one_file(whole, architecture):
        own, notes = tower_of(whole, architecture), (NOTE,)
        architecture, file = decoder_of(whole, architecture)
    elif any(name.startswith(PICTURES) for name in whole.names()):
        own = whole
    if architecture == PROJECTOR:
        raise ModelError(
            f"{where} is a projector, which has no decoder; give the decoder's GGUF as "
            "the model and this file as mmproj= (--mmproj)"
        )
    if answers and relevance.gguf_scores_relevance(file.metadata, architecture):
        relevance.refuse_to_write(where)
    towers = frozenset(n for n in file.names() if own and n.startswith(TOWER))
    missing = ""
    if projector is None and own is None:
        projector, missing = _alongside(path, architecture)
    tower = None
    written = str(file.metadata.get(TEMPLATE, ""))
    if projector:  # one that is given is used in place of the file's own
        tower = _open_projector(projector, written)
    elif own is not None:
        tower = _Tower(own, where, written)
    factors = {name: _factors(file, name, where) for name in FACTORS if name in file.names()}
    metadata = dict(file.metadata)  # arrays, which are parsed at each look-up, once
    text = gguf_text_family(
        architecture,
        with_factors(architecture, metadata, factors),
        frozenset(file.names()) - towers,
        where,
        tower.kind if tower else None,
        tower.stacked if tower else 0,
    )
    text_weights = CanonicalWeights(file, text.parameters(), where)
    head = relevance.head_of_gguf(file, metadata, architecture, text, where)
    used = {*text_weights.sources, *towers, *factors, *(head.sources if head else ())}
    check_no_extra(file, used, text.unused, where)
    vision, vision_weights = (tower.vision, tower.weights) if tower else (None, None)
    audio, audio_weights = (tower.audio, tower.audio_weights) if tower else (None, None)
    notes = (*notes, *(tower.notes if tower else ()))
    pre = usual_pre_tokenizer(architecture)
    tokenizer = Tokenizer.from_gguf(
        {**({PRE: pre} if pre else {}), **metadata},
        where,
        reserved=placeholders(vision, audio),
        added=added_tokens(vision),
    )
    check_vocabulary(tokenizer, text, where)
    if audio is not None:
        tokenizer.id(audio.token)
    if template is None and notes and TEMPLATE not in file.metadata:
        named = fitting(tokenizer.knows)
        template = built_in_file(named) if named else None
        notes = (*notes, *([WITHOUT_TEMPLATE.format(named)] if named else []))
    chat = (
        ChatTemplate.from_file(template, tokenizer.special_text)
        if template
        else _template(file, tokenizer, where)
    )
    if chat.missing and (source := own_template(vision, tokenizer.knows)) is not None:
        chat = ChatTemplate(source, tokenizer.special_text, f"{where}: the template of its family")
    return Checkpoint(
        path,
        vision,
        text,
        vision_weights,
        text_weights,
        whole.bytes + (tower.file.bytes if tower and tower.file is not own else 0),
        tokenizer,
        chat,
        tokenizer.ends | end_of_turn(template, tokenizer),
        missing,
        architecture=architecture,
        file_type=_file_type(file),
        sampling=of_gguf(metadata, where),
        notes=(*notes, *tokenizer.notes),
        audio=audio,
        audio_weights=audio_weights,
        relevance=head,
    )


def _file_type(file: GgufFile | View) -> int:
    result = file.metadata.get("general.file_type")
    return result if isinstance(result, int) else -1


def _architecture(file: GgufFile, where: str) -> str:
    value = file.metadata.get("general.architecture")
    if not isinstance(value, str):
        raise ModelError(
            f"{where}: general.architecture is {value!r:.60}, expected the name of an "
            "architecture; convert the file again"
        )
    return value


def _alongside(path: Path, architecture: str) -> tuple[Path | None, str]:
    """The projector in a GGUF's folder that is called as it is, or the only one; None and what to
    do about it where there is neither.
    """
    result = sorted(
        p for p in path.parent.glob("*.gguf") if "mmproj" in p.name.lower() and p != path
    )
    named = [p for p in result if p.name.lower() == f"mmproj-{path.name}".lower()]
    if len(result) == 1 or named:
        return (named or result)[0], ""
    if result:
        return (
            None,
            "there are several projectors in its folder "
            f"({', '.join(p.name for p in result[:4])}); "
            "choose one with mmproj= (--mmproj)",
        )
    return (
        None,
        f"it reads text only ({architecture!r:.40}). If it is the text half of a vision model, "
        "fetch the mmproj-*.gguf of the same model into its folder, or give it with mmproj= "
        "(--mmproj)",
    )


def _factors(file: GgufFile | View, name: str, where: str) -> Tensor:
    """Return LongRoPE's factors. Raises ModelError for more than any head has pairs."""
    shape, _ = file.meta(name)
    if len(shape) != 1 or shape[0] > FACTORS_MAX:
        raise ModelError(
            f"{where}: {name} has shape {list(shape)}, expected a factor for each pair of a head, "
            f"at most {FACTORS_MAX}"
        )
    return file.read(name).float()


class _Tower:
    """The encoder and projector in a file, which may be the decoder's as well."""

    def __init__(self, file: GgufFile | View, where: str, template: str) -> None:
        """`template` is the decoder's. Raises ModelError for one that is not read."""
        keys = (f"clip.{of}projector_type" for of in ("", "vision.", "audio."))
        kind = next((file.metadata[key] for key in keys if key in file.metadata), None)
        names = set(file.names())
        if kind is None and file.metadata.get("general.architecture") == PROJECTOR:
            # LLaVA's first files, which Ollama's library still has, do not say it
            kind = "mlp" if names.issuperset(("mm.0.weight", "mm.2.weight")) else None
        if not isinstance(kind, str):
            if file.metadata.get("general.architecture") != PROJECTOR:
                raise ModelError(
                    f"{where} holds an image encoder as well, without the keys that describe it "
                    "(clip.*), in a layout of Ollama's own converter that is not read; fetch "
                    "a GGUF of the model and its mmproj file from the Hugging Face hub "
                    "(`mtmd pull org/name:TYPE`), or give an mmproj file of the same model with "
                    "mmproj= (--mmproj)"
                )
            raise ModelError(
                f"{where}: clip.projector_type is {kind!r:.60}, expected the name of one; convert "
                "the file again"
            )
        shapes = {n: file.meta(n)[0] for n in names if n.startswith(TOWER)}
        self.kind, self.file = kind, file
        heard = {name: shape for name, shape in shapes.items() if name.startswith(AUDIO)}
        self.audio = _audio(file, heard, where, template)
        self.vision: VisionFamily | None = None
        self.weights: CanonicalWeights | None = None
        used = {n for n in names if n not in shapes}
        if self.audio is None or any(n.startswith(PICTURES) for n in shapes.keys() - AROUND):
            self.vision = gguf_vision_family(kind, file.metadata, shapes, where, template)
            self.weights = CanonicalWeights(file, self.vision.parameters(), where)
            used |= self.weights.sources
        stacked = file.metadata.get("clip.vision.is_deepstack_layers", ())
        self.stacked = sum(map(bool, stacked)) if isinstance(stacked, (list, tuple)) else 0
        self.audio_weights: CanonicalWeights | None = None
        self.notes: tuple[str, ...] = ()
        unread: tuple[str, ...] = ()
        if self.audio is not None:
            self.audio_weights = CanonicalWeights(file, self.audio.parameters(), where)
            used |= self.audio_weights.sources
        elif heard:
            self.notes, unread = tuple(unread_audio(heard)), UNREAD
        unused = self.vision.unused if self.vision else ()
        unheard = self.audio.unused if self.audio else ()
        check_no_extra(file, used, (*unused, *unheard, *unread), where)


def _audio(
    file: GgufFile | View, shapes: Mapping[str, Shape], where: str, template: str
) -> AudioFamily | None:
    """Return the family of the audio encoder in a projector file, where it has one that is read."""
    named = (file.metadata.get(key) for key in ("clip.audio.projector_type", "clip.projector_type"))
    kind = next((one for one in named if isinstance(one, str)), "")
    return gguf_audio_family(kind, file.metadata, shapes, where, template) if shapes else None


def _open_projector(path: Path, template: str) -> _Tower:
    file, where = GgufFile(path), path.name
    architecture = _architecture(file, where)
    if architecture != PROJECTOR:
        raise ModelError(
            f"{where} is a GGUF of architecture {architecture!r:.60}, expected a projector "
            f"({PROJECTOR!r}); "
            "fetch the model's mmproj file"
        )
    return _Tower(file, where, template)


def _template(file: GgufFile | View, tokenizer: Tokenizer, where: str) -> ChatTemplate:
    source = file.metadata.get(TEMPLATE)
    if not isinstance(source, str):
        how = how_to_give_one(tokenizer.knows)
        return ChatTemplate.none(f"{where} has no chat template ({TEMPLATE}): {how}")
    return ChatTemplate(source, tokenizer.special_text, f"{where}: {TEMPLATE}")
