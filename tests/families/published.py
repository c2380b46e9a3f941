"""Checkpoints rewritten as they lie on the hub: transformers 5 saves newer tensor names and
settings than were published.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors.torch import load_file, save_file

if TYPE_CHECKING:
    from common import Oracle


def published(
    build: Callable[[Path], Oracle],
    *,
    tower: bool = False,
    transposed: bool = False,
    mrope: bool = True,
) -> Callable[[Path], Oracle]:
    """`build`, its folder rewritten: rope_theta and rope_scaling in config.json. `tower`: the
    tower's names under `vision_model`; `transposed`: experts as [E, in, out], as Qwen3-VL's;
    `mrope`: sections make a rotary embedding's type "mrope", as in Qwen2-VL's.
    """

    def rewritten(folder: Path) -> Oracle:
        oracle = build(folder)
        _rename(folder / "model.safetensors", tower, transposed)
        path = folder / "config.json"
        config = json.loads(path.read_text())
        for section in (config, config.get("text_config", {}), config.get("vision_config", {})):
            old_settings(section, mrope)
        path.write_text(json.dumps(config, indent=1))
        return oracle

    return rewritten


def _rename(path: Path, tower: bool, transposed: bool) -> None:
    tensors = load_file(path)
    if tower:
        tensors = {
            re.sub(r"(^|\.)((?:vision|image|video)_tower)\.", r"\1\2.vision_model.", name): t
            for name, t in tensors.items()
        }
    if transposed:
        tensors = {
            name: t.transpose(1, 2).contiguous() if ".experts." in name else t
            for name, t in tensors.items()
        }
    save_file(tensors, path, metadata={"format": "pt"})


def old_settings(section: dict[str, Any], mrope: bool) -> None:
    if "dtype" in section:
        section["torch_dtype"] = section.pop("dtype")
    rope = section.get("rope_parameters")
    if rope is None or "rope_theta" not in rope:  # Gemma's, one for each kind of layer
        return
    del section["rope_parameters"]
    kind = rope.pop("rope_type")
    section["rope_theta"] = rope.pop("rope_theta")
    if kind == "axial":  # towers; only Pixtral's says its theta
        return
    section |= {key: rope.pop(key) for key in ("partial_rotary_factor",) if key in rope}
    if mrope and "mrope_section" in rope and "mrope_interleaved" not in rope:
        section["rope_scaling"] = {"type": "mrope", **rope}
    else:
        section["rope_scaling"] = {"rope_type": kind, **rope} if rope or kind != "default" else None
