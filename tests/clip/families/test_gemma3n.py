"""Gemma 3n's eyes: timm's features, transformers' embedder, the published network, what cannot be
followed, GGUF's names, kernels that lie otherwise.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import timm_stand_in
import torch
from gguf_files import gemma3n_eyes
from tensor_file import TensorFile
from timm_stand_in import MobileNetV5, digest, tiny_args, weights

from mtmd.base.errors import ModelError
from mtmd.clip.encoder import Encoder
from mtmd.clip.families.gemma3n.vision import Gemma3nVision, _nearest, read, same_padding
from mtmd.clip.family import gguf_of, gguf_vision_family
from mtmd.kernels.backends import Cpu
from mtmd.kernels.checkpoint.canonical import CanonicalWeights
from mtmd.kernels.checkpoint.settings import Settings

GOLDEN = Path(timm_stand_in.__file__).parent / "golden" / "mobilenetv5.npz"
# As in google/gemma-3n-E2B-it, less what says nothing of the tower
CONFIG: dict[str, Any] = {
    "model_type": "gemma3n",
    "eoi_token_id": 262144,
    "vision_soft_tokens_per_image": 256,
    "text_config": {"hidden_size": 2048},
    "vision_config": {
        "model_type": "gemma3n_vision",
        "architecture": "mobilenetv5_300m_enc",
        "do_pooling": False,
        "hidden_size": 2048,
        "model_args": None,
        "rms_norm_eps": 1e-06,
        "vocab_offset": 262144,
        "vocab_size": 128,
    },
}
IMAGE = {"size": {"height": 768, "width": 768}, "do_normalize": False, "resample": 2}
WIDTH = 48
TINY = {
    "vision_config": {"model_args": tiny_args()},
    "text_config": {"hidden_size": WIDTH},
    "vision_soft_tokens_per_image": 4,
}
TINY_IMAGE = {"size": {"height": 128, "width": 128}}


def family(image: dict[str, Any] | None = None, **parts: Any) -> Gemma3nVision:
    config = {k: v | parts.pop(k, {}) if isinstance(v, dict) else v for k, v in CONFIG.items()}
    return read(
        Settings(config | parts, "config.json"),
        Settings({**IMAGE, **(image or {})}, "preprocessor_config.json"),
    )


def tensors() -> tuple[dict[str, torch.Tensor], Any]:
    """A tiny tower's tensors by their names in a checkpoint, and transformers' embedder."""
    from transformers.models.gemma3n.modeling_gemma3n import Gemma3nMultimodalEmbedder

    torch.manual_seed(0)
    sizes = {"hidden_size": 2048, "rms_norm_eps": 1e-6, "vocab_offset": 262144, "vocab_size": 128}
    embedder = Gemma3nMultimodalEmbedder(
        SimpleNamespace(**sizes), SimpleNamespace(hidden_size=WIDTH)
    ).eval()
    for name, p in embedder.named_parameters():
        torch.nn.init.normal_(p, 1 if "norm" in name else 0, 0.2)
    network = weights(MobileNetV5(**tiny_args())).state_dict()
    return {f"model.vision_tower.timm_model.{name}": p for name, p in network.items()} | {
        f"model.embed_vision.{name}": p for name, p in embedder.state_dict().items()
    }, embedder


def encoder(file: TensorFile) -> Encoder:
    own = family(TINY_IMAGE, **TINY)
    return Encoder(
        own, CanonicalWeights(file, own.parameters(), "here"), [Cpu()], dtype=torch.float32
    )


def expected(embedder: Any) -> torch.Tensor:
    features = torch.from_numpy(np.load(GOLDEN)["features"]).flatten(2).transpose(1, 2)
    with torch.no_grad():
        result: torch.Tensor = embedder(inputs_embeds=features * 2048**0.5)[0]
    return result


def nmse(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).square().sum() / b.square().sum())


def pixels() -> list[np.ndarray]:
    return [timm_stand_in.picture()[0].numpy()]


def test_the_stand_in_gives_timms_features() -> None:
    with torch.no_grad():
        features = weights(MobileNetV5(**tiny_args())).forward_features(timm_stand_in.picture())
    assert nmse(features, torch.from_numpy(np.load(GOLDEN)["features"])) < 1e-12


def test_embeddings_are_those_of_timm_and_transformers() -> None:
    stored, embedder = tensors()
    made = encoder(TensorFile(stored))
    (rows,) = made.encode(pixels())
    assert nmse(rows, expected(embedder)) < 1e-11
    with torch.no_grad():
        end = embedder(input_ids=torch.tensor([262144]))[0]
    marks = made.marks()
    assert list(marks) == ["<end_of_image>"]
    torch.testing.assert_close(marks["<end_of_image>"], end, rtol=1e-5, atol=1e-6)


def test_kernels_whose_channels_lie_last_are_read_as_such() -> None:
    stored, embedder = tensors()
    last = {name: p.movedim(1, -1).contiguous() if p.ndim == 4 else p for name, p in stored.items()}
    (rows,) = encoder(TensorFile(last)).encode(pixels())
    assert nmse(rows, expected(embedder)) < 1e-11


def test_a_gguf_as_llama_cpp_writes_it_is_the_same() -> None:
    stored, embedder = tensors()
    own = family(TINY_IMAGE, **TINY)
    theirs = gemma3n_eyes({name: tensor.numpy() for name, tensor in stored.items()})
    file = TensorFile({n: torch.from_numpy(t.copy()) for n, t in theirs.items()}, canonical=True)
    written = CanonicalWeights(TensorFile(stored), own.parameters(), "here").as_gguf()
    assert set(written.shapes) == set(theirs)
    for name, tensor in file.tensors.items():
        torch.testing.assert_close(written.read(name, torch.float32), tensor, rtol=0, atol=0)
    metadata, tower = gguf_of(own, "here")
    assert tower.projector == metadata["clip.projector_type"] == "gemma3nv"
    shapes = {name: tuple(t.shape) for name, t in file.tensors.items()}
    again = gguf_vision_family("gemma3nv", metadata, shapes, "there")
    assert again == own
    reread = CanonicalWeights(file, again.parameters(), "there")
    made = Encoder(again, reread, [Cpu()], dtype=torch.float32)
    (rows,) = made.encode(pixels())
    assert nmse(rows, expected(embedder)) < 1e-11
    torch.testing.assert_close(
        made.marks()["<end_of_image>"],
        encoder(TensorFile(stored)).marks()["<end_of_image>"],
        rtol=0,
        atol=0,
    )


def test_the_published_network_is_timms() -> None:
    own = family()
    assert own.embedder.first == 262144 and own.resolution.tokens == 256
    assert own.resolution.normalize.mean == (0, 0, 0) and own.resolution.normalize.std == (1, 1, 1)
    prefix = "model.vision_tower.timm_model."
    shapes = {
        name.removeprefix(prefix): shape
        for at, parameter in own.parameters().items()
        for way in parameter.ways(at, canonical=False)
        if not getattr(way.convert, "func", None)
        for name, shape in way.each()
        if name.startswith(prefix)
    }
    assert digest(shapes) == str(np.load(GOLDEN)["published"])
    grid = (768, 768)
    assert same_padding(grid, 3, 2) == (0, 1, 0, 1) and same_padding((7, 24), 5, 1) == (2,) * 4
    assert _nearest((4, 4), (2, 2)).tolist() == [0, 0, 1, 1, 0, 0, 1, 1, 2, 2, 3, 3, 2, 2, 3, 3]


def wrong(**changes: Any) -> dict[str, Any]:
    args = tiny_args()
    args["block_args"][2][1] |= changes
    return {**TINY, "vision_config": {"model_args": args}}


WRONG: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "architecture": (
        {},
        {"vision_config": {"architecture": "resnet50"}},
        "architecture is 'resnet50', expected one of mobilenetv5_300m_enc",
    ),
    "width": ({}, {"vision_config": {"hidden_size": 1024}}, "of width 1024; expected the 16 x 16"),
    "tokens": ({}, {"vision_soft_tokens_per_image": 100}, "100 tokens of a picture"),
    "size": ({"size": {"height": 768, "width": 512}}, {}, "is 768 x 512, expected a square"),
    "grid": ({"size": {"height": 800, "width": 800}}, {}, "50 cells a side; expected a multiple"),
    "argument": (
        {},
        {"vision_config": {"model_args": {"channel_multiplier": 0.5}}},
        "channel_multiplier is not supported",
    ),
    "stages": ({}, {"vision_config": {"model_args": {"block_args": [[]]}}}, "no list of 4 stages"),
    "blocks": (
        {},
        {"vision_config": {"model_args": {"block_args": [[1]] * 4}}},
        "0.0: found int, expected an object",
    ),
    "kind": (
        TINY_IMAGE,
        wrong(block_type="cn"),
        "block_type is 'cn', expected one of er, uir, mqa",
    ),
    "value": (TINY_IMAGE, wrong(value_dim=8), "value_dim is 8, expected one of 16"),
    "stride": (TINY_IMAGE, wrong(stride=2), "attention from width 40 to 40 with a stride of 2"),
    "wide": (
        TINY_IMAGE,
        wrong(block_type="uir", exp_ratio=1e9),
        r"exp_ratio widens 40 channels to 4e\+10",
    ),
    "infinitely wide": (
        TINY_IMAGE,
        wrong(block_type="uir", exp_ratio=1e308),
        "exp_ratio widens 40 channels to inf",
    ),
    "large": ({"size": {"height": 1 << 18, "width": 1 << 18}}, {}, "height is 262144, expected"),
    "no kernel": (
        TINY_IMAGE,
        wrong(block_type="uir", stride=2, dw_kernel_size_mid=0),
        "a stride of 2 without a kernel",
    ),
    "mark": ({}, {"eoi_token_id": 7}, "token 7 is not among the 128 from 262144 on"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_followed(name: str) -> None:
    image, parts, message = WRONG[name]
    with pytest.raises(ModelError, match=message):
        family(image, **parts).parameters()


@pytest.mark.parametrize(
    "name", ["v.blk.0.0.conv_exp.weight", "v.conv_stem.conv.weight", "mm.embedding.weight"]
)
@pytest.mark.parametrize("shape", [(), (8,), (8, 8), (0, 0, 0, 0)])
def test_shapes_of_a_gguf_that_cannot_be_followed(name: str, shape: tuple[int, ...]) -> None:
    own = family(TINY_IMAGE, **TINY)
    stored, _ = tensors()
    theirs = gemma3n_eyes({name: tensor.numpy() for name, tensor in stored.items()})
    shapes = {name: tuple(t.shape) for name, t in theirs.items()} | {name: shape}
    metadata, _ = gguf_of(own, "here")
    file = TensorFile({n: torch.zeros(s) for n, s in shapes.items()}, canonical=True)
    with pytest.raises(ModelError):
        again = gguf_vision_family("gemma3nv", metadata, shapes, "there")
        CanonicalWeights(file, again.parameters(), "there")
