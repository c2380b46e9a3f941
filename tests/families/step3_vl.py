"""Step3-VL: windows of a picture and the whole of it, a perception encoder, Qwen3's decoder.

transformers has its encoder and its image processor, as parts of Step-3.7, which has another
decoder. What lies between here is two lines; names and layout of the encoder's tensors are those
that transformers writes for published ones.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from common import Oracle, Row, build_processor, randomize, save, tokenizer, write
from deepseek_ocr import LAYOUT, views
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torchvision_stand_in import torchvision_here
from transformers import Qwen3Config, Qwen3ForCausalLM

SPECIAL = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<im_start>", "<im_end>", "<im_patch>"),
    *("<patch_start>", "<patch_end>", "<patch_newline>"),
)
NAMES = {"bos_token": None, "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
TEMPLATE = """{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}{% if m.content is string %}{{ m.content }}{% else %}\
{% for c in m.content %}{% if c.type == 'image' %}{{ '<im_patch>' }}{% elif c.type == 'text' %}{{ c.text }}{% endif %}{% endfor %}\
{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
VISION = {
    "width": 60,
    "layers": 3,
    "heads": 3,
    "mlp_ratio": 1.5,
    "image_size": 96,
    "patch_size": 4,
    "hidden_act": "quick_gelu",
    "ls_init_value": 0.1,
    "use_cls_token": False,
    "use_ln_post": False,
}
TEXT = {
    "hidden_size": 72,
    "intermediate_size": 90,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 20,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    "bos_token_id": None,
    "eos_token_id": None,
    "tie_word_embeddings": False,
}

SHARP = {"q_norm": (2.0, 0.3), "k_norm": (2.0, 0.3)}


class Step(Qwen3ForCausalLM):  # type: ignore[misc]
    def __init__(self, config: Any, tower: Any) -> None:
        super().__init__(config)
        self.vision_model = tower
        self.vit_large_projector = nn.Linear(
            4 * tower.config.hidden_size, config.hidden_size, bias=False
        )

    def save_pretrained(self, folder: Path) -> None:
        """The decoder's tensors, the projection and, under published names, the encoder's."""
        tensors = {
            name: tensor.contiguous()
            for name, tensor in self.state_dict().items()
            if not name.startswith("vision_model.")
            and not (name == "lm_head.weight" and self.config.tie_word_embeddings)
        }
        with tempfile.TemporaryDirectory() as beside:
            self.vision_model.save_pretrained(beside)
            eyes = load_file(Path(beside) / "model.safetensors")
        assert "conv1.weight" in eyes
        tensors |= {f"vision_model.{name}": tensor for name, tensor in eyes.items()}
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        self.generation_config.save_pretrained(folder)

    def seen(self, tiles: Tensor) -> Tensor:
        """tiles [N, 3, Y, X] -> [N, T, D]"""
        projected: Tensor = self.vit_large_projector(self.vision_model(tiles).last_hidden_state)
        return projected

    def forward(
        self,
        input_ids: Tensor,
        pixel_values: Tensor | None = None,
        pixel_values_local: Tensor | None = None,
        num_local_patches: Any = None,
        past_key_values: Any = None,
        **more: Any,
    ) -> Any:
        more.pop("inputs_embeds", None)
        x = self.model.embed_tokens(input_ids)
        begun = past_key_values is not None and past_key_values.get_seq_length() > 0
        if pixel_values is not None and not begun:
            local = iter(() if pixel_values_local is None else self.seen(pixel_values_local))
            rows: list[Tensor] = []
            for whole, count in zip(self.seen(pixel_values), num_local_patches, strict=True):
                rows += [next(local) for _ in range(int(count))]
                rows.append(whole)
            x[input_ids == self.config.image_token_id] = torch.cat(rows)
        return super().forward(inputs_embeds=x, past_key_values=past_key_values, **more)


def step3_vl(
    folder: Path,
    *,
    seed: int = 0,
    vision: dict[str, Any] | None = None,
    text: dict[str, Any] | None = None,
) -> Oracle:
    with torchvision_here():
        from transformers.models.step3p7.image_processing_step3p7 import Step3p7ImageProcessor
        from transformers.models.step3p7.processing_step3p7 import Step3p7Processor
    from transformers.models.step3p7.configuration_step3p7 import Step3p7VisionConfig
    from transformers.models.step3p7.modeling_step3p7 import Step3p7VisionModel

    tokens, tower, decoder = tokenizer(SPECIAL), VISION | (vision or {}), TEXT | (text or {})
    decoder |= {"vocab_size": tokens.get_vocab_size() + 3}
    image, side, patch = (
        tokens.token_to_id("<im_patch>"),
        tower["image_size"],
        tower["patch_size"],
    )
    eyes = Step3p7VisionModel(Step3p7VisionConfig(**tower))
    model = randomize(Step(Qwen3Config(**decoder, image_token_id=image), eyes), seed, **SHARP)
    model = save(folder, model, tokens, TEMPLATE, NAMES, eos="<|im_end|>")
    config = {
        "architectures": ["StepVLForConditionalGeneration"],
        "model_type": "step_robotics",
        "image_token_id": image,
        "projector_bias": False,
        "understand_projector_stride": 2,
        "tie_word_embeddings": decoder["tie_word_embeddings"],
        "vision_config": tower,
        "text_config": decoder | {"model_type": "qwen3"},
    }
    write(folder, "config.json", config)
    settings = {
        "size": {"height": side, "width": side},
        "patch_size": side * 504 // 728 // (4 * patch) * 4 * patch,
        "max_image_size": 2 * side + 8,
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
    }
    write(folder, "preprocessor_config.json", settings)
    images = Step3p7ImageProcessor(**settings, vision_patch_size=patch)
    processor = build_processor(Step3p7Processor, folder, images)
    return Oracle(folder, model, processor, image, LAYOUT, views, authors=True)


ROW = Row(
    "Step3-VL",
    {
        "heads of 20": step3_vl,
        "heads of 12, larger tiles, tied": lambda folder: step3_vl(
            folder,
            seed=1,
            vision={"width": 48, "heads": 4, "image_size": 80, "patch_size": 5, "layers": 2},
            text={"tie_word_embeddings": True, "num_attention_heads": 3, "num_key_value_heads": 1},
        ),
    },
    notes="windows whose size follows from a picture's shape, and the whole; layer scales, convolutions",
)
