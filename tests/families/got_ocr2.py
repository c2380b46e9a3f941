"""GOT-OCR 2: SAM's encoder over the whole page, two convolutions, Qwen2."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from common import Oracle, Row, build_processor, randomize, save, tokenizer, write

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<img>", "</img>", "<imgpad>")
NAMES = {"bos_token": None, "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
TEMPLATE = """{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}{% if m.content is string %}{{ m.content }}{% else %}\
{% for c in m.content %}{% if c.type == 'image' %}{{ '<img><imgpad></img>\\n' }}{% elif c.type == 'text' %}{{ c.text }}{% endif %}{% endfor %}\
{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""


def got_ocr2(folder: Path, seed: int = 0) -> Oracle:
    from transformers import GotOcr2Config, GotOcr2ForConditionalGeneration, GotOcr2Processor
    from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil

    tokens = tokenizer(SPECIAL)
    image = tokens.token_to_id("<imgpad>")
    config = GotOcr2Config(
        vision_config={
            "hidden_size": 16,
            "num_hidden_layers": 2,
            "num_attention_heads": 1,
            "mlp_dim": 30,
            "global_attn_indexes": [1],
            "window_size": 5,
            "output_channels": 10,
            "image_size": 128,
            "patch_size": 2,
        },
        text_config={
            "model_type": "qwen2",
            "hidden_size": 72,
            "intermediate_size": 100,
            "num_hidden_layers": 2,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "max_position_embeddings": 4096,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
            "vocab_size": tokens.get_vocab_size() + 3,
            "bos_token_id": None,
            "eos_token_id": None,
            "tie_word_embeddings": True,
        },
        image_token_index=image,
    )
    model = randomize(GotOcr2ForConditionalGeneration(config), seed)
    model = save(folder, model, tokens, TEMPLATE, NAMES, eos="<|im_end|>")
    settings = {
        "do_resize": True,
        "do_rescale": True,
        "do_normalize": True,
        "do_convert_rgb": True,
        "resample": 3,
        "rescale_factor": 1 / 255,
        "size": {"height": 128, "width": 128},
        "crop_to_patches": False,
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
    }
    kind = {"image_processor_type": "GotOcr2ImageProcessor"}
    write(folder, "preprocessor_config.json", kind | settings)

    class Processor(GotOcr2Processor):  # type: ignore[misc]
        """It reads one picture of a turn, and no turn without."""

        def __call__(self, images: Any = None, text: Any = None, **kwargs: Any) -> Any:
            if not images:
                return self.tokenizer(text, return_tensors="pt", add_special_tokens=False)
            flat = [i for one in images for i in (one if isinstance(one, list) else [one])]
            return super().__call__(images=flat, text=text, **kwargs)

    images = GotOcr2ImageProcessorPil(**settings)
    processor = build_processor(Processor, folder, images)
    return Oracle(folder, model, processor, image)


ROW = Row("GOT-OCR 2", {"SAM and Qwen2, tied": got_ocr2}, notes="a page as one square, SAM")
