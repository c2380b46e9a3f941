"""Settings of Gemma 3n's audio encoder: those of transformers where nothing is said, what is
refused, what a GGUF says; the encoder with attention and reductions of other sizes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from sounds import tones
from tensor_file import TensorFile

from mtmd.base.errors import ModelError
from mtmd.clip.audio.usm_conformer import Reach
from mtmd.clip.audio_family import gguf_audio_family, gguf_of
from mtmd.clip.encoder import AudioEncoder
from mtmd.clip.families.gemma3n import audio
from mtmd.kernels.backends import Cpu
from mtmd.kernels.checkpoint.canonical import CanonicalWeights
from mtmd.kernels.checkpoint.settings import Settings

FEATURES: Mapping[str, Any] = {}


def read(
    features: Mapping[str, Any] = FEATURES, top: Mapping[str, Any] = FEATURES, **settings: Any
) -> audio.Gemma3nAudio:
    return audio.read(
        Settings({"audio_config": settings, **top}, "config.json"),
        Settings(dict(features), "processor_config.json"),
    )


def test_defaults_are_those_of_transformers() -> None:
    from transformers.models.gemma3n.configuration_gemma3n import (
        Gemma3nAudioConfig,
        Gemma3nTextConfig,
    )

    theirs, text = Gemma3nAudioConfig(), Gemma3nTextConfig()
    for ours in (read(), read(**theirs.to_dict())):
        c = ours.conformer
        assert (c.layers, c.width, c.heads, c.kernel, c.ffn_scale, c.cap, c.eps) == (
            theirs.conf_num_hidden_layers,
            theirs.hidden_size,
            theirs.conf_num_attention_heads,
            theirs.conf_conv_kernel_size,
            theirs.conf_residual_weight,
            theirs.conf_attention_logit_cap,
            theirs.rms_norm_eps,
        )
        assert (list(ours.channels), ours.norm_eps, ours.reduction) == (
            list(theirs.sscp_conv_channel_size),
            theirs.sscp_conv_group_norm_eps,
            theirs.conf_reduction_factor,
        )
        assert (c.reach, c.clipped, c.key_scale) == (Reach(13), False, 1.0)
        assert (ours.end, ours.padding) == (theirs.vocab_offset, text.vocab_size - 1)
        assert ours.embedder.text_width == text.hidden_size
        assert ours.resolution.max_tokens() == 188


@pytest.mark.parametrize(
    "wrong",
    [
        {"gradient_clipping": 1.0},
        {"conf_num_attention_heads": 7},
        {"hidden_size": 1 << 40},
        {"sscp_conv_channel_size": [100]},
        {"sscp_conv_kernel_size": [[5, 5], [3, 3]]},
        {"sscp_conv_stride_size": [[2, 2], [1, 1]]},
        {"conf_conv_kernel_size": 10**6},
        {"conf_attention_context_left": 10**6},
        {"conf_attention_context_right": 1},
        {"conf_attention_logit_cap": float("nan")},
        {"conf_residual_weight": "half"},
        {"conf_num_hidden_layers": 10**6},
        {"conf_reduction_factor": 0},
        {"vocab_size": 1 << 40},
    ],
)
def test_settings_that_are_refused(wrong: dict[str, Any]) -> None:
    key = next(iter(wrong))
    with pytest.raises(
        ModelError, match="heads of width" if key.startswith("conf_num_att") else key
    ):
        read(**wrong)


@pytest.mark.parametrize("tokens", [{"eoa_token_id": 5}, {"text_config": {"vocab_size": 262144}}])
def test_tokens_that_the_table_does_not_have_are_refused(tokens: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match="is not among the 128 from 262272 on"):
        read(top=tokens).parameters()


def test_recordings_of_too_many_tokens_are_refused() -> None:
    with pytest.raises(ModelError, match="750 tokens, expected at most the 188"):
        read(conf_reduction_factor=1)
    with pytest.raises(ModelError, match="audio_soft_tokens_per_image is 16777216, expected"):
        read(top={"audio_soft_tokens_per_image": 1 << 24})


def test_a_gguf_is_not_written_of_recordings_of_other_lengths() -> None:
    other = read(top={"audio_soft_tokens_per_image": 400}, conf_reduction_factor=2)
    assert audio.to_gguf(other) is None


@pytest.mark.parametrize(
    "other",
    [
        {"conf_conv_kernel_size": 3},
        {"conf_attention_context_left": 5},
        {"conf_attention_logit_cap": 30.0},
        {"sscp_conv_group_norm_eps": 1e-5},
        {"rms_norm_eps": 1e-5},
        {"conf_reduction_factor": 8},
    ],
)
def test_what_no_gguf_says_is_not_written(other: dict[str, Any]) -> None:
    assert audio.to_gguf(read(**other)) is None
    assert audio.to_gguf(read({"mel_floor": 1e-3})) is None
    assert audio.to_gguf(read(top={"eoa_token_id": 262273})) is None
    assert audio.to_gguf(read()) is not None


def test_a_gguf_says_the_same_in_the_converters_names() -> None:
    family = read(conf_num_hidden_layers=2)
    metadata, tower = gguf_of(family, "test", alone=True)
    shapes = {
        name: shape
        for ours, parameter in family.parameters().items()
        for name, shape in next(parameter.ways(ours, canonical=True)).each()
    }
    assert tower.projector == "gemma3na"
    assert gguf_audio_family("gemma3na", metadata, shapes, "test") == family
    theirs = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, 2)
    for name, parameter in family.parameters().items():
        source = next(parameter.ways(name, canonical=False)).names[0]
        if name in (family.marks, family.separator) or ("conv1d" in name and "norm" in name):
            continue  # of other tensors; one that its map has no name for
        source = source if source.startswith("model.") else f"model.{source}"
        source = source.replace("model.audio_tower.conformer.", "conformer.layers.")
        written = next(parameter.ways(name, canonical=True)).names[0]
        assert theirs.get_name(source.removesuffix(".weight")) == written.removesuffix(".weight")


@pytest.mark.parametrize(("left", "reduction", "kernel"), [(13, 4, 5), (3, 2, 3), (1, 1, 1)])
def test_the_encoder_is_transformers(left: int, reduction: int, kernel: int) -> None:
    """Whatever the length: whole chunks of attention, and one that ends early; behind what was
    heard, the last of the vocabulary.
    """
    from transformers.models.gemma3n.configuration_gemma3n import Gemma3nAudioConfig
    from transformers.models.gemma3n.modeling_gemma3n import (
        Gemma3nAudioEncoder,
        Gemma3nMultimodalEmbedder,
        Gemma3nTextConfig,
    )

    settings = {
        "hidden_size": 24,
        "input_feat_size": 11,
        "conf_num_attention_heads": 3,
        "conf_num_hidden_layers": 2,
        "conf_attention_context_left": left,
        "conf_attention_logit_cap": 1.5,
        "conf_reduction_factor": reduction,
        "conf_conv_kernel_size": kernel,
        "sscp_conv_channel_size": [6, 5],
    }
    torch.manual_seed(left)
    config = Gemma3nAudioConfig(**settings)
    tower = Gemma3nAudioEncoder(config).eval()
    embedder = Gemma3nMultimodalEmbedder(config, Gemma3nTextConfig(hidden_size=32)).eval()
    with torch.no_grad():
        for part in (tower, embedder):
            for name, p in part.named_parameters():
                if p.ndim > 1:
                    p.normal_(std=float(p[0].numel()) ** -0.5)
                else:
                    p.normal_(1 if "norm" in name else 0, 0.3)
    file = TensorFile(
        {f"audio_tower.{name}": p for name, p in tower.state_dict().items()}
        | {f"embed_audio.{name}": p for name, p in embedder.state_dict().items()}
    )
    top = {"text_config": {"hidden_size": 32}, "audio_soft_tokens_per_image": 800}
    family = read({"feature_size": 11}, top, **settings)
    weights = CanonicalWeights(file, family.parameters(), "test")
    encoder = AudioEncoder(family, weights, [Cpu()], dtype=torch.float32)
    for samples in (1, 3000, 16_000, 70_001):
        plan = family.resolution.windows(tones(samples / 16_000, 16_000)[:samples])
        (tile,) = plan.tiles
        mel = torch.from_numpy(np.ascontiguousarray(tile))
        with torch.no_grad():
            heard = tower(mel, torch.zeros(mel.shape[:2], dtype=torch.bool)).last_hidden_state
            expected = embedder(inputs_embeds=heard)[0]
            last = embedder(input_ids=torch.tensor([family.padding]))[0]
        actual = encoder.join(plan, encoder.encode([tile]))
        assert actual.shape == (800, 32)
        count = len(expected)
        torch.testing.assert_close(actual[:count], expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(
            actual[count:], last.expand(800 - count, -1), rtol=1e-4, atol=1e-5
        )
    end = embedder(input_ids=torch.tensor([family.end]))[0].detach()
    torch.testing.assert_close(encoder.marks()["<end_of_audio>"], end, rtol=1e-4, atol=1e-5)
