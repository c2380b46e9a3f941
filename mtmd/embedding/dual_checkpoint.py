"""A dual encoder's checkpoint folder in the Hugging Face layout, opened."""

from __future__ import annotations

import re
import string
from dataclasses import dataclass
from pathlib import Path

from mtmd.base.errors import ModelError
from mtmd.clip.dual.family import DualFamily, dual_family
from mtmd.kernels.checkpoint.canonical import CanonicalWeights, check_no_extra
from mtmd.kernels.checkpoint.open_weights import open_weights
from mtmd.kernels.checkpoint.settings import Settings, read_json
from mtmd.llm.tokenizer.sentencepiece_file import BLANK
from mtmd.llm.tokenizer.tokenizer import PIECES, Tokenizer

_WITHOUT_PUNCTUATION = str.maketrans("", "", string.punctuation)


@dataclass(frozen=True)
class DualCheckpoint:
    """`architecture`: model_type of config.json. `bare`: the punctuation of texts goes, and blanks
    between words become one. `pieces`: the tokenizer is a sentencepiece model's alone, and a blank
    is put before a text here.
    """

    folder: Path
    family: DualFamily
    weights: CanonicalWeights
    weight_bytes: int
    tokenizer: Tokenizer
    architecture: str
    bare: bool
    pieces: bool

    def tokens(self, text: str) -> tuple[list[int], bool]:
        """Ids of a text as the model was trained to read it, and whether its end did not fit.

        Raises PromptError for text that is not valid Unicode.
        """
        if self.pieces:
            text = BLANK + text.replace(BLANK, " ")
        if self.family.lower:
            text = text.lower()
        if self.bare:
            text = re.sub(r"\s+", " ", text.translate(_WITHOUT_PUNCTUATION)).strip()
        tokenizer = self.tokenizer
        suffix = tokenizer.suffix or self._end
        room = self.family.text.context - len(tokenizer.prefix) - len(suffix)
        ids = tokenizer.encode(tokenizer.seal(text))
        return [*tokenizer.prefix, *ids[:room], *suffix], len(ids) > room

    @property
    def _end(self) -> tuple[int, ...]:
        """Return what ends a text where the tokenizer's file adds nothing, as SigLIP's own does."""
        end = self.tokenizer.special.get("eos_token")
        return () if end is None else (end,)


def is_dual_folder(folder: Path) -> bool:
    """Return whether a folder's config.json names a dual encoder; False for a folder without
    one.
    """
    from mtmd.clip.dual.family import is_dual

    path = folder / "config.json"
    return path.is_file() and is_dual(Settings(read_json(path), "config.json"))


def open_dual(folder: Path) -> DualCheckpoint:
    """Everything checked that can be without reading weights. Raises ModelError saying which file
    is wrong and how.
    """
    config = Settings(read_json(folder / "config.json"), "config.json")
    image = Settings(
        read_json(folder / "processor_config.json", required=False), "processor_config.json"
    )
    image = (
        image.part("image_processor")
        if image.get("image_processor", None) is not None
        else Settings(read_json(folder / "preprocessor_config.json"), "preprocessor_config.json")
    )
    family, file, where = dual_family(config, image), open_weights(folder), str(folder)
    weights = CanonicalWeights(file, family.parameters(), where)
    check_no_extra(file, weights.sources, family.unused, where)
    pieces = (folder / PIECES).exists() and not (folder / "tokenizer.json").exists()
    tokenizer = Tokenizer.from_pieces(folder) if pieces else Tokenizer.from_folder(folder)
    if (largest := tokenizer.id_beyond(family.text.vocabulary)) is not None:
        raise ModelError(
            f"{where}: the tokenizer has a token with id {largest}, the configuration a vocabulary "
            f"of {family.text.vocabulary}, expected ids below that; they belong to different "
            "models, fetch both again"
        )
    kind = read_json(folder / "tokenizer_config.json", required=False).get("tokenizer_class")
    return DualCheckpoint(
        folder,
        family,
        weights,
        file.bytes,
        tokenizer,
        config.get("model_type", ""),
        bare=pieces or str(kind).removesuffix("Fast") == family.bare_with,
        pieces=pieces,
    )
