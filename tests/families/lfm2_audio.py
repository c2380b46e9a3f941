"""A random tiny LFM2-Audio, which transformers 5.23 has no class for: its FastConformer
(Parakeet's encoder and feature extractor) and LFM2, under the authors' names, and their MLP.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from audio_cases import WHISPER_SPECIAL, WHISPER_TEMPLATE
from audio_oracle import AudioOracle
from common import randomize, save, tokenizer, write
from safetensors.torch import save_file
from torch import nn
from ultravox import Answers

WIDTH, HEADS, CHANNELS, BINS = 24, 3, 10, 24
TOKEN = "<|reserved_123|>"
NAMES = {  # of a layer's parts, ours by transformers'
    r"subsampling\.layers": "pre_encode.conv",
    r"subsampling\.linear": "pre_encode.out",
    r"self_attn\.([qkv])_proj": r"self_attn.linear_\1",
    r"self_attn\.o_proj": "self_attn.linear_out",
    r"self_attn\.relative_k_proj": "self_attn.linear_pos",
    r"self_attn\.bias_([uv])": r"self_attn.pos_bias_\1",
    r"conv\.norm\.": "conv.batch_norm.",
}


class Lfm2Audio(nn.Module):
    def __init__(self, encoder: Any, text: Any):
        from transformers import Lfm2ForCausalLM, ParakeetEncoder

        super().__init__()
        self.conformer = randomize(ParakeetEncoder(encoder), 31)
        for name, values in self.conformer.named_buffers():
            if "running" in name:
                values.uniform_(0.5, 1.5)
        self.language_model = randomize(Lfm2ForCausalLM(text), 32)
        torch.manual_seed(33)
        layers = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, text.hidden_size),
            nn.GELU(),
            nn.Linear(text.hidden_size, text.hidden_size),
        )
        self.audio_adapter = nn.ModuleDict({"model": nn.Sequential(*layers)})
        for p in self.audio_adapter.parameters():
            nn.init.normal_(p, 1.0 if p.ndim == 1 else 0.0, 0.2)

    def heard(self, spectrum: torch.Tensor) -> torch.Tensor:
        """[F, M] -> [T, D]"""
        rows: torch.Tensor = self.conformer(spectrum[None]).last_hidden_state[0]
        return self.audio_adapter["model"](rows)

    def embedded(self, inputs: dict[str, Any], token: int) -> torch.Tensor:
        ids = inputs["input_ids"]
        x = self.language_model.get_input_embeddings()(ids).clone()
        if inputs.get("spectra"):
            x[ids == token] = torch.cat([self.heard(one) for one in inputs["spectra"]])
        return x

    def tensors(self) -> dict[str, torch.Tensor]:
        """Its weights under the authors' names, with some of those that speak."""
        made = {"audio_embedding.embedding.weight": torch.zeros(3, 4)}
        for name, tensor in self.state_dict().items():
            if name.startswith("conformer."):
                for ours, theirs in NAMES.items():
                    name = re.sub(ours, theirs, name)
            name = re.sub(r"^language_model\.model\.", "lfm.", name)
            if not name.startswith("language_model."):
                made[name] = tensor.contiguous()
        return made


def lfm2_audio(folder: Path) -> AudioOracle:
    from transformers import Lfm2Config, ParakeetEncoderConfig, ParakeetFeatureExtractor

    tokens = tokenizer((TOKEN, *WHISPER_SPECIAL[1:]))
    token = tokens.token_to_id(TOKEN)
    text = Lfm2Config(
        vocab_size=tokens.get_vocab_size() + 3,
        hidden_size=48,
        intermediate_size=90,
        block_auto_adjust_ff_dim=False,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        layer_types=["conv", "full_attention", "conv"],
        max_position_embeddings=2048,
    )
    encoder = ParakeetEncoderConfig(
        hidden_size=WIDTH,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        intermediate_size=2 * WIDTH,
        num_mel_bins=BINS,
        subsampling_conv_channels=CHANNELS,
        scale_input=False,
    )
    model = Lfm2Audio(encoder, text).eval()
    names = {"eos_token": "<|end|>", "pad_token": "<|pad|>"}
    template = WHISPER_TEMPLATE.replace("<|AUDIO|>", TOKEN)
    save(folder, model.language_model, tokens, template, names, eos="<|end|>")
    save_file(model.tensors(), folder / "model.safetensors", metadata={"format": "pt"})
    lfm = {**text.to_dict(), "eos_token_id": tokens.token_to_id("<|end|>")}
    config = {
        "architectures": ["Lfm2AudioForConditionalGeneration"],
        "codebooks": 8,
        "preprocessor": {"features": BINS, "normalize": "per_feature", "dither": 1e-5},
        "encoder": {
            "feat_in": BINS,
            "feat_out": -1,
            "n_layers": 2,
            "d_model": WIDTH,
            "n_heads": HEADS,
            "ff_expansion_factor": 2,
            "subsampling": "dw_striding",
            "subsampling_conv_channels": CHANNELS,
            "xscaling": False,
            "att_context_size": [-1, -1],
        },
        "lfm": lfm,
    }
    write(folder, "config.json", config)
    extractor = ParakeetFeatureExtractor(feature_size=BINS)

    def extract(audio: Sequence[np.ndarray]) -> dict[str, Any]:
        """The authors' encoder sees the last frame, which is zero, as well."""
        made = [
            extractor(one, sampling_rate=16_000, return_tensors="pt")["input_features"][0]
            for one in audio
        ]
        return {"spectra": made, "counts": [-(-len(one) // 8) for one in made]}

    @torch.no_grad()
    def features(inputs: dict[str, Any]) -> torch.Tensor:
        return model.embedded(inputs, token)[inputs["input_ids"] == token]

    return AudioOracle(
        folder,
        Answers(model, token),
        extract,
        lambda made: made.pop("counts"),
        features,
        lambda count: TOKEN * count,
        TOKEN,
        shortest=320,  # of which two frames have a deviation
    )
