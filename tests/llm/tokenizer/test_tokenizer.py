"""The tokenizer against the tokenizers library and transformers, on small tokenizers built here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers
from small_tokenizers import KINDS, NAMES, TEXTS, byte_level
from tokenizers import AddedToken

from mtmd.base.errors import ModelError, PromptError
from mtmd.llm.tokenizer.tokenizer import Tokenizer


def save(folder: Path, inner: tokenizers.Tokenizer, config: object = NAMES) -> Path:
    inner.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_same_ids_and_text_as_transformers(kind: str, tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    folder = save(tmp_path, KINDS[kind]())
    ours, reference = Tokenizer.from_folder(folder), PreTrainedTokenizerFast.from_pretrained(folder)
    prompt = "<bos><start_of_turn>user\nWhat is <start_of_image> the?<end_of_turn>\n"
    for text in [*TEXTS, prompt]:
        ids = reference(text, add_special_tokens=False)["input_ids"]
        assert ours.encode(text) == ids
        assert ours.decode(ids) == reference.decode(
            ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        assert ours.decode(ids, skip_special=False) == reference.decode(
            ids, clean_up_tokenization_spaces=False
        )
    assert ours.encode(prompt)[:2] == [2, 4] and ours.special["eos_token"] == 1
    assert ours.special_text == NAMES


def test_settings_of_training_do_not_cut_or_pad() -> None:
    inner = byte_level()
    inner.enable_truncation(3)
    inner.enable_padding(length=50)
    tokenizer = Tokenizer(inner, {})
    assert tokenizer.decode(tokenizer.encode("The quick brown fox")) == "The quick brown fox"


def test_half_a_surrogate_pair_is_refused(tokenizer: Tokenizer) -> None:
    for call in (tokenizer.encode, tokenizer.seal):
        with pytest.raises(PromptError, match="surrogate"):
            call("a\ud83db")


def test_named_tokens_that_are_not_flagged_are_special_too(tmp_path: Path) -> None:
    inner = byte_level()
    inner.add_tokens([AddedToken("<image>", special=False), AddedToken("<row_1>", special=False)])
    config = {
        "eos_token": {"content": "<end_of_turn>", "special": True},
        "add_bos_token": True,
        "sep_token": None,
        "cls_token": "<absent>",
        "extra_special_tokens": {"image_token": "<image>"},
    }
    tokenizer = Tokenizer.from_folder(save(tmp_path, inner, config), reserved=["<row_1>"])
    assert tokenizer.special == {"eos_token": 5, "image_token": tokenizer.id("<image>")}
    assert {"<image>", "<row_1>", "<bos>"} <= tokenizer.special_strings
    assert "<table>" not in tokenizer.special_strings
    ids = tokenizer.encode(tokenizer.seal("<image><row_1>"))
    assert not {tokenizer.id("<image>"), tokenizer.id("<row_1>")} & set(ids)


def test_an_end_that_is_not_flagged_is_no_text_of_users(tmp_path: Path) -> None:
    """generation_config.json names it; in tokenizer.json it is added text like any other, which is
    one token for transformers as well, and shows.
    """
    from transformers import PreTrainedTokenizerFast

    inner = byte_level()
    inner.add_tokens([AddedToken("<end>", special=False)])
    folder, end = save(tmp_path, inner), inner.token_to_id("<end>")
    ours = Tokenizer.from_folder(folder, ends=[end])
    reference = PreTrainedTokenizerFast.from_pretrained(folder)
    ids = reference("The<end>x", add_special_tokens=False)["input_ids"]
    assert ours.encode("The<end>x") == ids and end in ids
    assert ours.decode(ids) == reference.decode(ids, skip_special_tokens=True) == "The<end>x"
    assert end not in ours.encode(ours.seal("The<end>x")) and ours.ends == {end}


def test_an_end_that_is_a_line_break_may_be_written(tmp_path: Path) -> None:
    """As BLIP-2's with OPT."""
    inner = byte_level()
    end = inner.token_to_id("Ċ")
    ours = Tokenizer.from_folder(save(tmp_path, inner), ends=[end])
    assert ours.encode(ours.seal("a\nb")) == inner.encode("a\nb", add_special_tokens=False).ids
    assert end in ours.encode("a\nb") and ours.ends == {end}


def test_a_picture_place_that_is_no_token_is_sealed_too(tmp_path: Path) -> None:
    """The template's pictures are found by its text; what a user writes is not one of them."""
    config = {"additional_special_tokens": ["<gone>"]}
    tokenizer = Tokenizer.from_folder(save(tmp_path, byte_level(), config), reserved=["<image>"])
    assert "<image>" not in tokenizer.special_strings
    for texts in (["a <image> b"], ["a <ima", "ge> b"]):
        rendered = "".join(map(tokenizer.seal, texts))
        assert "<image>" not in rendered
        assert tokenizer.decode(tokenizer.encode(rendered)) == "a <image> b"
    assert tokenizer.seal("a <gone> b") == "a <gone> b"


def test_tokens_listed_in_the_configuration_only(tmp_path: Path) -> None:
    size = byte_level().get_vocab_size()
    entry = {
        "content": "<late>",
        "special": True,
        "normalized": False,
        "lstrip": False,
        "rstrip": False,
        "single_word": False,
    }
    tokenizer = Tokenizer.from_folder(
        save(tmp_path, byte_level(), {"added_tokens_decoder": {str(size): entry}})
    )
    assert (
        tokenizer.encode("a<late>")[1:] == [size]
        and len(tokenizer) == size + 1
        and "<late>" in tokenizer.special_strings
    )
    with pytest.raises(ModelError, match=r"tokenizer_config.json gives '<late>' the id 9999"):
        Tokenizer.from_folder(
            save(tmp_path, byte_level(), {"added_tokens_decoder": {"9999": entry}})
        )


def test_special_tokens_map_is_read_and_the_configuration_wins(tmp_path: Path) -> None:
    folder = save(tmp_path, byte_level(), {"eos_token": "<eos>"})
    (folder / "special_tokens_map.json").write_text(
        json.dumps({"eos_token": "<pad>", "bos_token": "<bos>"})
    )
    assert Tokenizer.from_folder(folder).special_text == {
        "eos_token": "<eos>",
        "bos_token": "<bos>",
    }


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("tokenizer.json", None),
        ("tokenizer.json", "{"),
        ("tokenizer.json", "{}"),
        ("tokenizer.json", "[" * 100_000),
        ("tokenizer.json", "\x00\xff"),
        (
            "tokenizer.json",
            '{"version":"1.0","model":{"type":"BPE","vocab":{},"merges":[["a","b"]]}}',
        ),
        ("tokenizer_config.json", "{"),
        ("tokenizer_config.json", "[1]"),
        ("tokenizer_config.json", '{"eos_token": 5}'),
        ("tokenizer_config.json", "[" * 100_000),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"x": 1}}'),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"1": {}}}'),
        ("special_tokens_map.json", "nonsense"),
    ],
)
def test_broken_files_are_named(file: str, content: str | None, tmp_path: Path) -> None:
    folder = save(tmp_path, byte_level())
    (folder / file).unlink(missing_ok=True)
    if content is not None:
        (folder / file).write_text(content)
    with pytest.raises(ModelError, match=file.replace(".", r"\.")) as caught:
        Tokenizer.from_folder(folder)
    assert "\n" not in str(caught.value)


def test_a_file_too_large_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save(tmp_path, byte_level())
    monkeypatch.setattr("mtmd.llm.tokenizer.tokenizer.TOKENIZER_BYTES_MAX", 1000)
    with pytest.raises(ModelError, match="larger than"):
        Tokenizer.from_folder(folder)


def test_an_unknown_token_names_itself(tokenizer: Tokenizer) -> None:
    assert tokenizer.id("<bos>") == 2
    with pytest.raises(ModelError, match="'<nothing>'"):
        tokenizer.id("<nothing>")
