"""Vectors of CLIP, SigLIP and SigLIP 2 against transformers, from checkpoints of random weights."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from dual_encoders import CONTEXT, FAMILIES
from tokenizers import Tokenizer

from mtmd.embedding.embedder import load_embedder

TEXTS = [
    "a photo of a cat",
    "A Photo of TWO dogs; a red circle!",
    "",
    "été 日本語",
    "the quick brown fox jumps over the lazy dog, and again: " * 4,
]
SHAPES = [(40, 64), (32, 32), (200, 31), (9, 120), (33, 47)]


def pictures(count=5):
    rng = np.random.default_rng(1)
    return [
        rng.integers(0, 256, (*SHAPES[i % len(SHAPES)], 3), dtype=np.uint8) for i in range(count)
    ]


@pytest.fixture(scope="module", params=[*FAMILIES, "siglip, patches left over"])
def subject(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("dual")
    family, _, left_over = request.param.partition(",")
    model = FAMILIES[family](folder, **({"image_size": 37} if left_over else {}))
    return SimpleNamespace(folder=folder, family=family, theirs=model)


def their_ids(subject, text):
    """As transformers' tokenizers do: lower case, special tokens around, cut, filled up."""
    inner = Tokenizer.from_file(str(subject.folder / "tokenizer.json"))
    inner.enable_truncation(CONTEXT)
    if subject.family == "clip":
        return torch.tensor([inner.encode(text).ids])
    inner.enable_padding(length=CONTEXT, pad_id=0, pad_token="<pad>")
    return torch.tensor([inner.encode(text.lower()).ids])


def their_texts(subject, texts):
    with torch.no_grad():
        return torch.cat(
            [
                subject.theirs.get_text_features(input_ids=their_ids(subject, t)).pooler_output
                for t in texts
            ]
        ).numpy()


def their_images(subject, images):
    from transformers import CLIPImageProcessorPil, SiglipImageProcessorPil
    from transformers.models.siglip2.image_processing_pil_siglip2 import Siglip2ImageProcessorPil

    kinds = {"clip": CLIPImageProcessorPil, "siglip": SiglipImageProcessorPil}
    kind = kinds.get(subject.family, Siglip2ImageProcessorPil)
    processor = kind.from_pretrained(subject.folder)
    with torch.no_grad():
        return torch.cat(
            [
                subject.theirs.get_image_features(
                    **processor(images=i, return_tensors="pt")
                ).pooler_output
                for i in images
            ]
        ).numpy()


def nmse(value, expected):
    return float(np.square(value - expected).sum() / np.square(expected).sum())


def test_vectors_are_those_of_transformers(subject):
    model = load_embedder(subject.folder, dtype="fp32")
    images, texts = pictures(), TEXTS
    ours = model.embed(images, texts, normalize=False)
    assert ours.shape == (len(images) + len(texts), model.width) and ours.dtype == np.float32
    assert nmse(ours[: len(images)], their_images(subject, images)) <= 1e-9
    assert nmse(ours[len(images) :], their_texts(subject, texts)) <= 1e-9


@pytest.mark.parametrize(
    "options", [{"flash_attn": "off"}, {"refuse": ["attention:head=12"]}], ids=str
)
def test_explicit_attention_gives_the_same(subject, options):
    model = load_embedder(subject.folder, dtype="fp32", **options)
    ours = model.embed(pictures(), TEXTS, normalize=False)
    expected = np.concatenate([their_images(subject, pictures()), their_texts(subject, TEXTS)])
    assert nmse(ours, expected) <= 1e-9
    states = {f.graph: f.state for f in model.warmup_report.flash}
    assert states["text encoder"] == "off"


def test_rankings_are_those_of_transformers(subject):
    model = load_embedder(subject.folder, dtype="fp32")
    words = ["cat", "dog", "circle", "fox", "red", "blue", "two", "a photo", "lazy", "quick"]
    texts = [f"{a} {b}" for a in words for b in words[:2]]
    images = pictures(10)
    theirs_i, theirs_t = their_images(subject, images), their_texts(subject, texts)
    for vectors in (theirs_i, theirs_t):
        vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    expected = theirs_i @ theirs_t.T  # 200 pairs
    ours = model.similarity(images, texts)
    assert np.abs(ours - expected).max() < 1e-5
    assert (ours.argsort(1) == expected.argsort(1)).all()


def test_probabilities_are_those_of_transformers(subject):
    model = load_embedder(subject.folder, dtype="fp32")
    images, labels = pictures(3), TEXTS[:3]
    scale, bias = subject.theirs.logit_scale.exp().item(), getattr(subject.theirs, "logit_bias", 0)
    logits = torch.from_numpy(model.similarity(images, labels)) * scale + bias
    expected = logits.softmax(-1) if subject.family == "clip" else logits.sigmoid()
    ours = model.classify(images, labels)
    assert np.abs(ours - expected.detach().numpy()).max() < 1e-5
    if subject.family == "clip":
        assert np.abs(ours.sum(1) - 1).max() < 1e-5


def test_bf16_is_near(subject):
    model = load_embedder(subject.folder, dtype="bf16")
    ours = model.embed(pictures(), TEXTS, normalize=False)
    expected = np.concatenate([their_images(subject, pictures()), their_texts(subject, TEXTS)])
    assert nmse(ours, expected) <= 2e-3


def test_a_warm_up_runs_both_towers(subject):
    report = load_embedder(subject.folder, dtype="fp32").warm_up()
    assert [c.graph for c in report.checks] == ["encoder", "text encoder"]
    assert all(c.failed == () for c in report.checks)
    assert "text encoder" in str(report)
