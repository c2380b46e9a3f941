"""Text to token ids and back, from the `tokenizer.json`, `vocab.json` and `merges.txt`, or
`spiece.model` of a checkpoint folder, or the metadata of a GGUF.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from mtmd.base.errors import ModelError
from mtmd.base.files import open_regular
from mtmd.base.text import json_object, one_line
from mtmd.llm.tokenizer import gguf_tokenizer, sentencepiece_file, vocabulary_files
from mtmd.llm.tokenizer.control_tokens import SEAL, ControlTokens, encode_piece
from mtmd.llm.tokenizer.file_limits import check_added, check_file
from mtmd.llm.tokenizer.gguf_keys import tokenizer_keys
from mtmd.llm.tokenizer.text_stream import TextStream, token_bytes

TOKENIZER_BYTES_MAX = 256 << 20  # Gemma 3's file, among the largest, has 33 MB
CONFIG_BYTES_MAX = 16 << 20
PIECES, FAIRSEQ_PIECES = "spiece.model", "sentencepiece.bpe.model"
PIECE_TOKENS = {"eos_token": "</s>", "unk_token": "<unk>"}  # where no other file names them
PIECES_BYTES_MAX = 32 << 20  # T5's have 0.8 MB, 250,000 of them 5 MB


class Tokenizer:
    """A checkpoint's tokenizer.

    `special` maps the checkpoint's names (`bos_token`, `eos_token`, `image_token`, ...) to ids,
    `special_text` to spellings; `special_strings` are the spellings that user text must not smuggle
    in: every token flagged special, every named one, and `reserved`. Plain added tokens (Gemma's
    "<table>", runs of newlines) are ordinary text and not among them. What is `reserved` is sealed
    where it is no token, too: a template may write it for a picture. `ends` are the ids that end an
    answer, sealed as well; `repeated` ids are spelled as others are, whose ids are their values;
    `notes` say what in the tokenizer's file was not believed. Ids that user text can produce
    are below `rows`, where that is known.
    """

    def __init__(
        self,
        inner: tokenizers.Tokenizer,
        special_text: Mapping[str, str],
        reserved: Iterable[str] = (),
        *,
        ends: Iterable[int] = (),
        repeated: Mapping[int, int] | None = None,
        notes: tuple[str, ...] = (),
        added: Iterable[str] = (),
        rows: int | None = None,
    ) -> None:
        self.ends, self.notes, self._repeated = frozenset(ends), notes, dict(repeated or {})
        self._rows = rows
        inner.no_truncation()  # tokenizer.json may carry training settings that cut or pad
        inner.no_padding()
        check_added((t.content for t in inner.get_added_tokens_decoder().values()), "the tokenizer")
        self._inner = inner
        inner.add_special_tokens(
            [
                tokenizers.AddedToken(text, normalized=False)
                for text in added
                if inner.token_to_id(text) is None
            ]
        )
        named = {
            name: text for name, text in special_text.items() if inner.token_to_id(text) is not None
        }
        flagged = {
            token.content for token in inner.get_added_tokens_decoder().values() if token.special
        }
        # A checkpoint may name a token that tokenizer.json does not flag; unflagged, it would be
        # cut into pieces.
        inner.add_special_tokens(
            [
                tokenizers.AddedToken(text, normalized=False)
                for text in set(named.values()) - flagged
            ]
        )
        self.special_text = named
        self.special = {name: self.id(text) for name, text in named.items()}
        self._skipped = frozenset(
            i for i, token in inner.get_added_tokens_decoder().items() if token.special
        )
        self._skipped |= {i for i, first in self._repeated.items() if first in self._skipped}
        # An end of blanks, such as OPT's line break, is what people write.
        spelled = (
            inner.id_to_token(i)
            for i in self.ends
            if inner.decode([i], skip_special_tokens=False).strip()
        )
        reserved = frozenset(t for t in (*reserved, *spelled) if t and t.strip())
        known = {text for text in reserved if inner.token_to_id(text) is not None}
        # Blank tokens stay open: sealing them would change how every indented text is cut.
        self.special_strings = frozenset(
            text for text in flagged | set(named.values()) | known if text.strip()
        )
        # Unknown characters give the unk id by right: alone among the special ids it may come from
        # user text.
        ids = {self.id(text) for text in self.special_strings} - {self.special.get("unk_token")}
        self._control_tokens = ControlTokens(inner, self.special_strings | reserved, ids)

    def gguf_keys(
        self, ends: frozenset[int], rows: int, architecture: str, where: str
    ) -> dict[str, Any]:
        """Return the metadata of a GGUF from which the same tokenizer is read, for a decoder with
        so many `rows` of tokens, whose answers end with `ends`. Raises ModelError.
        """
        return tokenizer_keys(self._inner, self.special, ends, rows, architecture, where)

    @classmethod
    def from_folder(
        cls,
        folder: Path,
        reserved: Iterable[str] = (),
        ends: Iterable[int] = (),
        rows: int | None = None,
        added: Iterable[str] = (),
    ) -> Tokenizer:
        """Read a checkpoint folder. `reserved`: further spellings to seal, such as an image
        placeholder not flagged special; `ends`: the ids that end an answer; `rows` of the model's
        embedding: added tokens beyond them are sealed; `added`: special tokens that are given an
        id where the files have none.

        Raises ModelError naming the file that is missing, too large or broken.
        """
        config = _read_object(folder / "tokenizer_config.json")
        inner = _inner(folder, config)
        special_map = _read_object(folder / "special_tokens_map.json")
        special_text, unnamed = _named_tokens({**special_map, **config}, folder)
        _add_listed(inner, config, folder)
        listed = [text for text in unnamed if inner.token_to_id(text) is not None]
        if rows is not None:
            there = inner.get_added_tokens_decoder().items()
            listed += [token.content for number, token in there if number >= rows]
        return cls(inner, special_text, [*listed, *reserved], ends=ends, added=added)

    @classmethod
    def from_pieces(cls, folder: Path) -> Tokenizer:
        """Read a checkpoint folder that has a spiece.model in place of a tokenizer.json. What goes
        around a text is for the caller.

        Raises ModelError naming the file that is missing, too large, broken or not read.
        """
        path = folder / PIECES
        inner = sentencepiece_file.build(_read_file(path, PIECES_BYTES_MAX), str(path))
        special_map = _read_object(folder / "special_tokens_map.json")
        config = _read_object(folder / "tokenizer_config.json")
        special_text, _ = _named_tokens({**PIECE_TOKENS, **special_map, **config}, folder)
        _add_listed(inner, config, folder)
        return cls(inner, special_text)

    @classmethod
    def from_gguf(
        cls,
        metadata: Mapping[str, Any],
        where: str,
        reserved: Iterable[str] = (),
        added: Iterable[str] = (),
    ) -> Tokenizer:
        """Read a GGUF's metadata: its keys to Python values. `where` names the file, for errors;
        `reserved` and `added` as in `from_folder`.

        Raises ModelError naming the key that is missing, broken or of a kind that is not read.
        """
        reserved = tuple(reserved)
        built = gguf_tokenizer.build(metadata, where, reserved)
        return cls(
            built.inner,
            built.special_text,
            [*built.marks, *reserved],
            ends=built.vocabulary.stop_tokens(),
            repeated=built.vocabulary.repeated,
            notes=built.notes,
            added=added,
            rows=len(built.vocabulary.tokens),
        )

    def __len__(self) -> int:
        """Number of ids, added tokens included. A checkpoint's embedding may have more rows."""
        return self._inner.get_vocab_size(with_added_tokens=True) + len(self._repeated)

    def id_beyond(self, rows: int) -> int | None:
        """The largest id that user text can produce, where an embedding of so many rows lacks it;
        sealed tokens, which it cannot, may lie beyond them.
        """
        if self._rows is not None and self._rows <= rows:
            return None
        every = self._inner.get_vocab(with_added_tokens=True).values()
        largest = max(set(every) - self._control_tokens.ids, default=-1)
        return largest if largest >= rows else None

    def knows(self, text: str) -> bool:
        """Return whether one token is spelled so."""
        return self._inner.token_to_id(text) is not None

    def id(self, text: str) -> int:
        """The id of the one token spelled `text`. Raises ModelError if there is none."""
        token_id = self._inner.token_to_id(text)
        if token_id is None:
            raise ModelError(
                f"the tokenizer has no token {text!r}; expected it in tokenizer.json (is this the "
                "checkpoint's own file?)"
            )
        return token_id

    def encode(self, text: str) -> list[int]:
        """Token ids of a rendered prompt. Spellings of special tokens become those tokens, except
        where sealed; none are added.

        Raises PromptError for text that is not valid Unicode.
        """
        return [
            i for piece in text.split(SEAL) if piece for i in encode_piece(self._inner, piece).ids
        ]

    def encode_prompt(self, text: str) -> list[int]:
        """Token ids of a rendered chat, with what the tokenizer puts around a prompt, unless the
        text begins with bos by itself.

        That is the rule of transformers' ProcessorMixin.apply_chat_template (5.23). Raises
        PromptError like `encode`.
        """
        bos = self.special_text.get("bos_token")
        if bos is not None and text.startswith(bos):
            return self.encode(text)
        return [*self.prefix, *self.encode(text), *self.suffix]

    @property
    def prefix(self) -> tuple[int, ...]:
        """The ids that the tokenizer's post-processor puts before a prompt.

        An `add_bos_token` in tokenizer_config.json has no say: beside a tokenizer.json,
        transformers 5 does not read it.
        """
        return self._around[0]

    @property
    def suffix(self) -> tuple[int, ...]:
        """The ids that the tokenizer's post-processor puts after a prompt."""
        return self._around[1]

    @cached_property
    def _around(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        plain, full = (
            self._inner.encode("a", add_special_tokens=added).ids for added in (False, True)
        )
        for n in range(len(full) - len(plain) + 1):
            if full[n : n + len(plain)] == plain:
                return tuple(full[:n]), tuple(full[n + len(plain) :])
        raise ModelError(
            f"the tokenizer turns the text of {plain} into {full}; expected its post_processor to "
            "add tokens around it only"
        )

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """The text of `ids`; ids that the tokenizer does not know give nothing, incomplete
        characters U+FFFD.
        """
        known = [self._repeated.get(i, i) for i in ids] if self._repeated else list(ids)
        return self._inner.decode(known, skip_special_tokens=skip_special)

    def stream(self, skip_special: bool = True, keep: Iterable[int] = ()) -> TextStream:
        """A decoder for ids that arrive one at a time. Special tokens give no text, but for those
        to `keep`.
        """
        skipped = self._skipped - frozenset(keep) if skip_special else frozenset[int]()
        return TextStream(self._inner, skipped, self._repeated)

    @cached_property
    def silent(self) -> dict[str, int]:
        """The tokens that add nothing to an answer, by their spelling."""
        spelled = ((self._inner.id_to_token(i), i) for i in self._skipped)
        return {text: i for text, i in spelled if text and text.strip()}

    @property
    def added_spellings(self) -> frozenset[str]:
        """The spellings of tokens that no text is cut into: special ones, and others that were
        added.
        """
        return frozenset(t.content for t in self._inner.get_added_tokens_decoder().values())

    @property
    def skipped(self) -> frozenset[int]:
        """The special tokens, which add nothing to an answer."""
        return self._skipped

    def token_bytes(self) -> list[bytes]:
        """Return what each id adds to an answer, in UTF-8: nothing for special tokens."""
        return token_bytes(self._inner, self._skipped, self._repeated)

    def seal(self, text: str) -> str:
        """User text in which no special token can be found, wherever a template puts it. Text
        without their spellings is unchanged.

        Raises PromptError if the tokenizer turns a single character of the text into a special
        token.
        """
        return self._control_tokens.seal(text)


def _inner(folder: Path, config: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """Read tokenizer.json, or, where there is none, the two files that it was made of, ranks, or
    pieces.
    """
    path = folder / "tokenizer.json"
    pair = [folder / name for name in (vocabulary_files.VOCABULARY, vocabulary_files.MERGES)]
    if not path.exists() and all(one.exists() for one in pair):
        vocabulary, merges = (_read_file(one, vocabulary_files.BYTES_MAX) for one in pair)
        kind = config.get("tokenizer_class")
        return vocabulary_files.build(vocabulary, merges, kind, str(folder))
    ranks = folder / vocabulary_files.RANKS
    if not path.exists() and ranks.exists():
        data = _read_file(ranks, vocabulary_files.BYTES_MAX)
        return vocabulary_files.build_ranked(data, config, str(folder))
    pieces = folder / FAIRSEQ_PIECES
    if not path.exists() and pieces.exists():
        sentencepiece_file.check_class(config.get("tokenizer_class"), str(folder), FAIRSEQ_PIECES)
        data = _read_file(pieces, PIECES_BYTES_MAX)
        return sentencepiece_file.build(data, str(pieces), fairseq=True)
    data = _read_file(path, TOKENIZER_BYTES_MAX)
    check_file(data, str(path))
    try:
        return tokenizers.Tokenizer.from_buffer(data)
    except BaseException as error:  # the library's Rust panics do not derive from Exception
        if isinstance(error, (KeyboardInterrupt, SystemExit)):
            raise
        raise ModelError(
            f"{path} is not a tokenizer file: {one_line(error, 200)}; expected the tokenizers "
            "library's JSON"
        ) from error


def _named_tokens(config: Mapping[str, Any], folder: Path) -> tuple[dict[str, str], list[str]]:
    """The special tokens a checkpoint names (`..._token` keys and `extra_special_tokens`), and
    those it only lists.
    """
    extra = config.get("extra_special_tokens") or {}
    fields = {**config, **extra} if isinstance(extra, dict) else dict(config)
    named = {
        key: text
        for key, value in fields.items()
        if key.endswith("_token") and value and (text := _spelling(value, key, folder))
    }
    listed = [
        *(config.get("additional_special_tokens") or []),
        *(extra if isinstance(extra, list) else []),
    ]
    return named, [
        text for value in listed if (text := _spelling(value, "additional_special_tokens", folder))
    ]


def _spelling(value: object, key: str, folder: Path) -> str | None:
    if isinstance(value, dict):
        value = value.get("content")
    if isinstance(value, bool):  # `add_bos_token: true` and its like are switches, not spellings
        return None
    if not isinstance(value, str) or any("\ud800" <= c <= "\udfff" for c in value):
        raise ModelError(
            f"{folder / 'tokenizer_config.json'} has {key!r}: {value!r:.60}; expected the token's "
            "text"
        )
    return value


def _add_listed(inner: tokenizers.Tokenizer, config: Mapping[str, Any], folder: Path) -> None:
    """Add tokens that only tokenizer_config.json's `added_tokens_decoder` lists, at the ids it
    gives.
    """
    path = folder / "tokenizer_config.json"
    present = inner.get_added_tokens_decoder()
    try:
        listed = (config.get("added_tokens_decoder") or {}).items()
        tokens = sorted(
            ((int(i), _added_token(entry)) for i, entry in listed), key=lambda pair: pair[0]
        )
    except (TypeError, ValueError, AttributeError, KeyError) as error:
        raise ModelError(
            f"{path} has a broken 'added_tokens_decoder' ({one_line(error, 200)}); expected "
            f"{{id: token}}"
        ) from error
    check_added((token.content for _, token in tokens), str(path))
    for i, token in tokens:
        if present.get(i) == token:
            continue
        inner.add_tokens([token])
        if inner.token_to_id(token.content) != i:
            raise ModelError(
                f"{path} gives {token.content!r} the id {i}, but the vocabulary has it at "
                f"{inner.token_to_id(token.content)}; the two files are not of one checkpoint"
            )


def _added_token(entry: Mapping[str, Any]) -> tokenizers.AddedToken:
    flags = {
        key: bool(entry[key])
        for key in ("single_word", "lstrip", "rstrip", "normalized", "special")
        if key in entry
    }
    return tokenizers.AddedToken(str(entry["content"]), **flags)


def _read_file(path: Path, limit: int) -> bytes:
    try:
        with open_regular(path) as file:
            data = file.read(limit + 1)
    except OSError as error:
        raise ModelError(
            f"{path} cannot be read ({error.strerror}); expected a checkpoint folder with a "
            "tokenizer.json"
        ) from error
    if len(data) > limit:
        raise ModelError(
            f"{path} is larger than {limit >> 20} MiB, the maximum; is this the right file?"
        )
    return data


def _read_object(path: Path) -> dict[str, Any]:
    """A JSON object, or {} if there is no such file."""
    if not path.exists():
        return {}
    return json_object(_read_file(path, CONFIG_BYTES_MAX), path)
