"""A dual encoder whose tokenizer is a sentencepiece model alone: ids are those of transformers."""

from __future__ import annotations

import io
import json
import random
import warnings

import numpy as np
import pytest
import torch
from dual_encoders import CONTEXT, CORPUS, siglip

from mtmd import ModelError
from mtmd.embedding.dual_checkpoint import open_dual
from mtmd.embedding.embedder import load_embedder
from mtmd.llm.tokenizer.sentencepiece_file import build

ODD = [
    "é",
    "é",
    "ﬁ",
    "Ａ",
    "①",
    "㍿",
    "…",
    "\u200b",
    "\xa0",
    "\u3000",
    "日本",
    "🙂",
    "👨\u200d👩\u200d👧",
    "ß",
    "İ",
    "ǆ",
    "ﷺ",
    "각",
    "가",
    "́",
    "\ufeff",
    "ｶﾞ",
    "½",
    "™",
    "\t",
    "\n",
    "\x00",
    "\x07",
    "नमस्ते",
    "ก็",
    "\u200d",
    "\xad",
    "▁",
    "🇩🇪",
    "\ue000",
    "Å",
    "Å",
    "!",
    "?!",
    "a.b",
    ",",
    "'",
]


def pieces(rule="nmt_nfkc", **more):
    import sentencepiece

    out = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of SWIG's types
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter([*CORPUS, "ﬁne … naïve café"] * 3),
            model_writer=out,
            normalization_rule_name=rule,
            **{
                "vocab_size": 200,
                "hard_vocab_limit": False,
                "pad_id": 0,
                "eos_id": 1,
                "unk_id": 2,
                "bos_id": -1,
            }
            | {"character_coverage": 0.98, "minloglevel": 2, "model_type": "unigram"}
            | more,
        )
    return out.getvalue()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pieces")
    siglip(folder)
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").unlink()
    (folder / "spiece.model").write_bytes(pieces())
    return folder


def theirs(folder, monkeypatch):
    from transformers.models.siglip import tokenization_siglip

    # protobuf is asked for, and used for other models only
    monkeypatch.setattr(tokenization_siglip, "requires_backends", lambda *_: None)
    made = tokenization_siglip.SiglipTokenizer(str(folder / "spiece.model"))
    return lambda text: made(text, truncation=True, max_length=CONTEXT)["input_ids"]


def texts(count):
    rng = random.Random(0)
    words = [word for line in CORPUS for word in line.split()]
    for _ in range(count):
        odd = rng.choice((0, 0.3, 1))
        chosen = [
            rng.choice(ODD if rng.random() < odd else words) for _ in range(rng.randint(0, 9))
        ]
        yield rng.choice((" ", "")).join(chosen) if odd else " ".join(chosen)


@pytest.mark.filterwarnings("ignore:builtin type:DeprecationWarning")
@pytest.mark.parametrize("rule", ["nmt_nfkc", "nmt_nfkc_cf", "identity"])
def test_two_thousand_texts_have_the_ids_of_transformers(folder, rule, monkeypatch):
    (folder / "spiece.model").write_bytes(pieces(rule))
    ids, checkpoint = theirs(folder, monkeypatch), open_dual(folder)
    different = [t for t in texts(2000) if checkpoint.tokens(t)[0] != ids(t)]
    assert different == []


@pytest.mark.filterwarnings("ignore:builtin type:DeprecationWarning")
def test_vectors_are_those_of_transformers(folder, monkeypatch):
    from transformers import SiglipModel

    (folder / "spiece.model").write_bytes(pieces())
    ids, model = theirs(folder, monkeypatch), SiglipModel.from_pretrained(folder)
    requested = ["A photo of TWO dogs; a red circle!", "ﬁne", "the quick brown fox " * 9]
    padded = [(ids(text) + [0] * CONTEXT)[:CONTEXT] for text in requested]
    with torch.no_grad():
        expected = model.get_text_features(input_ids=torch.tensor(padded)).pooler_output.numpy()
    actual = load_embedder(folder, dtype="fp32").embed(texts=requested, normalize=False)
    assert np.square(actual - expected).sum() <= 1e-9 * np.square(expected).sum()


def test_a_text_cannot_spell_its_own_end(folder):
    checkpoint = open_dual(folder)
    assert 1 not in checkpoint.tokens("a</s>b ＜/s＞")[0][:-1]


def test_a_tokenizer_json_beside_it_goes_first(folder, tmp_path):
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "tokenizer.json").write_text(json.dumps({"no": "tokenizer"}))
    with pytest.raises(ModelError, match=r"tokenizer\.json is not a tokenizer file"):
        open_dual(tmp_path)


def test_files_that_are_broken_or_of_another_kind_are_refused():
    whole = pieces()
    with pytest.raises(ModelError, match="of the kind bpe, expected unigram"):
        build(pieces(model_type="bpe", vocab_size=70, hard_vocab_limit=True), "spiece.model")
    for data in (b"no model", b"\x0a\xff\xff\xff\x7f", b"\x0a" * 9, b"\xff" * 20, b"\x0b\x01"):
        with pytest.raises(ModelError, match=r"spiece\.model is no sentencepiece model"):
            build(data, "spiece.model")
    with pytest.raises(ModelError, match="has 0 pieces"):
        build(b"", "spiece.model")
    rng = random.Random(1)
    for _ in range(300):  # cut, or a few bytes changed: read or refused, never a crash
        data = bytearray(whole[: rng.choice((len(whole), rng.randrange(len(whole))))])
        for _ in range(rng.choice((0, 1, 4))):
            data[rng.randrange(len(data))] = rng.randrange(256)
        try:
            inner = build(bytes(data), "spiece.model")
        except ModelError:
            continue
        inner.encode("a photo of ﬁ日本")
