"""A checkpoint folder in the Hugging Face layout, opened."""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any, cast

from mtmd.base.errors import DualEncoderError, ModelError
from mtmd.chat_template.template import ChatTemplate
from mtmd.checkpoint import relevance, token_vectors
from mtmd.checkpoint.checkpoint import (
    Checkpoint,
    added_tokens,
    check_vocabulary,
    end_of_turn,
    placeholders,
    unread_audio,
)
from mtmd.checkpoint.hub import cached_tokenizer
from mtmd.checkpoint.pooling import gives_last_state
from mtmd.checkpoint.sampling import GENERATION_CONFIG, of_config, of_generation_config
from mtmd.checkpoint.stored import refused_by_name, text_as_stored, tying
from mtmd.clip.audio_family import AudioFamily, audio_family, hears, with_model_type
from mtmd.clip.dual.family import is_dual
from mtmd.clip.family import FAMILIES as VISION_FAMILIES
from mtmd.clip.family import (
    BeginsText,
    OwnTokens,
    VisionFamily,
    borrowed_tokenizer,
    in_usual_words,
    own_template,
    vision_family,
)
from mtmd.clip.instructed import Instructed
from mtmd.kernels.checkpoint.canonical import CanonicalWeights, WeightFile, check_no_extra
from mtmd.kernels.checkpoint.open_weights import open_weights
from mtmd.kernels.checkpoint.settings import Settings, read_json
from mtmd.llm.family import FAMILIES as TEXT_FAMILIES
from mtmd.llm.family import text_family
from mtmd.llm.sampling.options import ModelSampling
from mtmd.llm.tokenizer.tokenizer import Tokenizer

TOKENIZER_CONFIG = "tokenizer_config.json"
TEXT_CONFIGS = "text_config", "language_config", "llm_config"
EXTRACTORS = "feature_extractor", "audio_processor"


def open_folder(folder: Path, template: Path | None = None, *, answers: bool = True) -> Checkpoint:
    """Everything checked that can be without reading weights; of these, tables for tokens and for
    outputs are compared where there are both. `answers`: a model is expected that writes them.
    Raises ModelError saying which file is wrong and how, DualEncoderError for a model that gives
    vectors or scores where one is expected that writes.
    """
    settings = read_config(folder, required=False)
    with refused_by_name(folder):
        try:
            whole = open_weights(folder)
        except ModelError:
            _check_kind(settings)  # a reason that other weights would not mend
            raise
    settings = read_config(folder)
    if is_dual(settings):
        raise DualEncoderError(
            f"{folder} is a dual encoder, which gives vectors, not answers; use `mtmd embed`, or "
            "`mtmd.load_embedder`"
        )
    if answers and gives_last_state(folder):
        raise DualEncoderError(
            f"{folder} is an embedding model, which gives vectors, not answers; use `mtmd "
            "embed`, or `mtmd.load_embedder`"
        )
    if answers and relevance.scores_relevance(folder):
        relevance.refuse_to_write(folder)
    where, outer = str(folder), settings
    file: WeightFile = whole
    if inner := token_vectors.gives_token_vectors(settings):
        if answers:
            raise DualEncoderError(
                f"{folder} gives vectors of pages and queries, not answers; use `mtmd embed`, or "
                "`mtmd.load_embedder`"
            )
        settings = settings.part(token_vectors.INNER)
        file = token_vectors.inner_file(file)
    vision, (kind, config) = _families(folder, settings)
    audio = _audio_family(folder, settings)
    with refused_by_name(folder):
        parts = (settings, settings.part("text_config"))
        stated = any(part.get("tie_word_embeddings", False) is True for part in parts)
        if inner or relevance.SCORE in file.names():  # which has no table of outputs
            config = Settings({**config.values, "tie_word_embeddings": True}, config.where)
        text, notes = text_as_stored(kind, config, file, stated)
        head = relevance.head_of_folder(file, text, where)
        vectors = token_vectors.read_token_vectors(folder, outer, whole, text) if inner else None
        text_weights = CanonicalWeights(file, text.parameters(), where)
        vision_weights = CanonicalWeights(file, vision.parameters(), where) if vision else None
        audio_weights = CanonicalWeights(file, audio.parameters(), where) if audio else None
        used = set(text_weights.sources)
        for weights in filter(None, (vision_weights, audio_weights, head)):
            used |= weights.sources
        unused = (family.unused for family in (text, vision, audio) if family)
        check_no_extra(file, used, tuple(chain.from_iterable(unused)), where)
        notes = [*notes, *([] if audio else unread_audio(file.names()))]
    tokenizer, ends = _tokenizer(folder, settings, vision, audio, text.vocabulary)
    check_vocabulary(tokenizer, text, where)
    if vision:
        keys: tuple[str, ...] = ("image_token_index", "image_token_id")
        part, family = settings, cast("object", vision)
        if isinstance(family, BeginsText):
            part, keys = settings.part("text_config"), (family.begin_key,)
        _check_media_token(folder, part, keys, vision.image_token, tokenizer)
    if audio:
        keys = ("audio_token_index", "audio_token_id", "speech_token_index")
        _check_media_token(folder, settings, keys, audio.token, tokenizer)
    special = tokenizer.special_text
    chat = (
        ChatTemplate.from_file(template, special)
        if template
        else ChatTemplate.from_folder(folder, special, tokenizer.knows)
    )
    if chat.missing and (source := own_template(vision, tokenizer.knows)) is not None:
        chat = ChatTemplate(source, special, f"{folder}: the template of its family")
    if not template:
        _check_named_tokens(folder, chat, special)
    return Checkpoint(
        folder,
        vision,
        text,
        vision_weights,
        text_weights,
        whole.bytes,
        tokenizer,
        chat,
        ends | end_of_turn(template, tokenizer),
        architecture=settings.get("model_type", ""),
        sampling=_sampling(folder, settings),
        notes=tuple(notes),
        audio=audio,
        audio_weights=audio_weights,
        relevance=head,
        token_vectors=vectors,
        instruction_tokenizer=_instruction_tokenizer(folder, vision),
    )


def read_config(folder: Path, required: bool = True) -> Settings:
    """Read the part of config.json that answers. Raises ModelError."""
    return answering_part(
        Settings(read_json(folder / "config.json", required=required), "config.json")
    )


def answering_part(config: Settings) -> Settings:
    """Return a configuration in transformers' words, or, of a model that speaks as well, that of
    its thinker. Raises ModelError for one that is not read.
    """
    has_voice = config.get("thinker_config", None) is not None
    if has_voice:
        return config.part("thinker_config")
    return in_usual_words(with_model_type(config))


def _check_kind(settings: Settings) -> None:
    """Raises ModelError for an architecture that no family reads, naming those that are."""
    kind = settings.get("model_type", None)
    known = {t for entry in (*TEXT_FAMILIES, *VISION_FAMILIES) for t in entry.model_types}
    if isinstance(kind, str) and not {kind, f"{kind}_text"} & known and not is_dual(settings):
        text_family(kind, settings)


def _families(folder: Path, settings: Settings) -> tuple[VisionFamily | None, tuple[str, Settings]]:
    """Return the vision family, None for a model without pictures, and what the decoder's is read
    from. Raises ModelError.
    """
    kind = settings.get("model_type", None)
    if not isinstance(kind, str):
        raise ModelError(
            f"{folder / 'config.json'}: model_type is {kind!r:.60}, expected the name of an "
            "architecture"
        )
    _check_whole(folder, settings)
    sees = settings.get("vision_config", None) is not None
    if not sees and not hears(settings):
        return None, (kind, settings)
    text = text_settings(settings)
    text_kind = text.get("model_type", f"{kind}_text") if text is not settings else f"{kind}_text"
    if not isinstance(text_kind, str):
        raise ModelError(
            f"{folder / 'config.json'}: text_config: model_type is {text_kind!r:.60}, expected the "
            "name of an architecture"
        )
    vision = vision_family(kind, settings, _image_processor(folder, settings)) if sees else None
    return vision, (text_kind, text)


def _check_whole(folder: Path, settings: Settings) -> None:
    """Raises ModelError where a part is another checkpoint, which config.json names."""
    for part, what in (("text", "decoder"), ("audio", "audio encoder")):
        other = settings.get(f"{part}_model_id", None)
        if other is not None and settings.get(f"{part}_config", None) is None:
            raise ModelError(
                f"{folder / 'config.json'}: its {what} is another checkpoint, {other!r:.80} "
                f"({part}_model_id), which is not in this folder; expected one that holds all "
                "parts, or a GGUF of the decoder and an mmproj file of the rest"
            )


# Keys that say which layers of a decoder get features of their own
DEPTHS = ("deepstack_layer_map", "spatial_target_layers")
# Keys that say which tokens stand around pictures and videos
AROUND = tuple(f"{kind}_{end}_token_id" for kind in ("image", "video") for end in ("start", "end"))


def text_settings(settings: Settings) -> Settings:
    """The decoder's: below text_config, or language_config, as DeepSeek's authors have it, or, in
    older checkpoints, beside vision_config; with those it shares with the whole model, whose
    model_type is its `part_of`.
    """
    key = next((k for k in TEXT_CONFIGS if settings.get(k, None) is not None), None)
    if key is None:
        return settings
    text = settings.part(key)
    if key != TEXT_CONFIGS[0]:  # which names another model than this part is
        own = {"model_type": None, "sliding_window": settings.get("sliding_window", None)}
        text = Settings({**text.values, **own}, text.where)
    shared = {
        "tie_word_embeddings": tying(settings, text),
        "deepstack_visual_indexes": settings.part("vision_config").get(
            "deepstack_visual_indexes", None
        ),
        "part_of": settings.get("model_type", None),
        **{key: settings.get(key, None) for key in (*DEPTHS, *AROUND)},
        "vision_config": settings.get("vision_config", None),
    }
    return Settings(
        {**text.values, **{key: value for key, value in shared.items() if value is not None}},
        text.where,
    )


def _image_processor(folder: Path, config: Settings) -> Settings:
    """Return how pictures are prepared, and, as its `video_processor`, how videos are: one file in
    transformers 5, others before; as there, the first has precedence, and what is not said of
    videos is as with pictures, or the other way round; `config` may say it in place of a file. Its
    `tokens` are the tokenizer's settings, with the tokens that they name, its `processor` those of
    what joins all of them.
    """
    name = "processor_config.json"
    both = Settings(read_json(folder / name, required=False), name)
    own = read_json(folder / "video_preprocessor_config.json", required=False)
    video = both.get("video_processor", None) or own
    if both.get("image_processor", None) is not None:
        image = both.part("image_processor")
    else:
        name = "preprocessor_config.json"
        stated = config.get("image_processor", None)
        if stated is None:
            stated = read_json(folder / name, required=not video) or video
        image = Settings(stated, name)
    video = video or image.values
    return Settings(
        {
            **image.values,
            "video_processor": video,
            "tokens": _tokens(folder, config.flag("is_encoder_decoder", False)),
            "processor": both.values,
        },
        image.where,
    )


def _tokens(folder: Path, added: bool = False) -> dict[str, Any]:
    """Return the tokenizer's settings, with the tokens that they name, and, if `added`, those that
    other files add, as `added_tokens_decoder`.
    """
    tokens = read_json(folder / TOKENIZER_CONFIG, required=False)
    named = tokens.get("extra_special_tokens")
    if added and "added_tokens_decoder" not in tokens:
        tokens = {**tokens, "added_tokens_decoder": _added_tokens(folder)}
    return {**tokens, **named} if isinstance(named, dict) else tokens


def _added_tokens(folder: Path) -> dict[str, Any]:
    """Return the tokens of added_tokens.json, or those that tokenizer.json adds, by their ids."""
    listed = read_json(folder / "added_tokens.json", required=False)
    if listed:
        return {str(number): {"content": text} for text, number in listed.items()}
    entries = read_json(folder / "tokenizer.json", required=False).get("added_tokens")
    entries = entries if isinstance(entries, list) else []
    return {str(one.get("id")): one for one in entries if isinstance(one, dict)}


def _audio_family(folder: Path, settings: Settings) -> AudioFamily | None:
    """Read it with its feature extractor's settings, which are in one file with those of pictures,
    or in the file that has theirs in models without pictures.
    """
    name = "processor_config.json"
    both = Settings(read_json(folder / name, required=False), name)
    key = next((key for key in EXTRACTORS if both.get(key, None) is not None), None)
    features = both.part(key or EXTRACTORS[0])
    if key is None:
        name = "preprocessor_config.json"
        features = Settings(read_json(folder / name, required=False), name)
    more = {"tokens": _tokens(folder), "processor": both.values}
    features = Settings({**features.values, **more}, features.where)
    return audio_family(settings.get("model_type", ""), settings, features)


def _tokenizer(
    folder: Path,
    config: Settings,
    vision: VisionFamily | None,
    audio: AudioFamily | None,
    rows: int,
) -> tuple[Tokenizer, frozenset[int]]:
    """Return the tokenizer and the tokens that end an answer. Raises ModelError, also for a
    tokenizer in another repository that was not fetched.
    """
    family: object = vision
    has_own = isinstance(family, OwnTokens)
    ends = frozenset[int]() if has_own else _stop_tokens(folder, config)
    how = placeholders(vision, audio), ends, rows, added_tokens(vision)
    tokenizer = Tokenizer.from_folder(folder, *how)
    borrowed = borrowed_tokenizer(config)
    if borrowed is not None and not tokenizer.knows(borrowed.mark):
        source = cached_tokenizer(borrowed.repo)
        if source is None:
            raise ModelError(
                f"{folder}: its tokenizer.json is that of an older revision; put the one of "
                f"{borrowed.repo} on the Hugging Face hub in its place, or give the model by its "
                "name there"
            )
        tokenizer = Tokenizer.from_folder(source, *how)
    if isinstance(family, OwnTokens):
        ends = frozenset({tokenizer.id(family.end)})
    return tokenizer, ends or _named_end(folder, tokenizer)


def _instruction_tokenizer(folder: Path, vision: VisionFamily | None) -> Tokenizer | None:
    """Read the tokenizer of an encoder that reads the text of a prompt, None for one that does not,
    or not with one of its own. Raises ModelError, also for one with more tokens than the encoder
    has.
    """
    family: object = vision
    if not isinstance(family, Instructed) or not family.instruction.folder:
        return None
    path, rows = folder / family.instruction.folder, family.instruction.rows
    result = Tokenizer.from_folder(path)
    if len(result) > rows:
        raise ModelError(
            f"{path} has {len(result)} tokens, and the encoder {rows}; they belong to different "
            "models, fetch both again"
        )
    return result


def _check_media_token(
    folder: Path, config: Settings, keys: tuple[str, ...], token: str, tokenizer: Tokenizer
) -> None:
    """Raises ModelError where config.json, by one of these `keys`, and tokenizer.json disagree
    about the token that stands for pictures, or for audio.
    """
    expected = tokenizer.id(token)
    for key in keys:
        actual = config.get(key, expected)
        if type(actual) is not int or actual != expected:
            raise ModelError(
                f"{folder / 'config.json'}: {key} is {actual!r:.60}, expected {expected}, the id "
                f"of {token} in tokenizer.json; "
                "they belong to different models, fetch both again"
            )


def _check_named_tokens(folder: Path, chat: ChatTemplate, special: Mapping[str, str]) -> None:
    """Raises ModelError where tokens that the template writes by name are not there because a file
    is missing: the model would read a prompt without them.
    """
    requested = {"bos_token", "eos_token"} & set(re.findall(r"\w+", chat.source))
    if not (folder / TOKENIZER_CONFIG).exists() and (unknown := sorted(requested - set(special))):
        raise ModelError(
            f"{folder / TOKENIZER_CONFIG} is missing, expected it to tell {' and '.join(unknown)}, "
            "which the chat template writes; fetch it"
        )


def _stop_tokens(folder: Path, config: Settings) -> frozenset[int]:
    """Return the end-of-sequence ids of the generation settings, else of the configuration, none
    where they do not say. Raises ModelError for a value that is neither an id nor a list of ids.
    """
    generation = read_json(folder / GENERATION_CONFIG, required=False)
    whole = Settings(config.values, f"{folder}: {config.where}")
    for settings in (
        Settings(generation, f"{folder}: {GENERATION_CONFIG}"),
        whole,
        whole.part("text_config"),
    ):
        if ids := settings.token_ids("eos_token_id"):
            return frozenset(ids)
    return frozenset()


def _named_end(folder: Path, tokenizer: Tokenizer) -> frozenset[int]:
    """Return the end of sequence that the tokenizer's files name. Raises ModelError for none."""
    if "eos_token" not in tokenizer.special:
        raise ModelError(
            f"{folder}: no eos_token_id in generation_config.json or config.json, and no eos_token "
            "in tokenizer_config.json; answers could not end"
        )
    return frozenset({tokenizer.special["eos_token"]})


def _sampling(folder: Path, config: Settings) -> ModelSampling:
    path = folder / GENERATION_CONFIG
    if path.exists():
        return of_generation_config(read_json(path), GENERATION_CONFIG)
    return of_config(config.values)
