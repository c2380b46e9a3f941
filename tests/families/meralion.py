"""A random tiny MERaLiON-2, which transformers has no class for: Whisper's encoder, feature
extractor and Gemma 2 of transformers', and what is between them from the authors' description.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from audio_cases import mel_settings
from audio_oracle import AudioOracle
from common import randomize, save, tokenizer, write
from safetensors.torch import save_file
from torch import nn
from ultravox import Answers

TOKEN, STACK, WIDTH, LIMIT = "<SpeechHere>", 15, 24, 2
WINDOW = 48_000  # samples
SPECIAL = ("<pad>", "<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>", TOKEN)
TEMPLATE = """{{ bos_token }}{% for m in messages %}{{ '<start_of_turn>' + m.role + '\\n' + m.content | trim + '<end_of_turn>\\n' }}\
{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"""
SPEECH = {
    "d_model": WIDTH,
    "encoder_ffn_dim": 40,
    "encoder_attention_heads": 3,
    "encoder_layers": 2,
    "num_mel_bins": 20,
    "max_source_positions": 150,
}
TEXT = {
    "hidden_size": 48,
    "intermediate_size": 70,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": 2048,
    "query_pre_attn_scalar": 12,
    "sliding_window": 16,
}


class Adapter(nn.Module):
    """Stacks of positions, a layer, the product of two, and another; or without the product."""

    def __init__(self, text_width: int, gated: bool):
        super().__init__()
        self.mlp_adapter = nn.Sequential(nn.Linear(STACK * WIDTH, 5 * WIDTH), nn.SiLU())
        if gated:
            self.gate_proj = nn.Linear(5 * WIDTH, 5 * WIDTH)
            self.pool_proj = nn.Linear(5 * WIDTH, 5 * WIDTH)
        self.out_proj = nn.Linear(5 * WIDTH, text_width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.mlp_adapter(x.reshape(-1, STACK * WIDTH))
        if hasattr(self, "gate_proj"):
            x = nn.functional.silu(self.gate_proj(x)) * self.pool_proj(x)
        return self.out_proj(x)


class Meralion(nn.Module):
    def __init__(self, speech: Any, text: Any, gated: bool):
        from transformers import Gemma2ForCausalLM
        from transformers.models.whisper.modeling_whisper import WhisperEncoder

        super().__init__()
        self.speech_encoder = randomize(WhisperEncoder(speech), 41)
        self.text_decoder = randomize(Gemma2ForCausalLM(text), 42)
        self.ln_speech = nn.LayerNorm(WIDTH)
        self.speech_audio_adapter = Adapter(text.hidden_size, gated)
        torch.manual_seed(43)
        for part in (self.ln_speech, self.speech_audio_adapter):
            for p in part.parameters():
                nn.init.normal_(p, 1.0 if part is self.ln_speech else 0.0, 0.2)
        self.language_model = self.text_decoder

    def embedded(self, inputs: dict[str, Any], token: int) -> torch.Tensor:
        ids = inputs["input_ids"]
        x = self.text_decoder.get_input_embeddings()(ids).clone()
        if "input_features" in inputs:
            seen = self.speech_encoder(inputs["input_features"]).last_hidden_state
            x[ids == token] = self.speech_audio_adapter(self.ln_speech(seen))
        return x


def meralion(folder: Path, *, gated: bool = True) -> AudioOracle:
    """As published; or as MERaLiON-3's settings may say, with a projector without a product."""
    from transformers import Gemma2Config, WhisperConfig, WhisperFeatureExtractor

    tokens = tokenizer(SPECIAL, bos="<bos>")
    token = tokens.token_to_id(TOKEN)
    text = Gemma2Config(vocab_size=tokens.get_vocab_size() + 3, **TEXT)
    extractor = WhisperFeatureExtractor(feature_size=20, chunk_length=3)
    model = Meralion(WhisperConfig(**SPEECH), text, gated).eval()
    names = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"}
    save(folder, model.text_decoder, tokens, TEMPLATE, names, eos=["<eos>", "<end_of_turn>"])
    tensors = {
        name: tensor.contiguous()
        for name, tensor in model.state_dict().items()
        if not name.startswith("language_model.") and not name.endswith("lm_head.weight")
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = {
        "model_type": "meralion2" if gated else "meralion3",
        "speech_config": SPEECH | {"model_type": "whisper"},
        "text_config": text.to_diff_dict() | {"model_type": "gemma2"},
        "speech_mlp_scale_factor": STACK,
        "speech_token_index": token,
        **({} if gated else {"speech_mlp_use_projection": False}),
    }
    write(folder, "config.json", config)
    write(folder, "preprocessor_config.json", mel_settings(extractor))
    processor = {"time_duration_limit": 6, "whisper_chunk_size": 3, "do_normalize": True}
    write(folder, "processor_config.json", processor)

    def extract(audio: Sequence[np.ndarray]) -> dict[str, Any]:
        """As MERaLiON2Processor does."""
        chunks, counts = [], []
        for one in audio:
            count = min(-(-len(one) // WINDOW), LIMIT)
            chunks += [one[at * WINDOW : (at + 1) * WINDOW] for at in range(count)]
            counts.append(count * SPEECH["max_source_positions"] // STACK)
        made = extractor(
            chunks,
            sampling_rate=16_000,
            return_tensors="pt",
            return_attention_mask=True,
            padding="max_length",
            do_normalize=True,
        )
        return {"input_features": made["input_features"], "counts": counts}

    @torch.no_grad()
    def features(inputs: dict[str, Any]) -> torch.Tensor:
        return model.embedded(inputs, token)[inputs["input_ids"] == token]

    def in_a_string(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """As the authors write a prompt: text, with the token where audio belongs."""
        return [
            {**m, "content": "".join(p.get("text", TOKEN) for p in m["content"])} for m in messages
        ]

    return AudioOracle(
        folder,
        Answers(model, token),
        extract,
        lambda made: made.pop("counts"),
        features,
        lambda count: TOKEN * count,
        TOKEN,
        seconds=7.0001,
        window=WINDOW,
        arranged=in_a_string,
    )
