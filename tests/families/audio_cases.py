"""Random tiny checkpoints of families that take audio, with transformers' own feature extractors
and models of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import load_tokenizer, randomize, save, template_of, tokenizer, write
from gemma4 import NAMES, RANGES, SPECIAL, TEXT


@dataclass
class AudioOracle:
    """`extract` makes model inputs of samples [N] each; `tiles` gives them as ours come; `text`
    stands for one recording of so many tokens.
    """

    folder: Path
    model: Any
    extract: Callable[[Sequence[np.ndarray]], dict[str, Any]]
    counts: Callable[[dict[str, Any]], list[int]]
    features: Callable[[dict[str, Any]], torch.Tensor]
    """[tokens of all, D]"""
    text: Callable[[int], str]

    def inputs(self, messages: list[dict[str, Any]], audio: Sequence[np.ndarray]) -> dict[str, Any]:
        """What transformers' processor would make of a conversation."""
        from transformers.utils.chat_template_utils import render_jinja_template

        made = self.extract(audio) if len(audio) else {}
        (rendered,), _ = render_jinja_template(
            [messages],
            chat_template=template_of(self.folder),
            add_generation_prompt=True,
            **load_tokenizer(self.folder).special_tokens_map,
        )
        texts = rendered.split(self.marker)
        counts = self.counts(made) if made else []
        text = texts[0] + "".join(
            self.text(count) + rest for count, rest in zip(counts, texts[1:], strict=True)
        )
        ids = load_tokenizer(self.folder)(text, add_special_tokens=False, return_tensors="pt")
        return {**ids, **made}

    marker: str = "<|audio|>"

    @torch.no_grad()
    def logits(self, inputs: dict[str, Any]) -> torch.Tensor:
        result: torch.Tensor = self.model(**inputs).logits[0, -1]
        return result

    @torch.no_grad()
    def greedy(self, inputs: dict[str, Any], n: int) -> list[int]:
        result = self.model.generate(**inputs, max_new_tokens=n, do_sample=False)
        return [int(i) for i in result[0, inputs["input_ids"].shape[1] :]]


TEMPLATE = """{{ bos_token }}{% for m in messages %}{{ '<|turn>' + ('model' if m.role == 'assistant' else m.role) + '\\n' }}\
{% if m.content is string %}{{ m.content | trim }}{% else %}{% for c in m.content %}{% if c.type == 'image' %}{{ '\\n\\n<|image|>\\n\\n' }}\
{% elif c.type == 'audio' %}{{ '<|audio|>' }}{% elif c.type == 'text' %}{{ c.text | trim }}{% endif %}{% endfor %}{% endif %}{{ '<turn|>\\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|turn>model\\n' }}{% endif %}"""


def gemma4_unified(folder: Path) -> AudioOracle:
    from transformers import Gemma4UnifiedConfig, Gemma4UnifiedForConditionalGeneration
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
    model = randomize(Gemma4UnifiedForConditionalGeneration(config), 3, **RANGES)
    model = save(folder, model, tokens, TEMPLATE, NAMES, eos=["<eos>", "<turn|>"])
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

    return AudioOracle(
        folder,
        model,
        lambda audio: dict(extractor(list(audio), return_tensors="pt")),
        lambda made: [int(mask.sum()) for mask in made["input_features_mask"]],
        features,
        lambda count: f"<|audio>{'<|audio|>' * count}<audio|>",
    )


CASES: dict[str, Callable[[Path], AudioOracle]] = {"gemma4_unified": gemma4_unified}
