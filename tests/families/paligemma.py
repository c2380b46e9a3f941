"""PaliGemma and PaliGemma 2: SigLIP and Gemma or Gemma 2; the whole prompt attends in both directions."""
from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from common import Oracle, Row, build_processor, randomize, save, tokenizer, write
from published import published

SPECIAL = ("<pad>", "<eos>", "<bos>", "<unk>", "<image>")
NAMES = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>", "image_token": "<image>"}
# The published checkpoints have no template: the text of the turns, images first, is the prompt; the processor does the rest.
TEMPLATE = """{% for m in messages %}{% if m.content is not string %}{% for c in m.content if c.type == 'image' %}<image>{% endfor %}\
{% endif %}{% endfor %}{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}\
{% for c in m.content if c.type == 'text' %}{{ c.text }} {% endfor %}{% endif %}{% endfor %}"""
VISION = {"model_type": "siglip_vision_model", "hidden_size": 72, "intermediate_size": 118, "num_hidden_layers": 2,
          "num_attention_heads": 1, "image_size": 42, "patch_size": 14, "vision_use_head": False}
TEXT = {"hidden_size": 64, "intermediate_size": 100, "num_hidden_layers": 3, "num_attention_heads": 3, "num_key_value_heads": 1,
        "head_dim": 24, "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "hidden_activation": "gelu_pytorch_tanh",
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}


def paligemma(folder: Path, *, text_kind: str = "gemma", seed: int = 0, vision: dict[str, Any] | None = None,
              text: dict[str, Any] | None = None) -> Oracle:
    from transformers import PaliGemmaConfig, PaliGemmaForConditionalGeneration, PaliGemmaProcessor
    from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil
    tokens = tokenizer(SPECIAL)
    image = tokens.token_to_id("<image>")
    tower = VISION | (vision or {})
    rows = tokens.get_vocab_size() + 3
    settings = TEXT | {"model_type": text_kind, "vocab_size": rows, "bos_token_id": tokens.token_to_id("<bos>"),
                       "eos_token_id": tokens.token_to_id("<eos>"), "pad_token_id": tokens.token_to_id("<pad>")} | (text or {})
    config = PaliGemmaConfig(vision_config=tower | {"projection_dim": settings["hidden_size"]}, text_config=settings, vocab_size=rows,
                             image_token_index=image, projection_dim=settings["hidden_size"], hidden_size=settings["hidden_size"])
    model = randomize(PaliGemmaForConditionalGeneration(config), seed, embed_tokens=(0.0, 0.05))  # tied: else tokens are repeated
    model = save(folder, model, tokens, TEMPLATE, NAMES, eos="<eos>")
    side, count = tower["image_size"], (tower["image_size"] // tower["patch_size"]) ** 2
    write(folder, "preprocessor_config.json", {
        "image_processor_type": "SiglipImageProcessor", "do_resize": True, "do_rescale": True, "do_normalize": True,
        "do_convert_rgb": None, "resample": 3, "rescale_factor": 1 / 255, "size": {"height": side, "width": side},
        "image_mean": [0.5] * 3, "image_std": [0.5] * 3, "image_seq_length": count})
    images = SiglipImageProcessorPil.from_pretrained(folder)
    images.image_seq_length = count
    return Oracle(folder, model, build_processor(PaliGemmaProcessor, folder, images), image)


ROW = Row("PaliGemma, PaliGemma 2", {
    "paligemma": paligemma,
    "paligemma 2, as published": published(lambda f: paligemma(
        f, text_kind="gemma2", seed=1, vision={"num_attention_heads": 2, "hidden_size": 80, "image_size": 48, "patch_size": 12},
        text={"sliding_window": 9, "query_pre_attn_scalar": 20, "num_attention_heads": 4, "num_key_value_heads": 2,
              "attn_logit_softcapping": 3.0, "final_logit_softcapping": 1.0,
              "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}), tower=True),
}, notes="the whole prompt attends in both directions")
