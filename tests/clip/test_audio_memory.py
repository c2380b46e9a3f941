"""What encoding audio is predicted to take, against what the allocator hands out: windows as they
are published, of narrower encoders with one layer or two.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from allocator_peak import allocator_peak
from sounds import tones

from mtmd.bench.random_weights import RandomFile
from mtmd.clip.audio_family import audio_family
from mtmd.clip.encoder import AudioEncoder
from mtmd.kernels.backends import Cpu
from mtmd.kernels.checkpoint.canonical import CanonicalWeights
from mtmd.kernels.checkpoint.settings import Settings
from mtmd.kernels.cpu import matmul

LAYERS, WIDTH, HEADS = 2, 128, 4
WHISPER: dict[str, Any] = {
    "d_model": WIDTH,
    "hidden_size": WIDTH,
    "encoder_layers": LAYERS,
    "num_hidden_layers": LAYERS,
    "encoder_attention_heads": HEADS,
    "num_attention_heads": HEADS,
    "encoder_ffn_dim": 4 * WIDTH,
    "intermediate_size": 4 * WIDTH,
    "num_mel_bins": 128,
}
FORMER = {
    "encoder_hidden_size": WIDTH,
    "hidden_size": WIDTH,
    "num_attention_heads": HEADS,
    "cross_attention_frequency": 1,
    "num_hidden_layers": LAYERS,
}
GRANITE = {"num_layers": LAYERS, "hidden_dim": WIDTH, "num_heads": HEADS}
CONFIGS: dict[str, dict[str, Any]] = {
    **{
        name: {"audio_config": WHISPER}
        for name in (
            *("audioflamingo3", "glmasr", "qwen2_5_omni_thinker", "qwen2_audio", "qwen3_asr"),
            *("ultravox", "voxtral"),
        )
    },
    "gemma3n": {"audio_config": {"conf_num_hidden_layers": 1, "hidden_size": WIDTH}},
    "gemma4": {"audio_config": {"num_hidden_layers": 1, "hidden_size": WIDTH}},
    "granite_speech": {"encoder_config": GRANITE, "projector_config": FORMER},
    "lfm2_audio": {"audio_config": {"n_layers": LAYERS, "d_model": WIDTH}},
    "meralion2": {"speech_config": WHISPER},
}
SECONDS = dict.fromkeys(
    ("gemma3n", "gemma4", "granite_speech", "lfm2_audio"), 6.0
)  # others have windows


@pytest.mark.parametrize("kind", CONFIGS)
def test_encoding_takes_what_is_predicted(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # MKL packs fp32 operands in memory of its own, which torch's allocator does not see
    monkeypatch.setattr(matmul, "packed_bytes", lambda *_: 0)
    config = {"model_type": kind, "text_config": {"hidden_size": 256}, **CONFIGS[kind]}
    features = {"feature_size": 128} if kind != "granite_speech" else {}
    family = audio_family(kind, Settings(config, kind), Settings(features, kind))
    assert family is not None
    parameters = family.parameters()
    file = RandomFile(parameters, lambda *_: "F32")
    weights = CanonicalWeights(file, parameters, kind)
    encoder = AudioEncoder(family, weights, [Cpu()], dtype=torch.float32)
    heard = tones(SECONDS.get(kind, 30.0), family.rate)
    tiles = list(family.resolution.windows(heard).tiles)[:1]
    predicted = encoder.plan(1, tiles[0].shape).compute_bytes["cpu"]
    measured = allocator_peak(lambda: encoder.encode(tiles))
    assert abs(predicted / measured - 1) < 0.02, f"predicted {predicted}, measured {measured}"
