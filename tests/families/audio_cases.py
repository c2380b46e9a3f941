"""Random tiny checkpoints of families that take audio, with transformers' own feature extractors
and models of them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import gemma3n
import numpy as np
import phi4_multimodal
import torch
from audio_oracle import AudioOracle
from common import Oracle, build_processor, randomize, save, tokenizer, write
from gemma4 import NAMES, RANGES, SMALL, SPECIAL, TEXT
from gemma4 import gemma4 as gemma4_that_sees
from published import old_settings
from safetensors.torch import load_file, save_file
from torchvision_stand_in import torchvision_here

TEMPLATE = """{{ bos_token }}{% for m in messages %}{{ '<|turn>' + ('model' if m.role == 'assistant' else m.role) + '\\n' }}\
{% if m.content is string %}{{ m.content | trim }}{% else %}{% for c in m.content %}{% if c.type == 'image' %}{{ '\\n\\n<|image|>\\n\\n' }}\
{% elif c.type == 'audio' %}{{ '<|audio|>' }}{% elif c.type == 'text' %}{{ c.text | trim }}{% endif %}{% endfor %}{% endif %}{{ '<turn|>\\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|turn>model\\n' }}{% endif %}"""


def gemma4_unified(folder: Path) -> AudioOracle:
    from transformers import (
        Gemma4UnifiedConfig,
        Gemma4UnifiedForConditionalGeneration,
        Gemma4UnifiedProcessor,
    )
    from transformers.models.gemma4_unified.feature_extraction_gemma4_unified import (
        Gemma4UnifiedAudioFeatureExtractor,
    )

    tokens = tokenizer(SPECIAL)
    token = {name: tokens.token_to_id(spelling) for name, spelling in NAMES.items()}
    text = TEXT | {
        "vocab_size": tokens.get_vocab_size() + 3,
        "bos_token_id": token["bos_token"],
        "eos_token_id": token["eos_token"],
        "pad_token_id": token["pad_token"],
    }
    del text["hidden_size_per_layer_input"]
    config = Gemma4UnifiedConfig(
        vision_config={
            "mm_embed_dim": 40,
            "output_proj_dims": 40,
            "mm_posemb_size": 300,
            "patch_size": 4,
            "pooling_kernel_size": 3,
        },
        audio_config={"audio_embed_dim": 50},
        text_config=text,
        image_token_id=token["image_token"],
        boi_token_id=token["boi_token"],
        eoi_token_id=token["eoi_token"],
        boa_token_id=token["boa_token"],
        eoa_token_index=token["eoa_token"],
        audio_token_id=token["audio_token"],
        video_token_id=tokens.token_to_id("<|video|>"),
    )
    model = randomize(Gemma4UnifiedForConditionalGeneration(config), 4, **RANGES)
    model = save(folder, model, tokens, TEMPLATE, NAMES, eos=["<eos>", "<turn|>"])
    with torchvision_here():
        from transformers.models.gemma4_unified.image_processing_gemma4_unified import (
            Gemma4UnifiedImageProcessor,
        )
    images = {"patch_size": 4, "pooling_kernel_size": 3, "max_soft_tokens": 70}
    settings = {"audio_samples_per_token": 50, "feature_size": 50, "sampling_rate": 1000}
    write(
        folder, "processor_config.json", {"image_processor": images, "feature_extractor": settings}
    )
    extractor = Gemma4UnifiedAudioFeatureExtractor(**settings)

    @torch.no_grad()
    def features(inputs: dict[str, Any]) -> torch.Tensor:
        made = model.model.get_audio_features(
            inputs["input_features"], inputs["input_features_mask"], return_dict=True
        )
        return made.pooler_output[inputs["input_features_mask"]]

    pictures = build_processor(
        Gemma4UnifiedProcessor,
        folder,
        Gemma4UnifiedImageProcessor(**images),
        videos=True,
        feature_extractor=extractor,
    )
    return AudioOracle(
        folder,
        model,
        lambda audio: dict(extractor(list(audio), return_tensors="pt")),
        lambda made: [int(mask.sum()) for mask in made["input_features_mask"]],
        features,
        lambda count: f"<|audio>{'<|audio|>' * count}<audio|>",
        window=12_500,
        sees=Oracle(folder, model, pictures, token["image_token"]),
    )


def gemma4(folder: Path) -> AudioOracle:
    from transformers.models.gemma4.feature_extraction_gemma4 import Gemma4AudioFeatureExtractor

    audio = {
        "hidden_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "subsampling_conv_channels": [20, 6],
        "output_proj_dims": 40,
    }
    oracle = gemma4_that_sees(
        folder,
        seed=7,  # no answer of 48 tokens has one of media in it, which transformers reads as pad
        text=SMALL,
        vision={"use_clipped_linears": True},
        audio=audio,
        template=TEMPLATE,
    )
    settings = {"feature_size": 18}
    processor = json.loads((folder / "processor_config.json").read_text())
    write(folder, "processor_config.json", {**processor, "feature_extractor": settings})
    extractor, model = Gemma4AudioFeatureExtractor(**settings), oracle.model

    @torch.no_grad()
    def features(inputs: dict[str, Any]) -> torch.Tensor:
        return _at_the_decoder(model, model.model.language_model, inputs)

    return AudioOracle(
        folder,
        model,
        lambda recordings: dict(extractor(list(recordings), return_tensors="pt")),
        lambda made: [int(mask[::4].sum()) for mask in made["input_features_mask"]],
        features,
        lambda count: f"<|audio>{'<|audio|>' * count}<audio|>",
        shortest=161,
        window=480_000,
        sees=oracle,
    )


WHISPER_SPECIAL = ("<|AUDIO|>", "<|end|>", "<|pad|>")
WHISPER_TEMPLATE = """{% for m in messages %}{{ m.role }}: {% if m.content is string %}{{ m.content }}{% else %}\
{% for c in m.content %}{% if c.type == 'audio' %}{{ '<|AUDIO|>' }}{% elif c.type == 'text' %}{{ c.text }}{% endif %}{% endfor %}\
{% endif %}{{ '<|end|>' }}{% endfor %}{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"""
WHISPER_TEXT = {
    "hidden_size": 48,
    "intermediate_size": 70,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
}


def mel_settings(extractor: Any) -> dict[str, Any]:
    names = ("feature_size", "sampling_rate", "hop_length", "chunk_length", "n_fft")
    return {name: getattr(extractor, name) for name in (*names, "padding_value", "dither")}


def _saved(
    folder: Path, model: Any, template: str, marker: str, extractor: Any, more: tuple[str, ...] = ()
) -> Any:
    special = (marker, *WHISPER_SPECIAL[1:], *more)
    names = {"eos_token": "<|end|>", "pad_token": "<|pad|>"}
    model = save(folder, model, tokenizer(special), template, names, eos="<|end|>")
    write(folder, "preprocessor_config.json", mel_settings(extractor))
    return model


def qwen2_audio(folder: Path) -> AudioOracle:
    from transformers import (
        Qwen2AudioConfig,
        Qwen2AudioForConditionalGeneration,
        WhisperFeatureExtractor,
    )

    tokens = tokenizer(WHISPER_SPECIAL)
    rows = tokens.get_vocab_size() + 3
    config = Qwen2AudioConfig(
        audio_config={
            "d_model": 36,
            "encoder_ffn_dim": 50,
            "encoder_attention_heads": 3,
            "encoder_layers": 2,
            "num_mel_bins": 20,
            "max_source_positions": 100,
        },
        text_config={"model_type": "qwen2", "vocab_size": rows, **WHISPER_TEXT},
        audio_token_index=tokens.token_to_id("<|AUDIO|>"),
    )
    extractor = WhisperFeatureExtractor(feature_size=20, chunk_length=2)
    model = randomize(Qwen2AudioForConditionalGeneration(config), 5)
    model = _saved(folder, model, WHISPER_TEMPLATE, "<|AUDIO|>", extractor)

    def extract(audio: Sequence[np.ndarray]) -> dict[str, Any]:
        made = extractor(
            list(audio),
            sampling_rate=16_000,
            return_attention_mask=True,
            padding="max_length",
            return_tensors="pt",
        )
        return {
            "input_features": made["input_features"],
            "feature_attention_mask": made["attention_mask"],
        }

    def counts(made: dict[str, Any]) -> list[int]:
        lengths = made["feature_attention_mask"].sum(-1).tolist()
        return [((length - 1) // 2 + 1 - 2) // 2 + 1 for length in lengths]

    @torch.no_grad()
    def features(inputs: dict[str, Any]) -> torch.Tensor:
        return _at_the_decoder(model, model.model.language_model, inputs)

    return AudioOracle(
        folder,
        model,
        extract,
        counts,
        features,
        lambda count: "<|AUDIO|>" * count,
        "<|AUDIO|>",
        1100,
        window=32_000,
    )


def voxtral(folder: Path) -> AudioOracle:
    from transformers import VoxtralConfig, VoxtralForConditionalGeneration, WhisperFeatureExtractor

    tokens = tokenizer(("[AUDIO]", *WHISPER_SPECIAL[1:]))
    rows = tokens.get_vocab_size() + 3
    config = VoxtralConfig(
        audio_config={
            "hidden_size": 24,
            "intermediate_size": 96,
            "num_attention_heads": 3,
            "num_hidden_layers": 2,
            "num_mel_bins": 20,
            "max_source_positions": 52,
        },
        text_config={"model_type": "llama", "vocab_size": rows, "head_dim": 12, **WHISPER_TEXT},
        audio_token_id=tokens.token_to_id("[AUDIO]"),
    )
    extractor = WhisperFeatureExtractor(feature_size=20, chunk_length=1)
    frames, window = 104, 104 * 160
    model = randomize(VoxtralForConditionalGeneration(config), 6)
    template = WHISPER_TEMPLATE.replace("<|AUDIO|>", "[AUDIO]")
    model = _saved(folder, model, template, "[AUDIO]", extractor)

    def extract(audio: Sequence[np.ndarray]) -> dict[str, Any]:
        made = []
        for samples in audio:
            spectrum = extractor(
                samples,
                sampling_rate=16_000,
                padding=True,
                truncation=False,
                pad_to_multiple_of=window,
                return_tensors="pt",
            )["input_features"]
            made.append(spectrum.reshape(20, -1, frames).transpose(0, 1))
        return {"input_features": torch.cat(made), "windows": [len(one) for one in made]}

    def counts(made: dict[str, Any]) -> list[int]:
        return [13 * count for count in made.pop("windows")]

    @torch.no_grad()
    def features(inputs: dict[str, Any]) -> torch.Tensor:
        return _at_the_decoder(model, model.model.language_model, inputs)

    return AudioOracle(
        folder,
        model,
        extract,
        counts,
        features,
        lambda count: "[AUDIO]" * count,
        "[AUDIO]",
        window=window,
    )


def qwen3_asr(folder: Path) -> AudioOracle:
    from transformers import Qwen3ASRConfig, Qwen3ASRForConditionalGeneration
    from transformers.models.qwen3_asr.feature_extraction_qwen3_asr import Qwen3ASRFeatureExtractor

    around = "<|audio_start|>", "<|audio_end|>"
    marker = "<|audio_pad|>".join(around)
    tokens = tokenizer(("<|audio_pad|>", *WHISPER_SPECIAL[1:], *around))
    config = Qwen3ASRConfig(
        audio_config={
            "d_model": 24,
            "encoder_ffn_dim": 40,
            "encoder_attention_heads": 3,
            "encoder_layers": 2,
            "num_mel_bins": 22,
            "downsample_hidden_size": 10,
            "output_dim": 48,
        },
        text_config={
            "model_type": "qwen3",
            "vocab_size": tokens.get_vocab_size() + 3,
            "head_dim": 12,
            **WHISPER_TEXT,
        },
        audio_token_id=tokens.token_to_id("<|audio_pad|>"),
        tie_word_embeddings=False,
    )
    extractor = Qwen3ASRFeatureExtractor(feature_size=22)
    model = randomize(Qwen3ASRForConditionalGeneration(config), 8)
    template = WHISPER_TEMPLATE.replace("<|AUDIO|>", marker)
    model = _saved(folder, model, template, "<|audio_pad|>", extractor, around)

    def extract(audio: Sequence[np.ndarray]) -> dict[str, Any]:
        made = [
            extractor(one, sampling_rate=16_000, padding=True, return_attention_mask=True)
            for one in audio
        ]
        spectra = [one["input_features"][0].T for one in made]
        masks = [one["attention_mask"][0] for one in made]
        return {
            "input_features": torch.nn.utils.rnn.pad_sequence(spectra, True).transpose(1, 2),
            "input_features_mask": torch.nn.utils.rnn.pad_sequence(masks, True),
        }

    def counts(made: dict[str, Any]) -> list[int]:
        lengths = made["input_features_mask"].sum(-1).tolist()
        return [13 * (length // 100) + -(-(length % 100) // 8) for length in lengths]

    @torch.no_grad()
    def features(inputs: dict[str, Any]) -> torch.Tensor:
        return _at_the_decoder(model, model.model.language_model, inputs)

    return AudioOracle(
        folder,
        model,
        extract,
        counts,
        features,
        lambda count: ("<|audio_pad|>" * count).join(around),
        marker,
    )


# As the authors', it shows neither what users write nor answers.
AUTHORS_TEMPLATE = """<|im_start|>system
{% for m in messages if m.role == 'system' %}{{ m.content }}{% endfor %}<|end|>
<|im_start|>user
{% for m in messages if m.content is not string %}{% for c in m.content if c.type == 'audio' %}\
<|audio_start|><|audio_pad|><|audio_end|>{% endfor %}{% endfor %}<|end|>
{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def qwen3_asr_published(folder: Path) -> AudioOracle:
    """As it lies on the hub: the thinker of a larger model, vocabulary and merges as two files."""
    from transformers import Qwen2Tokenizer

    oracle = qwen3_asr(folder)
    path = folder / "model.safetensors"
    names = {"language_model.": "model.", "audio_tower.": "audio_tower."}
    names |= {f"multi_modal_projector.linear_{n}": f"audio_tower.proj{n}" for n in (1, 2)}

    def renamed(name: str) -> str:
        name = name.removeprefix("model.")
        old = next((key for key in names if name.startswith(key)), "")
        return f"thinker.{names.get(old, '')}{name.removeprefix(old)}"

    tensors = {renamed(name): tensor for name, tensor in load_file(path).items()}
    assert {"thinker.lm_head.weight", "thinker.audio_tower.proj2.bias"} <= set(tensors)
    save_file(tensors, path, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    old_settings(config["text_config"], mrope=False)
    config["audio_config"]["model_type"] = "qwen3_asr_audio_encoder"
    thinker = {key: config[key] for key in ("audio_config", "text_config", "audio_token_id")}
    whole = {"model_type": "qwen3_asr", "support_languages": ["German"]}
    write(folder, "config.json", whole | {"thinker_config": whole | thinker})
    tokens = json.loads((folder / "tokenizer.json").read_text())
    added = {str(one.pop("id")): one for one in tokens["added_tokens"]}
    ids = {text: i for text, i in tokens["model"]["vocab"].items() if str(i) not in added}
    write(folder, "vocab.json", ids)
    merges = "\n".join(" ".join(pair) for pair in tokens["model"]["merges"])
    (folder / "merges.txt").write_text(f"#version: 0.2\n{merges}\n")
    named = {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|end|>", "pad_token": "<|pad|>"}
    write(folder, "tokenizer_config.json", named | {"added_tokens_decoder": added})
    write(folder, "chat_template.json", {"chat_template": AUTHORS_TEMPLATE})
    for name in ("tokenizer.json", "chat_template.jinja", "processor_config.json"):
        (folder / name).unlink(missing_ok=True)

    def in_system(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        heard = [part for part in messages[0]["content"] if part["type"] == "audio"]
        text = messages[0]["content"][-1]["text"]
        return [{"role": "system", "content": text}, {"role": "user", "content": heard}]

    return replace(
        oracle,
        tokens=Qwen2Tokenizer.from_pretrained(folder),
        template=AUTHORS_TEMPLATE,
        arranged=in_system,
    )


def qwen_omni_case(folder: Path, *, three: bool = False) -> AudioOracle:
    """A thinker that hears, with the oracle of its eyes."""
    import qwen_omni
    from transformers import WhisperFeatureExtractor

    oracle = qwen_omni.omni(folder, three=three, seed=7 + three)
    model = oracle.model
    extractor = WhisperFeatureExtractor(feature_size=qwen_omni.BINS, chunk_length=9)
    settings = json.loads((folder / "preprocessor_config.json").read_text())
    write(folder, "preprocessor_config.json", settings | mel_settings(extractor))
    how: dict[str, Any] = {"padding": True, "truncation": False} if three else {}

    def extract(audio: Sequence[np.ndarray]) -> dict[str, Any]:
        made = [
            extractor(
                one, sampling_rate=16_000, return_attention_mask=True, return_tensors="pt", **how
            )
            for one in audio
        ]
        longest = max(one["attention_mask"].shape[1] for one in made)
        return {
            name: torch.cat(
                [
                    torch.nn.functional.pad(one[key], (0, longest - one[key].shape[-1]))
                    for one in made
                ]
            )
            for name, key in (
                ("input_features", "input_features"),
                ("feature_attention_mask", "attention_mask"),
            )
        }

    def counts(made: dict[str, Any]) -> list[int]:
        lengths = made["feature_attention_mask"].sum(-1).tolist()
        if three:
            return [13 * (length // 100) + -(-(length % 100) // 8) for length in lengths]
        return [((length - 1) // 2 + 1 - 2) // 2 + 1 for length in lengths]

    @torch.no_grad()
    def features(inputs: dict[str, Any]) -> torch.Tensor:
        body = model.model
        rows = _at_the_decoder(model, getattr(body, "language_model", body), inputs)
        stacked = len(getattr(model.config.vision_config, "deepstack_visual_indexes", ()))
        return torch.nn.functional.pad(rows, (0, stacked * rows.shape[1]))

    around = "<|audio_bos|>", "<|audio_eos|>"
    return AudioOracle(
        folder,
        model,
        extract,
        counts,
        features,
        lambda count: ("<|AUDIO|>" * count).join(around),
        "<|AUDIO|>".join(around),
        201 if three else 321,  # as many as transformers takes
        seconds=8.6301 if three else 4.3701,
        # the reference fills up shorter ones as far as the longest of them
        several=(1.35, 1.6, 1.0) if three else (0.35, 0.6, 0.35),
        window=16_000 if three else 32_000,
        sees=oracle,
    )


def _windows(extractor: Any, window: int) -> Callable[[Sequence[np.ndarray]], dict[str, Any]]:
    """What AudioFlamingo3Processor and GlmAsrProcessor make of recordings: windows of so many
    samples, each with a spectrum of its own.
    """

    def extract(audio: Sequence[np.ndarray]) -> dict[str, Any]:
        parts = [[one[at : at + window] for at in range(0, len(one), window)] for one in audio]
        made = extractor(
            [part for of_one in parts for part in of_one],
            sampling_rate=16_000,
            return_attention_mask=True,
            return_tensors="pt",
        )
        return {
            "input_features": made["input_features"],
            "input_features_mask": made["attention_mask"],
            "windows": [len(of_one) for of_one in parts],
        }

    return extract


def _lengths(made: dict[str, Any]) -> list[int]:
    """Frames of each recording that are heard."""
    frames = made["input_features_mask"].sum(-1).split(made.pop("windows"))
    return [int(one.sum()) for one in frames]


def audio_flamingo3(folder: Path, *, music: bool = False) -> AudioOracle:
    """`music`: Music Flamingo, of the same encoder, whose tokens are turned by their times."""
    import transformers
    from transformers import WhisperFeatureExtractor

    kind = "MusicFlamingo" if music else "AudioFlamingo3"
    begin, end = around = ("<|sound_bos|>", "<|sound_eos|>") if music else ("", "")
    more = around if music else ()
    tokens = tokenizer(("<sound>", *WHISPER_SPECIAL[1:], *more))
    rows = tokens.get_vocab_size() + 3
    named = {"audio_bos_token_id": begin, "audio_eos_token_id": end} if music else {}
    config = getattr(transformers, f"{kind}Config")(
        audio_config={
            "model_type": "audioflamingo3_encoder",
            "hidden_size": 24,
            "intermediate_size": 40,
            "num_attention_heads": 3,
            "num_hidden_layers": 3,
            "num_mel_bins": 20,
            "max_source_positions": 50,
        },
        text_config={"model_type": "qwen2", "vocab_size": rows, **WHISPER_TEXT},
        audio_token_id=tokens.token_to_id("<sound>"),
        **{key: tokens.token_to_id(text) for key, text in named.items()},
    )
    extractor = WhisperFeatureExtractor(feature_size=20, chunk_length=1)
    model = randomize(getattr(transformers, f"{kind}ForConditionalGeneration")(config), 8)
    template = WHISPER_TEMPLATE.replace("<|AUDIO|>", "<sound>")
    model = _saved(folder, model, template, "<sound>", extractor, more)

    @torch.no_grad()
    def features(inputs: dict[str, Any]) -> torch.Tensor:
        return _at_the_decoder(model, model.model.language_model, inputs)

    return AudioOracle(
        folder,
        model,
        _windows(extractor, 16_000),
        lambda made: [((length - 1) // 2 - 1) // 2 + 1 for length in _lengths(made)],
        features,
        lambda count: begin + "<sound>" * count + end,
        "<sound>",
        shortest=321,  # that have a token
        # transformers fails for the latter where the last window has no token
        window=16_321 if music else 16_000,
    )


def glm_asr(folder: Path) -> AudioOracle:
    from transformers import GlmAsrConfig, GlmAsrForConditionalGeneration, WhisperFeatureExtractor

    begin, end = "<|begin_of_audio|>", "<|end_of_audio|>"
    tokens = tokenizer(("<|pad|>", "<|end|>", begin, end))
    rows = tokens.get_vocab_size() + 3
    config = GlmAsrConfig(
        audio_config={
            "hidden_size": 24,
            "intermediate_size": 96,
            "num_attention_heads": 3,
            "num_hidden_layers": 2,
            "num_mel_bins": 20,
        },
        text_config={
            "model_type": "llama",
            "vocab_size": rows,
            "eos_token_id": None,
            **WHISPER_TEXT,
        },
        audio_token_id=tokens.token_to_id("<|pad|>"),
    )
    extractor = WhisperFeatureExtractor(feature_size=20, chunk_length=2)
    model = randomize(GlmAsrForConditionalGeneration(config), 9)
    template = WHISPER_TEMPLATE.replace("<|AUDIO|>", f"{begin}<|pad|>{end}")
    names = {"eos_token": "<|end|>", "pad_token": "<|end|>"}
    model = save(folder, model, tokens, template, names, eos="<|end|>")
    write(folder, "preprocessor_config.json", mel_settings(extractor))

    @torch.no_grad()
    def features(inputs: dict[str, Any]) -> torch.Tensor:
        return _at_the_decoder(model, model.model.language_model, inputs)

    return AudioOracle(
        folder,
        model,
        _windows(extractor, 32_000),
        lambda made: [((length - 1) // 2 + 1) // 4 for length in _lengths(made)],
        features,
        lambda count: f"{begin}{'<|pad|>' * count}{end}",
        f"{begin}<|pad|>{end}",
        shortest=961,  # that have a token
        seconds=2.3001,
        window=32_000,
    )


def granite_speech(folder: Path) -> AudioOracle:
    from transformers import GraniteSpeechConfig, GraniteSpeechForConditionalGeneration
    from transformers.audio_utils import mel_filter_bank, spectrogram, window_function

    tokens = tokenizer(("<|audio|>", *WHISPER_SPECIAL[1:]))
    rows = tokens.get_vocab_size() + 3
    config = GraniteSpeechConfig(
        encoder_config={
            "input_dim": 36,
            "num_layers": 4,
            "hidden_dim": 24,
            "num_heads": 3,
            "output_dim": 11,
            "context_size": 20,
            "max_pos_emb": 25,
            "conv_kernel_size": 5,
        },
        projector_config={
            "model_type": "blip_2_qformer",
            "hidden_size": 24,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "intermediate_size": 40,
            "encoder_hidden_size": 24,
            "cross_attention_frequency": 1,
        },
        text_config={
            "model_type": "granite",
            "vocab_size": rows,
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.3,
            "residual_multiplier": 0.4,
            **WHISPER_TEXT,
        },
        audio_token_index=tokens.token_to_id("<|audio|>"),
        has_lora_adapter=False,
    )
    model = randomize(GraniteSpeechForConditionalGeneration(config), 10)
    for name, values in model.named_buffers():
        if "running" in name:
            values.uniform_(0.5, 1.5)
    template = WHISPER_TEMPLATE.replace("<|AUDIO|>", "<|audio|>")
    names = {"eos_token": "<|end|>", "pad_token": "<|pad|>"}
    model = save(folder, model, tokens, template, names, eos="<|end|>")
    settings = {"n_fft": 512, "win_length": 400, "hop_length": 160, "n_mels": 18}
    write(folder, "preprocessor_config.json", {"melspec_kwargs": settings, "sampling_rate": 16000})
    filters = mel_filter_bank(257, 18, 0, 8000, 16_000, None, "htk")

    def pairs(samples: np.ndarray) -> torch.Tensor:
        """As GraniteSpeechFeatureExtractor makes them by torchaudio."""
        window = window_function(400, "hann", frame_length=512)
        power = spectrogram(samples, window, 512, 160, power=2.0, mel_filters=filters)
        logs = torch.from_numpy(power.T).float().clamp(min=1e-10).log10()
        logs = torch.maximum(logs, logs.max() - 8.0) / 4 + 1
        return logs[: len(logs) // 2 * 2].reshape(-1, 36)

    def extract(audio: Sequence[np.ndarray]) -> dict[str, Any]:
        made = [pairs(one) for one in audio]
        counts = [-(-len(one) // 15) * 3 for one in made]
        return {"parts": made, "counts": counts}

    @torch.no_grad()
    def features(inputs: dict[str, Any]) -> torch.Tensor:
        return _at_the_decoder(whole, model.model.language_model, inputs)

    class Apart:
        """The model, which hears several recordings one by one: without padding."""

        config, body = model.config, model

        def __call__(
            self, *, parts: list[torch.Tensor], input_ids: torch.Tensor, **more: Any
        ) -> Any:
            return model(inputs_embeds=self.embedded(parts, input_ids), **more)

        def generate(
            self, *, parts: list[torch.Tensor], input_ids: torch.Tensor, **more: Any
        ) -> torch.Tensor:
            embeds = self.embedded(parts, input_ids)
            made = model.generate(inputs_embeds=embeds, **more)
            return torch.cat((input_ids, made), 1)

        def embedded(self, parts: list[torch.Tensor], input_ids: torch.Tensor) -> torch.Tensor:
            if not parts:
                return model.get_input_embeddings()(input_ids)
            rows = [model.model.get_audio_features(one[None]).pooler_output[0] for one in parts]
            return model.model.get_merged_audio_embeddings(input_ids, torch.cat(rows)[None])

    whole = Apart()
    return AudioOracle(
        folder,
        whole,
        extract,
        lambda made: made.pop("counts"),
        features,
        lambda count: "<|audio|>" * count,
        "<|audio|>",
        shortest=257,  # that the spectrum reflects
        window=6400,
    )


def _at_the_decoder(model: Any, decoder: Any, inputs: dict[str, Any]) -> torch.Tensor:
    """What stands at the audio tokens where the text model begins."""
    seen: dict[str, Any] = {}
    hook = decoder.register_forward_pre_hook(
        lambda _, __, kwargs: seen.update(kwargs), with_kwargs=True
    )
    try:
        model(**inputs)
    finally:
        hook.remove()
    token = getattr(model.config, "audio_token_id", None) or model.config.audio_token_index
    rows: torch.Tensor = seen["inputs_embeds"][inputs["input_ids"] == token]
    return rows


CASES: dict[str, Callable[[Path], AudioOracle]] = {
    "audio_flamingo3": audio_flamingo3,
    "gemma3n": gemma3n.heard,
    "gemma4": gemma4,
    "gemma4_unified": gemma4_unified,
    "glm_asr": glm_asr,
    "granite_speech": granite_speech,
    "music_flamingo": partial(audio_flamingo3, music=True),
    "phi4_multimodal": phi4_multimodal.heard,
    "qwen2_audio": qwen2_audio,
    "qwen3_asr": qwen3_asr,
    "qwen3_asr, as published": qwen3_asr_published,
    "qwen2_5_omni": qwen_omni_case,
    "qwen3_omni": partial(qwen_omni_case, three=True),
    "voxtral": voxtral,
}
