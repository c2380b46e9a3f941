"""The eye of dots.ocr and dots.mocr (arXiv:2512.02498): pictures of any size, RMS norms, SwiGLU,
patches turned by their row and column, 2 x 2 of them merged into a token.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from mtmd.clip.blocks import (
    GgufTower,
    biased_parameters,
    gguf_vit,
    read_grid_rotary,
    rotary_attention,
    swiglu,
    tower_keys,
)
from mtmd.clip.grids import Cells, Grids, OneGrid
from mtmd.clip.resolution.resolution import ImagePlan
from mtmd.clip.resolution.smart_resize import DynamicResolution, gguf_dynamic, read_dynamic
from mtmd.kernels import ops
from mtmd.kernels.checkpoint.canonical import Parameter
from mtmd.kernels.checkpoint.rotary import Rotary
from mtmd.kernels.checkpoint.settings import MAX_HEADS, MAX_LAYERS, MAX_WIDTH, Settings
from mtmd.kernels.graph import Node, WeightSource
from mtmd.kernels.layers import Weights
from mtmd.kernels.plan.flash_choice import AttentionForm

MERGER_EPS = 1e-6  # of the only layer norm; the settings do not say
PIXELS = 3136, 11289600  # of the published settings
# Prompts of the authors' repository: what they call prompt_layout_all_en and prompt_ocr, whose
# answers are Markdown, and those that it has for one table and one formula.
TEXT = "Extract the text content from this image."
TASKS = {
    "markdown": TEXT,
    "text": TEXT,
    "table": "Convert the table in this image to HTML.",
    "formula": "Convert the formula in this image to LaTeX.",
    "layout": """\
Please output the layout information from the PDF image, including each layout element's bbox, \
its category, and the corresponding text content within the bbox.

1. Bbox format: [x1, y1, x2, y2]

2. Layout Categories: The possible categories are ['Caption', 'Footnote', 'Formula', 'List-item', \
'Page-footer', 'Page-header', 'Picture', 'Section-header', 'Table', 'Text', 'Title'].

3. Text Extraction & Formatting Rules:
    - Picture: For the 'Picture' category, the text field should be omitted.
    - Formula: Format its text as LaTeX.
    - Table: Format its text as HTML.
    - All Others (Text, Title, etc.): Format their text as Markdown.

4. Constraints:
    - The output text must be the original text from the image, with no translation.
    - All layout elements must be sorted according to human reading order.

5. Final Output: The entire output must be a single JSON object.
""",
}


@dataclass(frozen=True)
class DotsVision:
    layers: int
    width: int
    ffn: int
    heads: int
    text_width: int
    eps: float
    rotary: Rotary
    resolution: DynamicResolution

    marker = image_token = "<|imgpad|>"
    around = ("<|img|>", "<|endofimg|>")
    in_line = True
    box_scale = "processed"
    bidirectional = False
    separator = None
    video = None
    unused = ()
    tasks = TASKS

    def parameters(self) -> Mapping[str, Parameter]:
        width, patch, merged = (self.width, self.resolution.patch, self.width * self.cells.patches)
        biased = {
            "v.patch_embd": ("patch_embed.patchifier.proj", (width, 3, patch, patch)),
            "mm.input_norm": ("merger.ln_q", (width,)),
            "mm.0": ("merger.mlp.0", (merged, merged)),
            "mm.2": ("merger.mlp.2", (self.text_width, merged)),
        }
        plain: dict[str, tuple[str, tuple[int, ...]]] = {
            "v.pre_ln": ("patch_embed.patchifier.norm", (width,)),
            "mm.post_norm": ("post_trunk_norm", (width,)),
        }
        for layer in range(self.layers):
            at, block = f"v.blk.{layer}", f"blocks.{layer}"
            plain |= {
                f"{at}.ln1": (f"{block}.norm1", (width,)),
                f"{at}.attn_qkv": (f"{block}.attn.qkv", (3 * width, width)),
                f"{at}.attn_out": (f"{block}.attn.proj", (width, width)),
                f"{at}.ln2": (f"{block}.norm2", (width,)),
                f"{at}.ffn_gate": (f"{block}.mlp.fc1", (self.ffn, width)),
                f"{at}.ffn_down": (f"{block}.mlp.fc2", (width, self.ffn)),
                f"{at}.ffn_up": (f"{block}.mlp.fc3", (self.ffn, width)),
            }
        weights = {
            f"{name}.weight": Parameter(shape, _names(f"{theirs}.weight"))
            for name, (theirs, shape) in plain.items()
        }
        return biased_parameters(biased, _names) | weights

    def prompt(self, plan: ImagePlan) -> str:
        return self.image_token * plan.tokens

    @property
    def cells(self) -> Cells:
        return Cells(self.resolution.patch, self.resolution.merge)

    def graph(self, tiles: Node, weights: WeightSource, attention: AttentionForm) -> Node:
        return self.graph_on(OneGrid.of(tiles, self.cells), tiles, weights, attention)

    def graph_on(
        self, grids: Grids, tiles: Node, weights: WeightSource, attention: AttentionForm
    ) -> Node:
        w = Weights(weights, tiles.dtype)
        angles = ops.rope_table(grids.positions(), rotary=self.rotary, name="v.angles")
        kernels = (w.tensor(f"v.patch_embd.{kind}") for kind in ("weight", "bias"))
        x = ops.patch_embed(tiles, *kernels, name="v.patch_embd")
        x = w.rms_norm(x, "v.pre_ln", self.eps)
        for layer in w.layers(self.layers):
            at = f"v.blk.{layer}"
            y = rotary_attention(
                w.rms_norm(x, f"{at}.ln1", self.eps),
                at,
                w,
                attention,
                heads=self.heads,
                angles=angles,
                bounds=grids.segments,
                fused=True,
                bias=False,
                out_bias=False,
            )
            x = ops.add(y, x, name=f"{at}.attn_residual")
            y = swiglu(w.rms_norm(x, f"{at}.ln2", self.eps), at, w)
            x = ops.add(y, x, name=f"{at}.ffn_residual")
        x = w.layer_norm(w.rms_norm(x, "mm.post_norm", self.eps), "mm.input_norm", MERGER_EPS)
        x = ops.unshuffle(x, grid=grids.shape, factor=self.resolution.merge, name="mm.merged")
        x = ops.gelu(w.linear(x, "mm.0", bias=True), approximate="none", name="mm.gelu")
        return w.linear(x, "mm.2", bias=True)


def to_gguf(family: DotsVision) -> GgufTower:
    """Return the keys of a GGUF that say the same."""
    way = family.resolution
    keys = tower_keys(family, image_size=0, patch=way.patch, text_width=family.text_width)
    return GgufTower(
        "dots_ocr",
        keys
        | {
            "use_silu": True,
            "vision.projector.scale_factor": way.merge,
            "vision.image_min_pixels": way.minimum,
            "vision.image_max_pixels": way.maximum,
        },
    )


def from_gguf(keys: Settings, names: Collection[str]) -> tuple[dict[str, Any], dict[str, Any]]:  # noqa: ARG001
    """Return what config.json and the image processor's settings would say."""
    plain, merge = gguf_vit(keys), keys.count("vision.projector.scale_factor", 2)
    vision = {
        "embed_dim": plain["hidden_size"],
        "hidden_size": keys.get("vision.projection_dim", None),
        "rms_norm_eps": plain["layer_norm_eps"],
        "spatial_merge_size": merge,
        **{
            key: plain[key]
            for key in (
                "intermediate_size",
                "num_attention_heads",
                "num_hidden_layers",
                "patch_size",
            )
        },
    }
    return {"vision_config": vision}, gguf_dynamic(keys, merge) | {"temporal_patch_size": 1}


def read(top: Settings, image: Settings) -> DotsVision:
    """Read it from config.json and the image processor's settings, with the authors' defaults;
    ModelError where a value cannot be followed.
    """
    c = top.part("vision_config")
    followed: tuple[tuple[str, Any], ...] = (
        ("num_channels", 3),
        ("temporal_patch_size", 1),
        ("use_bias", False),
        ("post_norm", True),
        ("is_causal", False),
    )
    for key, value in followed:
        c.choice(key, (value,), value)
    width, heads = (
        c.count("embed_dim", 1536, maximum=MAX_WIDTH),
        c.count("num_attention_heads", 12, maximum=MAX_HEADS),
    )
    patch, merge = c.count("patch_size", 14), c.count("spatial_merge_size", 2)
    return DotsVision(
        layers=c.count("num_hidden_layers", 42, maximum=MAX_LAYERS),
        width=width,
        ffn=c.count("intermediate_size", 4224, maximum=MAX_WIDTH),
        heads=heads,
        text_width=c.count("hidden_size", 1536, maximum=MAX_WIDTH),
        eps=c.number("rms_norm_eps", 1e-5),
        rotary=read_grid_rotary(c, width, heads),
        resolution=read_dynamic(image, patch, merge, temporal=1, limits=PIXELS, on_grid=False),
    )


def _names(name: str) -> tuple[str, ...]:
    return (f"vision_tower.{name}",)
