"""Phi-4-multimodal: SigLIP over a whole picture and tiles that end with it, a conformer over audio,
and Phi-4-mini with an adapter for each.
"""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from audio_oracle import AudioOracle
from common import Oracle, Row, build_processor, randomize, save, tokenizer, write
from phi3 import TEXT, long
from safetensors.torch import load_file, save_file
from torchvision_stand_in import torchvision_here

IMAGE, AUDIO = "<|endoftext10|>", "<|endoftext11|>"
SPECIAL = ("<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>", IMAGE, AUDIO)
NAMES = {
    "eos_token": "<|endoftext|>",
    "pad_token": "<|endoftext|>",
    "extra_special_tokens": {"image_token": IMAGE, "audio_token": AUDIO},
}
TEMPLATE = """{% for m in messages %}{{ '<|' + m.role + '|>' }}{% if m.content is string %}{{ m.content }}{% else %}{% for c in m.content %}\
{% if c.type == 'image' %}<|endoftext10|>{% elif c.type == 'audio' %}<|endoftext11|>{% elif c.type == 'text' %}{{ c.text }}{% endif %}{% endfor %}\
{% endif %}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"""
# As the authors have it
PLAIN_TEMPLATE = """{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"""
PATCH, SIDE = 14, 448  # transformers' processor counts tokens of these alone
VISION = {
    "hidden_size": 36,
    "intermediate_size": 50,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
}
EARS = {
    "hidden_size": 24,
    "intermediate_size": 30,
    "num_blocks": 2,
    "num_attention_heads": 3,
    "ext_pw_out_channel": 24,
    "depthwise_separable_out_channel": 24,
    "input_size": 20,
    "nemo_conv_channels": 6,
}
FEATURES = {"feature_size": 20}


class SeeingOracle(Oracle):
    """Phi4MultimodalForCausalLM, whose inputs have names of their own."""

    def pixels(self, inputs: Any) -> list[np.ndarray]:
        result = []
        for tiles, masks, size in zip(
            inputs.get("image_pixel_values", ()),
            inputs.get("image_attention_mask", ()),
            inputs.get("image_sizes", ()),
            strict=True,
        ):
            count = 1 + int(size.prod()) // SIDE**2
            for tile, mask in zip(tiles[:count], masks[:count].bool(), strict=True):
                rows, columns = int(mask[:, 0].sum()), int(mask[0].sum())
                result.append(tile[:, : rows * PATCH, : columns * PATCH].numpy())
        return result

    @torch.no_grad()
    def image_features(self, inputs: Any) -> torch.Tensor:
        seen: list[torch.Tensor] = []
        hook = self.model.model.layers[0].register_forward_pre_hook(
            lambda _, args: seen.append(args[0])
        )
        try:
            self.model(**inputs)
        finally:
            hook.remove()
        return seen[0][inputs["input_ids"] == self.image_token]


class Apart:
    """The model, which hears several recordings one by one: padding is heard otherwise. `adapted`
    is PEFT's model of it, with adapters for pictures and for speech.
    """

    def __init__(self, body: Any):
        self.body, self.config, self.adapted = body, body.config, None

    def __call__(self, **inputs: Any) -> Any:
        embeds, others, switched = self._read(inputs)
        with switched:
            return self.body(inputs_embeds=embeds, **others)

    def generate(self, *, input_ids: torch.Tensor, **inputs: Any) -> torch.Tensor:
        embeds, others, switched = self._read({"input_ids": input_ids, **inputs})
        with switched:
            made = self.body.generate(inputs_embeds=embeds, **others)
        return torch.cat((input_ids, made), 1)

    def _read(
        self, inputs: dict[str, Any]
    ) -> tuple[torch.Tensor, dict[str, Any], AbstractContextManager[None]]:
        seen = {key: value for key, value in inputs.items() if key.startswith("image_")}
        parts = inputs.get("parts", [])
        others = {
            key: value
            for key, value in inputs.items()
            if key not in (*seen, "parts", "input_ids", "mm_token_type_ids")
        }
        switched: AbstractContextManager[None] = nullcontext()
        if self.adapted is not None:
            if seen or parts:
                self.adapted.set_adapter("vision" if seen else "speech")
            else:
                switched = self.adapted.disable_adapter()
        return self.embedded(inputs["input_ids"], parts, seen), others, switched

    def embedded(
        self, ids: torch.Tensor, parts: Sequence[torch.Tensor], seen: dict[str, Any]
    ) -> torch.Tensor:
        model = self.body.model
        embeds, extend = model.embed_tokens(ids), model.embed_tokens_extend
        if seen:
            embeds = extend.image_embed(ids, embeds, **seen)
        token, rows = self.config.audio_config.audio_token_id, []
        for part in parts:
            count = -(-len(part) // 8)
            alone = torch.full((1, count), token)
            made = extend.audio_embed(
                alone,
                torch.zeros(1, count, embeds.shape[2]),
                audio_input_features=part[None],
                audio_embed_sizes=[count],
                audio_attention_mask=None,
                audio_projection_mode="vision" if seen else "speech",
            )
            rows.append(made[0])
        if rows:
            embeds = embeds.clone()
            embeds[ids == token] = torch.cat(rows)
        return embeds


def phi4_multimodal(folder: Path, *, seed: int = 0) -> Oracle:
    from transformers import (
        Phi4MultimodalConfig,
        Phi4MultimodalFeatureExtractor,
        Phi4MultimodalForCausalLM,
        Phi4MultimodalProcessor,
    )

    with torchvision_here():
        from transformers.models.phi4_multimodal.image_processing_phi4_multimodal import (
            Phi4MultimodalImageProcessor,
        )
    words = tokenizer(SPECIAL)
    image, audio = words.token_to_id(IMAGE), words.token_to_id(AUDIO)
    settings = TEXT | {
        "vocab_size": words.get_vocab_size() + 3,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 16 * 4096,
        "rope_parameters": long(6, 0.75),
    }
    config = Phi4MultimodalConfig(
        **settings,
        vision_config=VISION | {"image_token_id": image},
        audio_config=EARS | {"audio_token_id": audio},
    )
    model = randomize(Phi4MultimodalForCausalLM(config), seed)
    normed = model.model.embed_tokens_extend.audio_embed.encoder.encoder_embedding
    normed.global_mean.normal_(8, 2)
    normed.global_invstd.uniform_(0.2, 0.5)
    model = save(folder, model, words, TEMPLATE, NAMES, eos=["<|endoftext|>", "<|end|>"])
    write(folder, "preprocessor_config.json", {"dynamic_hd": 4, **FEATURES})
    processor = build_processor(
        Phi4MultimodalProcessor,
        folder,
        Phi4MultimodalImageProcessor(dynamic_hd=4),
        audio_processor=Phi4MultimodalFeatureExtractor(**FEATURES),
    )
    return SeeingOracle(
        folder,
        model,
        processor,
        image,
        "one array [3, H, W] a tile, the whole first, each as far as the picture goes",
    )


def in_words_of_the_authors(folder: Path) -> None:
    """Names and settings as they lie on the hub, with adapters among the weights."""
    path = folder / "model.safetensors"
    names = {
        "feed_forward_in.gate_up_proj": "feed_forward_in.net.0.linear",
        "feed_forward_out.gate_up_proj": "feed_forward_out.net.0.linear",
        "feed_forward_in.down_proj": "feed_forward_in.net.2",
        "feed_forward_out.down_proj": "feed_forward_out.net.2",
        **{
            f"encoders.{n}.self_attn.{p}_proj": f"encoders.{n}.self_attn.linear_{p}"
            for n in range(2)
            for p in "qkv"
        },
        **{
            f"encoders.{n}.self_attn.o_proj": f"encoders.{n}.self_attn.linear_out" for n in range(2)
        },
        "up_proj_for_speech": "audio_projection.speech.0",
        "down_proj_for_speech": "audio_projection.speech.2",
        "up_proj_for_vision_speech": "audio_projection.vision.0",
        "down_proj_for_vision_speech": "audio_projection.vision.2",
        "img_projection_up": "img_projection.0",
        "img_projection_down": "img_projection.2",
        "sub_img_feature_extensor": "sub_GN",
        "global_img_feature_extensor": "glb_GN",
    }
    tensors = {}
    for name, tensor in load_file(path).items():
        for ours, theirs in names.items():
            name = name.replace(f".{ours}", f".{theirs}")
        if name == "model.embed_tokens_extend.image_embed.sub_GN":
            assert tensor.shape[:3] == (1, 1, 1)
        if ".layers." in name and name.endswith("_proj.weight") and "extend" not in name:
            base = name.removesuffix(".weight")
            name = f"{base}.base_layer.weight"
            for kind in ("speech", "vision"):
                tensors |= {f"{base}.lora_{part}.{kind}.weight": torch.zeros(3, 5) for part in "AB"}
        tensors[name] = tensor
    save_file(tensors, path, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    vision, ears = config.pop("vision_config"), config.pop("audio_config")
    config |= {
        "model_type": "phi4mm",
        "auto_map": {"AutoConfig": "configuration_phi4mm.Phi4MMConfig"},
        "vision_lora": {"r": 3},
        "speech_lora": {"r": 3},
        "embd_layer": {
            "image_embd_layer": {
                "crop_size": 448,
                "hd_transform_order": "sub_glb",
                "use_hd_transform": True,
                "with_learnable_separator": True,
            },
            "audio_embd_layer": {"downsample_rate": 1},
        },
        "audio_processor": {
            "name": "cascades",
            "config": {
                **{key: ears[key] for key in ("num_blocks", "input_size", "kernel_size")},
                "attention_dim": ears["hidden_size"],
                "attention_heads": ears["num_attention_heads"],
                "linear_units": ears["intermediate_size"],
                "ext_pw_out_channel": ears["ext_pw_out_channel"],
                "depthwise_seperable_out_channel": ears["depthwise_separable_out_channel"],
                "nemo_conv_settings": {"conv_channels": ears["nemo_conv_channels"]},
                "relative_attention_bias_args": {
                    "type": "t5",
                    "t5_bias_max_distance": ears["bias_max_distance"],
                },
            },
        },
    }
    assert vision["image_size"] == 448
    write(folder, "config.json", config)
    names_of_tokens = {k: v for k, v in NAMES.items() if k != "extra_special_tokens"}
    write(folder, "tokenizer_config.json", {"tokenizer_class": "GPT2Tokenizer", **names_of_tokens})
    (folder / "chat_template.jinja").write_text(PLAIN_TEMPLATE)


def with_adapters(whole: Apart, folder: Path) -> None:
    """One for pictures and one for audio, beside the model and in the folders that it has them."""
    import peft

    settings = peft.LoraConfig(r=3, lora_alpha=9, target_modules=r"model\.layers\..*_proj")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT's use of transformers
        whole.adapted = peft.get_peft_model(whole.body, settings, adapter_name="vision")
        whole.adapted.add_adapter("speech", settings)
        for name, parameter in whole.adapted.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.6)
        whole.adapted.save_pretrained(folder)
    for name in ("vision", "speech"):
        shutil.move(folder / name, folder / f"{name}-lora")


def heard(
    folder: Path, *, seed: int = 3, adapted: bool = False, published: bool = False
) -> AudioOracle:
    from transformers import Phi4MultimodalFeatureExtractor

    oracle = phi4_multimodal(folder, seed=seed)
    extractor = Phi4MultimodalFeatureExtractor(**FEATURES)
    whole = Apart(oracle.model)
    if adapted:
        with_adapters(whole, folder)
    if published:
        in_words_of_the_authors(folder)

    def extract(audio: Sequence[np.ndarray]) -> dict[str, Any]:
        made = [extractor(one, sampling_rate=16_000, return_tensors="pt") for one in audio]
        counts = [int(one["audio_embed_sizes"][0]) for one in made]
        return {"parts": [one["audio_input_features"][0] for one in made], "counts": counts}

    @torch.no_grad()
    def features(inputs: dict[str, Any]) -> torch.Tensor:
        seen = {key: value for key, value in inputs.items() if key.startswith("image_")}
        ids = inputs["input_ids"]
        token = whole.config.audio_config.audio_token_id
        return whole.embedded(ids, inputs["parts"], seen)[ids == token]

    return AudioOracle(
        folder,
        whole,
        extract,
        lambda made: made.pop("counts"),
        features,
        lambda count: AUDIO * count,
        AUDIO,
        shortest=400,  # that have a frame
        template=TEMPLATE,
        sees=oracle,
        window=4000 * 160 + 240,
    )


ROW = Row(
    "Phi-4-multimodal",
    {"text of Phi-4-mini": lambda f: phi4_multimodal(f)},
    notes="SigLIP over a whole and tiles that end with the picture, four patches a token; audio; an adapter of the decoder for each",
)
