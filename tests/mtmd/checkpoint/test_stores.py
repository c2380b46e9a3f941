"""Models in other programs' stores: found by the names those programs print, read in place, and
what is wrong with a store told in one line.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import checkpoints as make
import gemma3_gguf
import pytest

from mtmd import load
from mtmd.base.errors import ModelError
from mtmd.checkpoint import stores
from mtmd.checkpoint.cached_models import names_here, plan_removal
from mtmd.checkpoint.collection import read_sources
from mtmd.checkpoint.hub import Result, check_name, resolve_model

LAYER = "application/vnd.ollama.image."


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A decoder's GGUF and its projector's."""
    folder = tmp_path_factory.mktemp("made")
    layers = {"num_hidden_layers": 6, "layer_types": gemma3_gguf.LAYERS}
    make.gemma3(folder / "hf", text=layers)
    return gemma3_gguf.write(folder / "hf", folder / "gguf")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's home, without a store."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    monkeypatch.delenv("OLLAMA_MODELS", raising=False)
    return tmp_path


def pulled(store: Path, name: str, *layers: tuple[str, Path | bytes]) -> dict[str, Path]:
    """A model as `ollama pull` leaves it: HOST/NAMESPACE/MODEL/TAG; its blobs by type."""
    (store / "blobs").mkdir(parents=True, exist_ok=True)
    manifest, blobs = store / "manifests" / name, {}
    listed = []
    for kind, value in layers:
        data = value if isinstance(value, bytes) else value.read_bytes()
        digest = hashlib.sha256(data).hexdigest()
        blobs[kind] = store / "blobs" / f"sha256-{digest}"
        blobs[kind].write_bytes(data)
        entry = {"mediaType": LAYER + kind, "digest": f"sha256:{digest}", "size": len(data)}
        listed.append(entry)
    manifest.parent.mkdir(parents=True, exist_ok=True)
    manifest.write_text(json.dumps({"schemaVersion": 2, "layers": listed}))
    return blobs


def test_a_model_of_ollama_answers_in_place(home: Path, made: tuple[Path, Path]) -> None:
    store = home / ".ollama" / "models"
    blobs = pulled(
        store,
        "registry.ollama.ai/library/gemma3/4b",
        ("model", made[0]),
        ("projector", made[1]),
        ("template", b"{{ .Prompt }}"),
        ("license", b"free"),
    )
    pulled(store, "hf.co/org/repo/Q4_K_M", ("model", made[0]))
    pulled(store, "registry.ollama.ai/me/own/latest", ("model", made[0]))
    assert resolve_model("ollama:gemma3:4b") == Result(blobs["model"], blobs["projector"])
    assert check_name("ollama:me/own") and check_name("ollama:hf.co/org/repo:Q4_K_M")
    names = ["ollama:gemma3:4b", "ollama:hf.co/org/repo:Q4_K_M", "ollama:me/own:latest"]
    assert [model.name for model in stores.stored_models()] == names
    assert set(names) <= set(names_here())
    size = sum(blob.stat().st_size for blob in blobs.values())
    (source,) = read_sources(["ollama:gemma3:4b"])
    assert (source.bytes, source.kind, source.is_here) == (size, "GGUF", True)
    assert [source.name for source in read_sources(["ollama"])] == names
    with (
        load("ollama:gemma3:4b", dtype="fp32") as model,
        load(made[0], mmproj=made[1], dtype="fp32") as same,
    ):
        assert model.name == "ollama:gemma3:4b" and model.encoder is not None
        picture = make.picture(1, 40, 30)
        options: dict[str, Any] = {"max_tokens": 6, "ignore_eos": True}
        ours, theirs = (m.describe(picture, "What?", **options) for m in (model, same))
        assert ours == theirs


def test_defaults_of_ollama(home: Path, made: tuple[Path, Path], mtmd: Any) -> None:
    """Its system prompt begins conversations that have none, its parameters are the model's."""
    parameters = {
        "temperature": 0.7,
        "top_k": 64,
        "repeat_penalty": 1.1,
        "repeat_last_n": 64,
        "min_p": 7,
        "num_ctx": 4096,
        "num_gpu": 3,
        "num_predict": 128,
        "stop": ["<end_of_turn>", "User:"],
    }
    pulled(
        home / ".ollama" / "models",
        "registry.ollama.ai/library/told/latest",
        ("model", made[0]),
        ("system", b"You are a pirate.\n"),
        ("params", json.dumps(parameters).encode()),
    )
    turn = {"role": "user", "content": "Hello"}
    with load("ollama:told", dtype="fp32") as model, load(made[0], dtype="fp32") as plain:
        sampling = model.sampling
        assert sampling.values == {"temperature": 0.7, "top_k": 64, "repetition_penalty": 1.1}
        assert sampling.source == "the parameters of ollama:told"
        assert sampling.length == ("num_predict 128",)
        assert [text.partition(" ")[0] for text in sampling.unused] == [
            *("min_p", "repeat_last_n", "num_ctx", "stop")
        ]
        prompt = model.prompts.rendered([turn])
        told = {"role": "system", "content": "You are a pirate."}
        assert prompt == plain.prompts.rendered([told, turn])
        other = {"role": "system", "content": "Be brief."}
        assert model.prompts.rendered([other, turn]) == plain.prompts.rendered([other, turn])
        assert plain.prompts.rendered([turn]) != prompt
        answer = model.answer(prompt="Hello", max_tokens=2, sampling="model")
        (note,) = answer.receipt.model_notes
        assert note.endswith("for conversations without one: You are a pirate.")
        assert answer.receipt.sampling["top_k"].value == 64
    shown = mtmd("info", "-m", "ollama:told").out
    assert "You are a pirate." in shown and "temperature 0.7" in shown


@pytest.mark.parametrize(
    ("kind", "data", "told"),
    [
        ("system", b"\xff\xfe", "is no text of at most 1 MiB"),
        ("params", b"[1]", "holds no JSON object of parameters"),
        ("params", b"[" * 100_000, "holds no JSON object of parameters"),
    ],
)
def test_wrong_defaults_of_ollama(
    home: Path, made: tuple[Path, Path], kind: str, data: bytes, told: str
) -> None:
    store = home / ".ollama" / "models"
    pulled(store, "registry.ollama.ai/library/w/latest", ("model", made[0]), (kind, data))
    with pytest.raises(ModelError, match=told):
        load("ollama:w")


def test_where_ollama_keeps_models_can_be_said(
    home: Path, made: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    other = home / "disk"
    pulled(other, "registry.ollama.ai/library/small/latest", ("model", made[0]))
    with pytest.raises(ModelError, match="found no store of Ollama's on this machine"):
        resolve_model("ollama:small")
    monkeypatch.setenv("OLLAMA_MODELS", str(other))
    assert resolve_model("ollama:small").path.parent == other / "blobs"
    assert resolve_model("ollama:small:latest") == resolve_model("ollama:small")


WRONG: list[tuple[str, list[tuple[str, bytes]], str]] = [
    ("tensors", [("tensor", b"x")], "single tensors for Ollama's MLX engine"),
    ("adapter", [("model", b"x"), ("adapter", b"y")], "an adapter, which would be left out"),
    ("cloud", [("license", b"x")], "0 files of weights .*a cloud model"),
    ("two", [("model", b"x"), ("model", b"y")], "2 files of weights"),
]


@pytest.mark.parametrize(("name", "layers", "words"), WRONG, ids=[case[0] for case in WRONG])
def test_what_is_not_read_is_told(
    home: Path, name: str, layers: list[tuple[str, bytes]], words: str
) -> None:
    pulled(home / ".ollama" / "models", f"registry.ollama.ai/library/{name}/latest", *layers)
    with pytest.raises(ModelError, match=words):
        resolve_model(f"ollama:{name}")
    assert stores.stored_models() == [], "and left out of lists"


MANIFESTS = [
    "",
    "[]",
    '{"layers": 3}',
    '{"layers": [1]}',
    '{"layers": [{"mediaType": "application/vnd.ollama.image.model", "digest": "sha256:../../x"}]}',
    '{"layers": [{"mediaType": 1, "digest": 2}]}',
    "[" * 100_000,
    '{"layers": "' + "x" * stores.MANIFEST_BYTES_MAX + '"}',
]


@pytest.mark.parametrize("text", MANIFESTS, ids=range(len(MANIFESTS)))
def test_manifests_that_are_none_are_told_in_one_line(home: Path, text: str) -> None:
    path = home / ".ollama/models/manifests/registry.ollama.ai/library/odd/latest"
    path.parent.mkdir(parents=True)
    path.write_text(text)
    with pytest.raises(ModelError, match="`ollama pull` it again") as caught:
        resolve_model("ollama:odd")
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 600


def test_names_that_lead_elsewhere_are_none(home: Path, made: tuple[Path, Path]) -> None:
    pulled(home / ".ollama/models", "registry.ollama.ai/library/gemma3/4b", ("model", made[0]))
    for name in ("../x", "a/b/c/d", "x:..", "/etc/passwd", ".hidden", "a//b"):
        with pytest.raises(ModelError, match="no name of Ollama's"):
            resolve_model(f"ollama:{name}")
    with pytest.raises(ModelError, match="did you mean 'ollama:gemma3:4b'"):
        resolve_model("ollama:gemma3:4")
    blob = next((home / ".ollama/models/blobs").iterdir())
    blob.unlink()
    with pytest.raises(ModelError, match=r"is missing, which .* names; `ollama pull gemma3:4b`"):
        resolve_model("ollama:gemma3:4b")
    with pytest.raises(ModelError, match="belongs to another program, and stays"):
        plan_removal("ollama:gemma3:4b")


def test_a_model_of_lm_studio_is_found_by_its_publisher(
    home: Path, made: tuple[Path, Path]
) -> None:
    folder = home / ".lmstudio/models/google/gemma-3-4b-it-GGUF"
    folder.mkdir(parents=True)
    for kind in ("Q4_K_M", "Q8_0"):
        shutil.copy(made[0], folder / f"gemma-3-4b-it-{kind}.gguf")
    shutil.copy(made[1], folder / "mmproj-model-f16.gguf")
    checkpoint = home / ".lmstudio/models/mlx-community/tiny"
    checkpoint.mkdir(parents=True)
    (checkpoint / "config.json").write_text('{"model_type": "qwen2"}')
    (checkpoint / "model.safetensors").write_bytes(b"12345678")
    names = [model.name for model in stores.stored_models()]
    start = "lmstudio:google/gemma-3-4b-it-GGUF"
    assert names == [f"{start}:Q4_K_M", f"{start}:Q8_0", "lmstudio:mlx-community/tiny"]
    chosen = resolve_model(f"{start}:q8_0")
    assert chosen.path.name == "gemma-3-4b-it-Q8_0.gguf"
    assert chosen.projector == folder / "mmproj-model-f16.gguf"
    assert resolve_model("lmstudio:mlx-community/tiny") == Result(checkpoint)
    assert {s.kind for s in read_sources(["lmstudio"])} == {"GGUF", "qwen2"}
    with pytest.raises(ModelError, match="has several types in LM Studio's folder"):
        resolve_model(start)
    with pytest.raises(ModelError, match=r"is not in LM Studio's folder; did you mean"):
        resolve_model(f"{start}:Q8_1")


def test_a_folder_that_lm_studio_was_told_of_is_read(home: Path, made: tuple[Path, Path]) -> None:
    elsewhere = home / "disk"
    (elsewhere / "me/one").mkdir(parents=True)
    shutil.copy(made[0], elsewhere / "me/one/one.gguf")
    (home / ".lmstudio").mkdir()
    (home / ".lmstudio/settings.json").write_text(json.dumps({"downloadsFolder": str(elsewhere)}))
    assert [m.name for m in stores.models_of("lmstudio")] == ["lmstudio:me/one:one.gguf"]
    assert resolve_model("lmstudio:me/one").path == elsewhere / "me/one/one.gguf"
    (home / ".lmstudio/settings.json").write_text("no JSON")
    assert stores.models_of("lmstudio") == []
