"""Tokenizers from GGUF metadata against the tokenizers and sentencepiece libraries, on small
tokenizers trained here.
"""

from __future__ import annotations

import io
import json
import random
import re
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import tokenizers
from tokenizer_samples import CORPUS, TEXTS, agree, fuzzed, metadata, original
from tokenizers import (
    AddedToken,
    Regex,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerFast
from transformers.tokenization_utils_base import generate_merges

from mtmd.base.errors import ModelError
from mtmd.llm.tokenizer import gguf_tokenizer
from mtmd.llm.tokenizer.control_tokens import SEAL
from mtmd.llm.tokenizer.tokenizer import Tokenizer

GOLDEN = Path(__file__).parents[4] / "shared" / "golden"


@cache
def sentencepiece_model(prefix: bool, symbols: tuple[str, ...] = ()) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # SWIG's types lack __module__
        library = pytest.importorskip(
            "sentencepiece", reason="the oracle for scores: pip install sentencepiece"
        )
    written = io.BytesIO()
    library.SentencePieceTrainer.train(
        sentence_iterator=iter([line for text in CORPUS for line in text.split("\n") if line] * 3),
        model_writer=written,
        model_type="bpe",
        vocab_size=900,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=prefix,
        character_coverage=0.985,
        user_defined_symbols=list(symbols),
        split_digits=True,
        allow_whitespace_only_pieces=True,
        minloglevel=2,
    )
    return library.SentencePieceProcessor(model_proto=written.getvalue())


RUNS = (
    tuple("\n" * n for n in range(1, 6))
    + tuple("▁" * n for n in range(2, 9))
    + ("<image>", "<table>")
)


def scored(model: Any, symbols: tuple[str, ...] = (), **more: Any) -> dict[str, Any]:
    """Keys for a sentencepiece model, its user-defined symbols as the converter finds them in
    added_tokens_decoder.
    """
    size = model.vocab_size()
    user = {i: model.IdToPiece(i) in symbols for i in range(size)}
    keys = {
        "model": "llama",
        "pre": "default",
        "tokens": [
            model.IdToPiece(i).replace("▁", " ") if user[i] else model.IdToPiece(i)
            for i in range(size)
        ]
        + [f"[PAD{size}]"],
        "scores": np.array(
            [-1000.0 if user[i] else model.GetScore(i) for i in range(size)] + [-10000.0],
            np.float32,
        ),
        "token_type": [
            2
            if model.IsUnknown(i)
            else 3
            if model.IsControl(i)
            else 6
            if model.IsByte(i)
            else 4
            if user[i]
            else 1
            for i in range(size)
        ]
        + [5],
        "unknown_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "add_bos_token": True,
        "add_eos_token": False,
        **more,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in keys.items()}


def converted(model: Any, prefix: bool, symbols: tuple[str, ...]) -> tokenizers.Tokenizer:
    """What transformers' LlamaConverter (with `prefix`) and GemmaConverter make of a sentencepiece
    model.
    """
    pieces = {model.IdToPiece(i): i for i in range(model.vocab_size())}
    merges = generate_merges(pieces, {piece: model.GetScore(i) for piece, i in pieces.items()})
    inner = tokenizers.Tokenizer(
        models.BPE(pieces, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    blanks = normalizers.Replace(" ", "▁")
    inner.normalizer = (
        normalizers.Sequence([normalizers.Prepend("▁"), blanks]) if prefix else blanks
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    inner.decoder = decoders.Sequence(steps + [decoders.Strip(content=" ", left=1)] * prefix)
    inner.add_special_tokens(
        [AddedToken(text, normalized=False) for text in ("<unk>", "<s>", "</s>")]
    )
    inner.add_tokens([AddedToken(text, normalized=False) for text in pieces if text in symbols])
    return inner


@pytest.mark.parametrize(("prefix", "symbols"), [(True, ()), (False, RUNS), (True, ("<image>",))])
def test_scores_give_the_tokens_of_sentencepiece_and_of_its_conversion(
    prefix: bool, symbols: tuple[str, ...]
) -> None:
    model = sentencepiece_model(prefix, symbols)
    built = Tokenizer.from_gguf(
        scored(model, symbols, **({} if prefix else {"add_space_prefix": False})), "m.gguf"
    )
    texts = TEXTS + fuzzed(1200, seed=3)
    agree(
        built,
        converted(model, prefix, symbols),
        [*texts, "<s>a</s> b<unk>", "</s>\n\n\n\n\n\n\n<table>  <table>"],
    )
    for text in texts:  # sentencepiece writes no blank after <image>, and reads "▁" as one
        if "<image>" not in text and "▁" not in text:
            assert built.encode(text) == model.encode(text), text
            assert built.decode(built.encode(text)) == text


def test_merges_are_those_of_transformers_in_the_order_of_2023() -> None:
    model = sentencepiece_model(True)
    pieces = {model.IdToPiece(i): i for i in range(model.vocab_size())}
    scores = {piece: model.GetScore(i) for piece, i in pieces.items()}
    inner = gguf_tokenizer.build(scored(model), "m.gguf").inner
    merges = [tuple(pair) for pair in json.loads(inner.to_str())["model"]["merges"]]
    assert (
        set(merges) == set(generate_merges(pieces, scores))
        and len(merges) == len(set(merges)) > 500
    )
    assert merges == sorted(
        merges,
        key=lambda pair: (
            -scores["".join(pair)],
            pieces["".join(pair)],
            pieces[pair[0]],
            pieces[pair[1]],
        ),
    )


def test_sentencepiece_with_merges() -> None:
    inner = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    inner.normalizer, inner.pre_tokenizer = (
        normalizers.Replace(" ", "▁"),
        pre_tokenizers.Split(Regex("▁"), "merged_with_next"),
    )
    reserved = ["<pad>", "<eos>", "<bos>", "<unk>", *(f"<0x{i:02X}>" for i in range(256))]
    inner.train_from_iterator(
        CORPUS * 3,
        trainers.BpeTrainer(
            vocab_size=900, special_tokens=reserved, limit_alphabet=90, show_progress=False
        ),
    )
    form = json.loads(inner.to_str())
    form["added_tokens"] = form["added_tokens"][:4]
    inner = tokenizers.Tokenizer.from_str(json.dumps(form))
    inner.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    keys = metadata(
        inner,
        "gemma4",
        None,
        bos_token_id=2,
        eos_token_id=1,
        unknown_token_id=3,
        scores=[-1000.0] * 900,
    )
    built = Tokenizer.from_gguf(keys, "m.gguf")
    agree(built, inner, TEXTS + fuzzed(1200, seed=9))
    assert built.prefix == (2,) and built.special == {
        "bos_token": 2,
        "eos_token": 1,
        "unk_token": 3,
    }


@pytest.mark.skipif(not GOLDEN.is_dir(), reason=f"needs the checkpoints of {GOLDEN}")
@pytest.mark.parametrize(
    "family",
    ["gemma3", "smolvlm", "qwen2_5_vl", "qwen3_vl", "qwen3_5", "qwen3_next", "lfm2_vl", "kquants"],
)
def test_the_converters_own_files(family: str) -> None:
    fields = gguf.GGUFReader(GOLDEN / family / "text-BF16.gguf").fields
    keys = {
        name: field.contents() for name, field in fields.items() if name.startswith("tokenizer.")
    }
    keys["tokenizer.ggml.pre"] = "gpt-2"  # whatever the file says, its tokenizer cuts as GPT-2 does
    built, folder = Tokenizer.from_gguf(keys, family), Tokenizer.from_folder(GOLDEN / family / "hf")
    agree(
        built,
        tokenizers.Tokenizer.from_file(str(GOLDEN / family / "hf" / "tokenizer.json")),
        TEXTS + fuzzed(300, seed=1),
    )
    for name in ("eos_token", "pad_token"):
        assert built.special[name] == folder.special[name]
    assert built.special["eos_token"] in built.ends
    assert built.special_strings >= folder.special_strings and built.prefix == folder.prefix == ()
    assert [built.seal(text) for text in TEXTS] == [folder.seal(text) for text in TEXTS]


def with_flags(**flags: Any) -> dict[str, Any]:
    inner = original("gpt-2")
    ids = {"bos_token_id": inner.token_to_id("<bos>"), "eos_token_id": inner.token_to_id("<eos>")}
    return metadata(inner, "gpt2", flags.pop("pre", "gpt-2"), **ids, **flags)


@pytest.mark.parametrize(
    ("flags", "around"),
    [
        ({}, "ab"),
        ({"add_bos_token": True}, "<bos>ab"),
        ({"add_bos_token": True, "add_eos_token": True}, "<bos>ab<eos>"),
        ({"add_eos_token": True}, "ab<eos>"),
        ({"pre": "llama-bpe"}, "<bos>ab"),
        ({"pre": "llama-bpe", "add_bos_token": False}, "ab"),
    ],
)
def test_what_goes_around_a_prompt(flags: dict[str, Any], around: str) -> None:
    built = Tokenizer.from_gguf(with_flags(**flags), "m.gguf")
    assert built.encode_prompt("ab") == built.encode(around)
    assert (
        built.decode([*built.prefix, *built.encode("ab"), *built.suffix], skip_special=False)
        == around
    )
    assert built.encode_prompt("<bos>ab") == built.encode("<bos>ab")


BOS_AND_EOS = processors.TemplateProcessing(
    "<bos> $A <eos>", special_tokens=[("<bos>", 700), ("<eos>", 701)]
)


@pytest.mark.parametrize("add_bos_token", [True, False, None])
@pytest.mark.parametrize(
    "post_processor",
    [
        None,
        BOS_AND_EOS,
        processors.Sequence([processors.ByteLevel(trim_offsets=False), BOS_AND_EOS]),
    ],
)
def test_a_folders_prefix_is_that_of_transformers(
    post_processor: Any, add_bos_token: bool | None, tmp_path: Path
) -> None:
    inner = tokenizers.Tokenizer.from_str(original("gpt-2").to_str())
    if post_processor is not None:
        inner.post_processor = post_processor
    inner.save(str(tmp_path / "tokenizer.json"))
    config = {
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    config |= {} if add_bos_token is None else {"add_bos_token": add_bos_token}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    reference, built = (
        PreTrainedTokenizerFast.from_pretrained(tmp_path),
        Tokenizer.from_folder(tmp_path),
    )
    assert built.encode_prompt("hello <image>") == reference("hello <image>").input_ids
    assert (
        built.encode_prompt("<bos>hello")
        == reference("<bos>hello", add_special_tokens=False).input_ids
    )


def test_a_sealed_prompt_stays_sealed() -> None:
    built = Tokenizer.from_gguf(with_flags(add_bos_token=True), "m.gguf", reserved=["<image>"])
    sealed = built.seal("<bos>x<eos><image>")
    ids = built.encode_prompt(sealed)
    assert ids[0] == built.id("<bos>") and SEAL in sealed
    assert not {built.id(text) for text in ("<bos>", "<eos>", "<image>")} & set(ids[1:])
    assert built.decode(ids) == "<bos>x<eos><image>"


BREAKS: list[tuple[str, Any, str]] = [
    ("model", None, "nothing"),
    ("model", "bert", "'bert'; expected one that is read: gemma4, gpt2, llama"),
    ("model", 3, "3"),
    ("model", "t5", "'t5'; expected one that is read"),
    ("model", "rwkv", "'rwkv'; expected one that is read"),
    ("pre", "brand-new", "'brand-new'; expected a pre-tokenizer that is known: bloom, chatglm-bpe"),
    ("tokens", None, "nothing"),
    ("tokens", [], "0 tokens"),
    ("tokens", ["a", 1], "a list of texts"),
    ("tokens", "ab", "a list of texts"),
    ("tokens", ["x" * 3000], "the longest of 3000 characters"),
    ("token_type", [1], "1 entries; expected one for each of the 704"),
    ("token_type", [9] * 704, "the type 9"),
    ("tokens", [f"{i}" for i in range(2 + (1 << 19))], "524290 entries; expected at most 524288"),
    ("token_type", [-1] * 704, "the type -1"),
    ("token_type", [1.0] * 704, "a list of int"),
    ("token_type", 3, "a list of int"),
    ("merges", None, "nothing"),
    ("merges", ["ab"], "'ab'; expected two tokens"),
    ("merges", ["a zzzz"], "'a zzzz'"),
    ("merges", [3], "a list of texts"),
    ("bos_token_id", 704, "704; expected a token id"),
    ("eos_token_id", -1, "-1"),
    ("unknown_token_id", 1.5, "1.5"),
    ("padding_token_id", True, "True"),
    ("add_bos_token", 1, "true or false"),
    ("add_eos_token", "yes", "'yes'"),
]


@pytest.mark.parametrize(("key", "value", "message"), BREAKS)
def test_a_broken_file_names_the_key(key: str, value: Any, message: str) -> None:
    keys = {**metadata(original("gpt-2"), "gpt2", "gpt-2"), f"tokenizer.ggml.{key}": value}
    with pytest.raises(ModelError, match=re.escape(message)) as caught:
        Tokenizer.from_gguf(keys, "bad.gguf")
    assert str(caught.value).startswith(f"bad.gguf: tokenizer.ggml.{key} has ") and "\n" not in str(
        caught.value
    )


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"scores": None}, "scores has nothing"),
        ({"scores": [0.0]}, "1 entries"),
        ({"scores": [float("nan")] * 4}, "not finite"),
        ({"scores": [True] * 4}, "a list of float"),
        ({"add_space_prefix": 0}, "add_space_prefix has 0"),
        ({"tokens": ["<unk>", "a", "b", "\ud800"]}, "make no tokenizer"),
        (
            {"bos_token_id": None, "add_bos_token": True},
            "bos_token_id has nothing; expected an id, since bos is to be added",
        ),
    ],
)
def test_a_broken_file_of_scores(more: dict[str, Any], message: str) -> None:
    keys = {
        "model": "llama",
        "tokens": ["<unk>", "<s>", "a", "b"],
        "scores": [0.0] * 4,
        "token_type": [2, 3, 1, 1],
        "bos_token_id": 1,
    }
    with pytest.raises(ModelError, match=re.escape(message)):
        Tokenizer.from_gguf(
            {f"tokenizer.ggml.{key}": value for key, value in {**keys, **more}.items()}, "bad.gguf"
        )


def test_a_file_cannot_have_special_tokens_without_end() -> None:
    keys = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": [f"{i}" for i in range(70_000)],
        "token_type": [3] * 70_000,
        "merges": [],
    }
    with pytest.raises(
        ModelError, match="70000 control and user-defined tokens; expected at most 65536"
    ):
        Tokenizer.from_gguf(
            {f"tokenizer.ggml.{key}": value for key, value in keys.items()}, "bad.gguf"
        )


def test_scores_cannot_make_merges_without_end() -> None:
    runs = ["a" * n for n in range(1, 900)]
    keys = {"model": "llama", "tokens": runs, "scores": [0.0] * len(runs)}
    with pytest.raises(ModelError, match="403651 merges"):
        Tokenizer.from_gguf(
            {f"tokenizer.ggml.{key}": value for key, value in keys.items()}, "bad.gguf"
        )


def test_mutated_metadata_gives_a_tokenizer_or_a_model_error() -> None:
    draw = random.Random(4)
    junk: list[Any] = [
        None,
        -1,
        0,
        1 << 40,
        2.5,
        True,
        "",
        "x",
        "llama",
        "gpt2",
        "gemma4",
        "\ud800",
        b"a",
        [],
        [None],
        ["a", "a"],
        [1, 2],
        {},
        [[]],
    ]
    sources = [metadata(original("gpt-2"), "gpt2", "gpt-2"), scored(sentencepiece_model(True))]
    refused = 0
    for _ in range(400):
        keys = dict(draw.choice(sources))
        for name in draw.sample(sorted(keys), 2):
            value = keys[name]
            if isinstance(value, list) and draw.random() < 0.6:
                keys[name] = (
                    [*value[:-1], draw.choice(junk)]
                    if draw.random() < 0.5
                    else value[: draw.randrange(len(value))]
                )
            else:
                keys[name] = draw.choice(junk)
        try:
            built = Tokenizer.from_gguf(keys, "m.gguf")
            built.decode(built.encode_prompt("Hello 日本\n"))
        except ModelError as error:
            refused += 1
            assert "\n" not in str(error)
    assert 200 < refused < 400
