"""A random tiny Ultravox, which transformers has no class for: Whisper's blocks and a Llama of
transformers', and what is between them written from the authors' description.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from audio_cases import WHISPER_SPECIAL, WHISPER_TEMPLATE, WHISPER_TEXT, mel_settings
from audio_oracle import AudioOracle
from common import randomize, save, tokenizer, write
from safetensors.torch import save_file
from torch import nn

FRAMES, STACK, WIDTH, HIDDEN = 104, 8, 24, 36
AUDIO = {
    "d_model": WIDTH,
    "encoder_ffn_dim": 40,
    "encoder_attention_heads": 3,
    "encoder_layers": 2,
    "num_mel_bins": 20,
    "max_source_positions": FRAMES // 2,
}


class Projector(nn.Module):
    """Stacks of positions, the last filled up, and a gated MLP with a norm before it and one in it,
    or, in files before 0.5, behind it.
    """

    def __init__(self, text_width: int, between: bool):
        super().__init__()
        self.between = between
        self.ln_pre = nn.RMSNorm(STACK * WIDTH, eps=1e-6)
        self.linear_1 = nn.Linear(STACK * WIDTH, HIDDEN, bias=False)
        self.linear_2 = nn.Linear(HIDDEN // 2, text_width, bias=False)
        if between:
            self.ln_mid = nn.RMSNorm(HIDDEN // 2, eps=1e-6)
        else:
            self.ln_post = nn.RMSNorm(text_width, eps=1e-6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.pad(x, (0, 0, 0, -len(x) % STACK)).reshape(-1, STACK * WIDTH)
        up, gate = self.linear_1(self.ln_pre(x)).chunk(2, -1)
        x = nn.functional.silu(gate) * up
        return self.linear_2(self.ln_mid(x)) if self.between else self.ln_post(self.linear_2(x))


class Ultravox(nn.Module):
    def __init__(self, audio: Any, text: Any, between: bool):
        from transformers import LlamaForCausalLM
        from transformers.models.whisper.modeling_whisper import WhisperEncoder

        super().__init__()
        self.audio_tower = randomize(WhisperEncoder(audio), 21)
        self.language_model = randomize(LlamaForCausalLM(text), 22)
        torch.manual_seed(23)
        self.multi_modal_projector = Projector(text.hidden_size, between)
        for p in self.multi_modal_projector.parameters():
            nn.init.normal_(p, 1.0 if p.ndim == 1 else 0.0, 0.2)

    def heard(self, spectrum: torch.Tensor, frames: int) -> torch.Tensor:
        """[M, F], of which so many frames are no padding -> [T, D], T = frames / 16 rounded up"""
        tower = self.audio_tower
        x = nn.functional.gelu(tower.conv1(spectrum[None]))
        x = nn.functional.gelu(tower.conv2(x)).transpose(1, 2)
        x = x + tower.embed_positions.weight[: x.shape[1]]
        seen = torch.arange(x.shape[1]) < (frames - 1) // 2 + 1
        mask = torch.where(seen, 0.0, torch.finfo(x.dtype).min)[None, None, None]
        for layer in tower.layers:
            x = layer(x, mask.expand(1, 1, x.shape[1], -1))
        rows: torch.Tensor = self.multi_modal_projector(tower.layer_norm(x)[0])
        return rows[: -(-frames // (2 * STACK))]

    def embedded(self, inputs: dict[str, Any], token: int) -> torch.Tensor:
        ids = inputs["input_ids"]
        x = self.language_model.get_input_embeddings()(ids).clone()
        x[ids == token] = torch.cat([self.heard(*window) for window in inputs["windows"]])
        return x


class Embeds(Protocol):
    language_model: Any

    def embedded(self, inputs: dict[str, Any], token: int) -> torch.Tensor: ...


class Answers:
    """What an oracle asks of a model: logits, and tokens one by one."""

    def __init__(self, model: Embeds, token: int):
        self.model, self.token = model, token

    def __call__(self, **inputs: Any) -> Any:
        return self.model.language_model(inputs_embeds=self.model.embedded(inputs, self.token))

    def generate(self, *, max_new_tokens: int, do_sample: bool, **inputs: Any) -> torch.Tensor:
        assert not do_sample
        x, ids = self.model.embedded(inputs, self.token), inputs["input_ids"]
        embed = self.model.language_model.get_input_embeddings()
        for _ in range(max_new_tokens):
            last = self.model.language_model(inputs_embeds=x).logits[:, -1].argmax(-1, keepdim=True)
            ids, x = torch.cat((ids, last), 1), torch.cat((x, embed(last)), 1)
        return ids


def ultravox(folder: Path, *, between: bool = True) -> AudioOracle:
    from transformers import LlamaConfig, WhisperConfig, WhisperFeatureExtractor

    tokens = tokenizer(("<|audio|>", *WHISPER_SPECIAL[1:]))
    token = tokens.token_to_id("<|audio|>")
    text = LlamaConfig(vocab_size=tokens.get_vocab_size() + 3, **WHISPER_TEXT)
    extractor = WhisperFeatureExtractor(feature_size=20, chunk_length=1)
    model = Ultravox(WhisperConfig(**AUDIO), text, between).eval()
    template = WHISPER_TEMPLATE.replace("<|AUDIO|>", "<|audio|>")
    names = {"eos_token": "<|end|>", "pad_token": "<|pad|>"}
    save(folder, model.language_model, tokens, template, names, eos="<|end|>")
    tensors = {
        name: tensor.contiguous()
        for name, tensor in model.state_dict().items()
        if not name.endswith("lm_head.weight") or not text.tie_word_embeddings
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = {
        "model_type": "ultravox",
        "audio_config": AUDIO | {"model_type": "whisper"},
        "text_config": text.to_diff_dict() | {"model_type": "llama"},
        "audio_token_index": None,
        "audio_latency_block_size": None,
        "hidden_size": HIDDEN,
        "stack_factor": STACK,
        "projector_act": "swiglu",
        "projector_ln_mid": between,
        "vocab_size": text.vocab_size,
    }
    write(folder, "config.json", config)
    write(folder, "preprocessor_config.json", mel_settings(extractor))

    def extract(audio: Sequence[np.ndarray]) -> dict[str, Any]:
        """As UltravoxProcessor does with each recording alone."""
        windows, counts = [], []
        for one in audio:
            made = extractor(
                np.pad(one, (0, max(0, 320 - len(one)))),
                sampling_rate=16_000,
                padding="longest",
                pad_to_multiple_of=160,
                truncation=False,
                return_attention_mask=True,
                return_tensors="pt",
            )
            spectrum, heard = made["input_features"][0], int(made["attention_mask"].sum())
            count = 0
            for at in range(0, heard, FRAMES):
                part, frames = spectrum[:, at : at + FRAMES], min(heard - at, FRAMES)
                if at:
                    part = nn.functional.pad(part, (0, FRAMES - part.shape[1]))
                windows.append((part, frames))
                count += -(-frames // (2 * STACK))
            counts.append(count)
        return {"windows": windows, "counts": counts}

    @torch.no_grad()
    def features(inputs: dict[str, Any]) -> torch.Tensor:
        return model.embedded(inputs, token)[inputs["input_ids"] == token]

    return AudioOracle(
        folder,
        Answers(model, token),
        extract,
        lambda made: made.pop("counts"),
        features,
        lambda count: "<|audio|>" * count,
        "<|audio|>",
        # Behind the first window the authors stack what masked queries see with the last positions;
        # here there are none.
        seconds=1.3576,
    )
