"""A GGUF and its projector by the command line: the same answer as from the folder, and what is
wrong with a pair told in one line.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import checkpoints as make
import gemma3_gguf
import numpy as np
import pytest
import tokenizers
from gemma3_gguf import LAYERS, PROJECTOR, TEXT

from mtmd import load
from mtmd.checkpoint.ollama_layout import NOTE
from mtmd.checkpoint.open import open_checkpoint
from mtmd.kernels.checkpoint.gguf_header import Metadata

SHAPE = {"num_hidden_layers": 6, "layer_types": LAYERS}
WIDE = {**SHAPE, "hidden_size": 256, "intermediate_size": 256}
FEW = ("--ignore-eos", "--max-tokens", 8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint folder of which every picture takes 4 tokens."""
    path = tmp_path_factory.mktemp("checkpoint") / "hf"
    make.gemma3(path, text=SHAPE)
    return path


@pytest.fixture(scope="module")
def made(folder: Path) -> tuple[Path, Path]:
    return gemma3_gguf.write(folder, folder.parent / "gguf")


@pytest.fixture
def pair(made: tuple[Path, Path], tmp_path: Path) -> tuple[Path, Path]:
    """A decoder and its projector, in folders of their own: (model, mmproj)."""
    for path, location in zip(made, ("text", "sees"), strict=True):
        (tmp_path / location).mkdir()
        shutil.copy(path, tmp_path / location)
    return tmp_path / "text" / TEXT, tmp_path / "sees" / PROJECTOR


@pytest.fixture(scope="module")
def picture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from PIL import Image

    path = tmp_path_factory.mktemp("pictures") / "a.png"
    Image.fromarray(make.picture(3, 83, 41)).save(path)
    return path


def answer(mtmd: Any, *arguments: object) -> dict[str, Any]:
    """What `describe --json` prints, without what differs between two runs of the same."""
    ran = mtmd("describe", *arguments, *FEW, "--json")
    assert (ran.code, ran.err) == (0, ""), ran
    values: dict[str, Any] = json.loads(ran.out)
    values["receipt"] = {
        key: value
        for key, value in values["receipt"].items()
        if key not in ("model", "kernels_compiled") and not key.endswith("_ms")
    }
    return values


def test_the_same_answer_as_from_the_folder(
    pair: tuple[Path, Path], folder: Path, picture: Path, mtmd: Any
) -> None:
    text, projector = pair
    from_folder = answer(mtmd, picture, picture, "-m", folder)
    assert (
        len(from_folder["output_token_ids"]) == 8 and len(set(from_folder["output_token_ids"])) > 2
    )
    assert from_folder["receipt"]["image_tokens"] == 8 and from_folder["receipt"]["images"][0][
        "processed_size"
    ] == [56, 56]
    assert answer(mtmd, picture, picture, "-m", text, "--mmproj", projector) == from_folder
    assert (
        answer(mtmd, picture, picture, "-m", text, "--mmproj", projector, "--dtype", "bf16")
        != from_folder
    )


def test_a_file_that_holds_both(folder: Path, picture: Path, mtmd: Any, tmp_path: Path) -> None:
    """Its encoder with llama.cpp's names and keys, as that would read it from a file of its own."""
    text, projector = gemma3_gguf.write(folder, tmp_path / "one", one_file=True)
    given = answer(mtmd, picture, "-m", text, "--mmproj", projector)
    projector.unlink()
    assert answer(mtmd, picture, "-m", text) == given == answer(mtmd, picture, "-m", folder)


def test_a_projector_that_hears_as_well(
    folder: Path, picture: Path, mtmd: Any, tmp_path: Path
) -> None:
    """In a family that is not read: its weights are passed over, and the receipt says so."""

    def hear(keys: dict[str, Any], tensors: dict[str, np.ndarray]) -> None:
        keys |= {"clip.has_audio_encoder": True, "clip.audio.projector_type": "other"}
        keys["clip.vision.projector_type"] = keys.pop("clip.projector_type")
        for name in ("a.conv1d.1.weight", "a.blk.0.attn_q.weight", "mm.a.fc.weight"):
            tensors[name] = np.ones((8, 8), np.float32)

    text, _ = gemma3_gguf.write(folder, tmp_path / "hears", projector=hear)
    ours, theirs = answer(mtmd, picture, "-m", text), answer(mtmd, picture, "-m", folder)
    (note,) = ours["receipt"].pop("model_notes")
    assert "takes no audio" in note and theirs["receipt"].pop("model_notes") == []
    assert ours == theirs


def test_an_encoder_as_ollama_lays_it_out_answers(
    folder: Path, picture: Path, mtmd: Any, tmp_path: Path
) -> None:
    """With what its keys do not say as in published models, and says so."""

    def lay_out(keys: dict[str, Any], tensors: dict[str, np.ndarray]) -> None:
        for key in list(keys):
            value = keys.pop(key)
            if key.startswith("clip.vision."):
                keys[key.replace("clip.", "gemma3.", 1)] = value
        tensors["v.patch_embedding.weight"] = tensors.pop("v.patch_embd.weight")

    text, _ = gemma3_gguf.write(folder, tmp_path / "blob", projector=lay_out, one_file=True)
    separate, _ = gemma3_gguf.write(folder, tmp_path / "apart")
    ours, theirs = (answer(mtmd, picture, "-m", path) for path in (text, separate))
    assert ours["text"] == theirs["text"]
    assert NOTE in " ".join(mtmd("info", text).out.split())


EXTRA = ("altup_proj.weight", "attn_sinks.weight", "vocab_extra")


@pytest.mark.parametrize("name", [*EXTRA, "mm.0.weight", "a.conv1d.1.weight"])
def test_a_tensor_of_neither_half_is_refused(
    name: str, folder: Path, picture: Path, mtmd: Any, tmp_path: Path
) -> None:
    """Names that begin as those of an encoder do, or that lie where there is no encoder."""

    def add(_: dict[str, Any], tensors: dict[str, np.ndarray]) -> None:
        tensors[name] = np.ones((8, 8), np.float32)

    text, projector = gemma3_gguf.write(folder, tmp_path / "extra", decoder=add)
    line = mtmd("describe", picture, "-m", text, "--mmproj", projector).refused()
    assert name in line, line


@pytest.mark.parametrize("name", EXTRA)
def test_a_tensor_of_neither_half_is_refused_in_a_file_of_both(
    name: str, folder: Path, picture: Path, mtmd: Any, tmp_path: Path
) -> None:
    def add(_: dict[str, Any], tensors: dict[str, np.ndarray]) -> None:
        tensors[name] = np.ones((8, 8), np.float32)

    text, _ = gemma3_gguf.write(folder, tmp_path / "both", decoder=add, one_file=True)
    line = mtmd("describe", picture, "-m", text).refused()
    assert name in line, line


def test_every_node_has_the_values_of_the_folder(
    pair: tuple[Path, Path], folder: Path, picture: Path, mtmd: Any
) -> None:
    text, projector = pair
    ran = mtmd(
        "compare",
        folder,
        text,
        "--mmproj-b",
        projector,
        "--image",
        picture,
        "--dtype",
        "fp32",
        "--tolerance",
        1e-12,
        "--json",
    )
    result = json.loads(ran.out)
    assert (ran.code, result["differences"], result["agreed"]) == (0, [], 16) and result[
        "compared"
    ] > 150
    assert result["only_a"]["count"] == result["only_b"]["count"] == 0


def test_a_projector_beside_it_is_found(
    made: tuple[Path, Path], folder: Path, picture: Path, mtmd: Any
) -> None:
    text, _ = made
    assert answer(mtmd, picture, "-m", text) == answer(mtmd, picture, "-m", folder)
    assert answer(mtmd, picture, "-m", text.parent) == answer(mtmd, picture, "-m", folder), (
        "a folder of one model"
    )


def test_several_projectors_beside_it(
    pair: tuple[Path, Path], folder: Path, picture: Path, mtmd: Any
) -> None:
    text, projector = pair
    for name in ("mmproj-F32.gguf", "model-mmproj-BF16.gguf"):
        shutil.copy(projector, text.with_name(name))
    line = mtmd("describe", picture, "-m", text).refused()
    assert (
        "was given 1 image; there are several projectors in its folder (mmproj-F32.gguf, "
        "model-mmproj-BF16.gguf)" in line
    )
    assert line.endswith("choose one with mmproj= (--mmproj)")
    expected = answer(mtmd, picture, "-m", folder)
    chosen = text.with_name("mmproj-F32.gguf")
    assert answer(mtmd, picture, "-m", text, "--mmproj", chosen) == expected
    chosen.rename(text.with_name(f"mmproj-{text.name}"))
    assert answer(mtmd, picture, "-m", text) == expected, "as mtmd convert names it"


def test_without_a_projector_text_is_answered(
    pair: tuple[Path, Path], folder: Path, picture: Path, mtmd: Any
) -> None:
    text, _ = pair
    line = mtmd("describe", picture, "-m", text).refused()
    assert (
        "text.gguf has no image encoder and was given 1 image; it reads text only ('gemma3'). If it "
        "is the text half of a vision model, fetch the mmproj-*.gguf of the same model" in line
    )
    result = [
        list(
            load(m, device="cpu").stream(
                [{"role": "user", "content": "hello"}], max_tokens=6, ignore_eos=True
            )
        )[-1]
        for m in (text, folder)
    ]
    tokens = [f.answer.output_token_ids for f in result]  # type: ignore[union-attr]
    assert tokens[0] == tokens[1] and len(tokens[0]) == 6
    dumped = mtmd("dump", "-m", text, "-p", "hello", "--filter", "^logits$")
    assert dumped.code == 0 and dumped.out.startswith("decoder  logits")


def test_files_that_are_something_else(
    pair: tuple[Path, Path], folder: Path, picture: Path, mtmd: Any, tmp_path: Path
) -> None:
    text, projector = pair

    def refused(*arguments: object) -> str:
        line: str = mtmd("describe", picture, *arguments).refused()
        return line

    assert (
        "mmproj.gguf is a projector, which has no decoder; give the decoder's GGUF as the "
        "model" in refused("-m", projector)
    )
    assert "text.gguf is a GGUF of architecture 'gemma3', expected a projector" in refused(
        "-m", text, "--mmproj", text
    )
    assert "is a checkpoint folder, which has its own" in refused(
        "-m", folder, "--mmproj", projector
    )
    assert "none.gguf: found no such file" in refused(
        "-m", text, "--mmproj", tmp_path / "none.gguf"
    )
    (tmp_path / "word.gguf").write_text("hello")
    assert "word.gguf" in refused("-m", text, "--mmproj", tmp_path / "word.gguf")
    (tmp_path / "pointer.gguf").write_text("version https://git-lfs.github.com/spec/v1\noid")
    assert "pointer.gguf is a Git LFS pointer; expected a GGUF file; fetch the file" in refused(
        "-m", text, "--mmproj", tmp_path / "pointer.gguf"
    )
    assert (
        "word.gguf': found another file, expected a GGUF file, the folder of a checkpoint"
        in refused("-m", tmp_path / "word.gguf")
    )


def test_a_projector_of_another_model(
    pair: tuple[Path, Path], folder: Path, picture: Path, mtmd: Any, tmp_path: Path
) -> None:
    def widen(keys: dict[str, Any], tensors: dict[str, np.ndarray]) -> None:
        keys["clip.vision.projection_dim"] = 80
        tensors["mm.input_projection.weight"] = np.zeros((144, 80), np.float32)

    _, other = gemma3_gguf.write(folder, tmp_path / "other", projector=widen)
    line = mtmd("describe", picture, "-m", pair[0], "--mmproj", other).refused()
    assert (
        "the projector gives 80 numbers per image token, the decoder reads 64; they belong to "
        "different models" in line
    )


def test_projectors_that_are_not_whole(
    pair: tuple[Path, Path], folder: Path, picture: Path, mtmd: Any, tmp_path: Path
) -> None:
    changes: dict[str, tuple[Any, str]] = {
        "of an unknown kind": (
            lambda keys, _: keys.update({"clip.projector_type": "nose"}),
            "projector type 'nose' is not supported",
        ),
        "of no kind": (
            lambda keys, _: keys.pop("clip.projector_type"),
            "clip.projector_type is None, expected the name of one",
        ),
        "with a tensor less": (
            lambda _, t: t.pop("v.blk.1.ln1.weight"),
            "mmproj.gguf: tensor v.blk.1.ln1.weight is missing",
        ),
        "with one more": (
            lambda _, t: t.update({"v.blk.9.ln1.weight": np.ones(3, np.float32)}),
            "tensor v.blk.9.ln1.weight is not part",
        ),
    }
    for name, (change, expected) in changes.items():
        _, other = gemma3_gguf.write(folder, tmp_path / name, projector=change)
        assert expected in mtmd("describe", picture, "-m", pair[0], "--mmproj", other).refused(), (
            name
        )


def test_a_folder_of_several_models(
    made: tuple[Path, Path], tmp_path: Path, picture: Path, mtmd: Any
) -> None:
    for name in ("a-Q4_0.gguf", "b-Q8_0.gguf"):
        shutil.copy(made[0], tmp_path / name)
    line = mtmd("describe", picture, "-m", tmp_path).refused()
    assert (
        "holds several GGUF models (a-Q4_0.gguf, b-Q8_0.gguf); expected one, or the file itself as "
        "the model" in line
    )


def test_a_chat_template_from_a_file(
    pair: tuple[Path, Path], folder: Path, picture: Path, mtmd: Any, tmp_path: Path
) -> None:
    def refused(template: Path) -> str:
        line: str = mtmd(
            "describe", picture, "-m", pair[0], "--mmproj", pair[1], "--chat-template", template
        ).refused()
        return line

    source = (folder / "chat_template.jinja").read_text()
    (tmp_path / "t.jinja").write_text(source.replace("model\\n", "model\\nA red"))
    for model in (("-m", folder), ("-m", pair[0], "--mmproj", pair[1])):
        plain, reported = (
            answer(mtmd, picture, *model, *more)["prompt_token_ids"]
            for more in ((), ("--chat-template", tmp_path / "t.jinja"))
        )
        assert reported[: len(plain)] == plain and len(reported) > len(plain)
    assert "none.jinja: found no such file" in refused(tmp_path / "none.jinja")
    (tmp_path / "broken.jinja").write_text("{% if %}")
    assert "broken.jinja is not a usable chat template" in refused(tmp_path / "broken.jinja")
    (tmp_path / "blind.jinja").write_text(
        "{{ messages[0].content | replace('<start_of_image>', '') }}"
    )
    assert (
        "the chat template wrote 0 picture places for 1 pictures; it does not fit this model"
        in refused(tmp_path / "blind.jinja")
    )


def test_a_gguf_without_a_chat_template(
    folder: Path, picture: Path, mtmd: Any, tmp_path: Path
) -> None:
    text, _ = gemma3_gguf.write(folder, tmp_path / "plain", template=False)
    line = mtmd("describe", picture, "-m", text).refused()
    assert (
        "text.gguf has no chat template (tokenizer.chat_template): its vocabulary was made for "
        "'gemma': --chat-template gemma" in line
    )
    assert "none; its vocabulary was made for 'gemma'" in mtmd("info", text).out
    assert answer(mtmd, picture, "-m", text, "--chat-template", "gemma")
    assert answer(
        mtmd, picture, "-m", text, "--chat-template", folder / "chat_template.jinja"
    ) == answer(mtmd, picture, "-m", folder)


def test_a_budget_of_image_tokens(made: tuple[Path, Path], picture: Path, mtmd: Any) -> None:
    """Every picture takes 4: what allows that changes nothing, what does not is refused with the
    numbers.
    """
    plain = answer(mtmd, picture, "-m", made[0])
    for allowed in (
        ("--image-min-tokens", 4),
        ("--image-max-tokens", 4),
        ("--image-min-tokens", 1, "--image-max-tokens", 64),
    ):
        assert answer(mtmd, picture, "-m", made[0], *allowed) == plain
    for minimum, maximum in ((5, None), (None, 3), (9, 12)):
        requested = [
            *(("--image-min-tokens", minimum) if minimum else ()),
            *(("--image-max-tokens", maximum) if maximum else ()),
        ]
        line = mtmd("describe", picture, "-m", made[0], *requested).refused()
        given = {"--image-min-tokens": minimum, "--image-max-tokens": maximum}
        reported = ", ".join(f"{name} {value}" for name, value in given.items() if value)
        assert f"{reported}: every picture takes 4 tokens with this model, expected a range" in line
        assert "None" not in line
    assert (
        "image_min_tokens is 9, image_max_tokens 3"
        in mtmd(
            "describe", picture, "-m", made[0], "--image-min-tokens", 9, "--image-max-tokens", 3
        ).refused()
    )
    assert (
        "--image-max-tokens: found 0"
        in mtmd("describe", picture, "-m", made[0], "--image-max-tokens", 0).refused()
    )


def test_detail(made: tuple[Path, Path], picture: Path, mtmd: Any) -> None:
    plain = answer(mtmd, picture, "-m", made[0])
    for detail in ("auto", "low", "high"):
        assert answer(mtmd, picture, "-m", made[0], "--detail", detail) == plain
    assert (
        "detail: found 'huge', expected one of auto, low, high"
        in mtmd("describe", picture, "-m", made[0], "--detail", "huge").refused()
    )


PROJECTION = "mm.input_projection.weight"  # which is turned when it is read
QUANTIZED = {f"blk.{layer}.ffn_gate.weight": "TQ2_0" for layer in range(6)}


def test_dequantized_tensors_are_told_prominently(picture: Path, mtmd: Any, tmp_path: Path) -> None:
    make.gemma3(tmp_path / "hf", text=WIDE)
    kinds = QUANTIZED | {PROJECTION: "Q8_0"}
    text, _ = gemma3_gguf.write(tmp_path / "hf", tmp_path / "gguf", kinds=kinds)
    ran = mtmd("warmup", "-m", text, "--no-run", "--json")
    (reported,) = json.loads(ran.out)["dequantized"]
    assert (reported["name"], reported["kind"]) == (PROJECTION, "Q8_0")
    rows = reported["stored_bytes"] // 34
    assert rows * 34 == reported["stored_bytes"] and reported["memory_bytes"] == rows * 32 * 4
    lines = mtmd("warmup", "-m", text, "--no-run", "--dtype", "bf16").out.splitlines()
    at = lines.index(
        "WARNING: 1 tensor is dequantized at load, as no kernel supports the stored form; memory "
        "use increases"
    )
    assert lines[at + 1].split()[:3] == ["1", "x", "Q8_0"] and lines[at + 1].endswith(PROJECTION)
    assert lines[at - 1] == lines[at + 2] == "*" * 100
    ran = mtmd("compare", tmp_path / "hf", text, "--image", picture, "--json")
    result = json.loads(ran.out)
    assert 0 < result["images"][0]["embedding_nmse"] < 1e-3
    assert result["logits"]["nmse"] > 1e-3 and result["b"]["types"] == {
        "encoder": ["F32", "Q8_0"],
        "decoder": ["F32", "TQ2_0"],
    }


def test_nothing_is_told_where_nothing_is_dequantized(made: tuple[Path, Path], mtmd: Any) -> None:
    ran = mtmd("warmup", "-m", made[0], "--no-run")
    assert ran.code == 0 and "dequantized" not in ran.out and "WARNING" not in ran.out
    assert json.loads(mtmd("warmup", "-m", made[0], "--no-run", "--json").out)["dequantized"] == []


def test_lists_are_read_no_more_often_than_they_are_needed(
    pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A vocabulary takes a tenth of a second each time."""
    read: list[str] = []
    get = Metadata.__getitem__

    def noted(metadata: Metadata, key: str) -> Any:
        value = get(metadata, key)
        read.extend([key] * isinstance(value, list))
        return value

    monkeypatch.setattr(Metadata, "__getitem__", noted)
    monkeypatch.setattr(tokenizers.Tokenizer, "get_vocab", None)  # as long as a vocabulary
    open_checkpoint(*pair)
    often = Counter(key for key in read if key.startswith("tokenizer."))
    assert often["tokenizer.ggml.tokens"] <= 2 and max(often.values()) <= 2, often
