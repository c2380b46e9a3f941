"""A sentencepiece model with fairseq's special tokens: ids of transformers' XLM-RoBERTa."""

from __future__ import annotations

import io
import json
import warnings
from pathlib import Path

import pytest
from small_tokenizers import TEXTS
from tokenizer_samples import CORPUS

from mtmd.base.errors import ModelError
from mtmd.llm.tokenizer.tokenizer import FAIRSEQ_PIECES, Tokenizer

CONFIG = "tokenizer_config.json"
NAMES = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import sentencepiece

    out, result = io.BytesIO(), tmp_path_factory.mktemp("pieces")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of SWIG's types
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter([*CORPUS, "a line of print, naïve café"] * 3),
            model_writer=out,
            vocab_size=260,
            hard_vocab_limit=False,
            minloglevel=2,
        )
    (result / FAIRSEQ_PIECES).write_bytes(out.getvalue())
    config = {"tokenizer_class": "XLMRobertaTokenizer", **NAMES}
    (result / CONFIG).write_text(json.dumps(config))
    return result


def test_ids_and_text_are_those_of_transformers(folder: Path) -> None:
    from transformers import XLMRobertaTokenizer

    ours, theirs = Tokenizer.from_folder(folder), XLMRobertaTokenizer.from_pretrained(folder)
    assert [ours.id(token) for token in ("<s>", "<pad>", "</s>", "<unk>")] == [0, 1, 2, 3]
    assert len(ours) == len(theirs) and ours.id("<mask>") == theirs.mask_token_id
    for text in [*CORPUS, *(text for text in TEXTS if text.strip()), "a line  of print"]:
        ids = theirs(text, add_special_tokens=False)["input_ids"]
        assert ours.encode(text) == ids, text
        assert ours.decode([0, *ids, 2]) == theirs.decode(ids, skip_special_tokens=True)


def test_wrong_files_are_refused(folder: Path, tmp_path: Path) -> None:
    data, config = ((folder / name).read_bytes() for name in (FAIRSEQ_PIECES, CONFIG))
    other = json.dumps({"tokenizer_class": "CamembertTokenizer"}).encode()
    for pieces, stated, reported in (
        (data[:-7], config, r"sentencepiece\.bpe\.model is no sentencepiece model"),
        (b"", config, r"sentencepiece\.bpe\.model has 0 pieces"),
        (data, other, "tokenizer_class is 'CamembertTokenizer', expected one of XLMRoberta"),
    ):
        (tmp_path / FAIRSEQ_PIECES).write_bytes(pieces)
        (tmp_path / CONFIG).write_bytes(stated)
        with pytest.raises(ModelError, match=reported):
            Tokenizer.from_folder(tmp_path)
