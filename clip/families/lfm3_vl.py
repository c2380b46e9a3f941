"""LFM3-VL: gated convolutions over the grid of a picture's patches and, between them, grouped
attention with rotary positions, as in the decoder; 2 x 2 patches become a token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mtmd.base.errors import ModelError
from mtmd.clip.blocks import (
    ACTIVATIONS,
    FRAMES_WEIGHT,
    biased_parameters,
    checkpoint_names,
    frames_kernel,
    read_grid_rotary,
    rotary_attention,
    swiglu,
)
from mtmd.clip.grids import Cells, OneGrid
from mtmd.clip.marks import Marks, read_marks
from mtmd.clip.resolution.resolution import ImagePlan
from mtmd.clip.resolution.smart_resize import DynamicResolution, read_dynamic
from mtmd.clip.video.pairs import PairedFrames
from mtmd.clip.video.timed_pairs import read_timed_pairs
from mtmd.kernels import ops
from mtmd.kernels.checkpoint.canonical import Parameter
from mtmd.kernels.checkpoint.rotary import Rotary
from mtmd.kernels.checkpoint.settings import MAX_HEADS, MAX_LAYERS, MAX_WIDTH, Settings
from mtmd.kernels.graph import Node, Shape, WeightSource
from mtmd.kernels.layers import Weights
from mtmd.kernels.plan.flash_choice import AttentionForm

PROJECTOR_EPS = 1e-6  # the settings do not say
KINDS = CONV, FULL = ("conv", "full_attention")
MAX_KERNEL = 31


@dataclass(frozen=True)
class Lfm3Vision:
    """`inner` is the width between the projection's layers, `kernel` the cells of a grid that a
    convolution sees on a side.
    """

    kinds: tuple[str, ...]
    width: int
    ffn: int
    heads: int
    groups: int
    kernel: int
    eps: float
    rotary: Rotary
    inner: int
    bias: bool  # of the projection
    gelu: str
    text_width: int
    resolution: DynamicResolution
    video: PairedFrames
    marks: Marks

    bidirectional = False
    separator = None
    unused = ()

    @property
    def marker(self) -> str:
        return self.marks.image

    @property
    def image_token(self) -> str:
        return self.marks.image

    @property
    def around(self) -> tuple[str, str]:
        return self.marks.around

    def parameters(self) -> Mapping[str, Parameter]:
        width, merged = self.width, self.width * self.resolution.merge**2
        keys = width // self.heads * self.groups
        tensors: dict[str, tuple[str, Shape]] = {"v.pre_ln": ("embedding_norm", (width,))}
        block: dict[str, tuple[str, Shape]] = {
            "ln1": ("operator_norm", (width,)),
            "ln2": ("ffn_norm", (width,)),
            "ffn_gate": ("feed_forward.w1", (self.ffn, width)),
            "ffn_up": ("feed_forward.w3", (self.ffn, width)),
            "ffn_down": ("feed_forward.w2", (width, self.ffn)),
        }
        own: dict[str, dict[str, tuple[str, Shape]]] = {
            CONV: {
                "conv_in": ("conv.in_proj", (3 * width, width)),
                "conv": ("conv.spatial_conv", (width, 1, self.kernel, self.kernel)),
                "conv_out": ("conv.out_proj", (width, width)),
            },
            FULL: {
                "attn_q": ("self_attn.q_proj", (width, width)),
                "attn_k": ("self_attn.k_proj", (keys, width)),
                "attn_v": ("self_attn.v_proj", (keys, width)),
                "attn_out": ("self_attn.out_proj", (width, width)),
                "attn_q_norm": ("self_attn.q_layernorm", (width // self.heads,)),
                "attn_k_norm": ("self_attn.k_layernorm", (width // self.heads,)),
            },
        }
        for layer, kind in enumerate(self.kinds):
            for part, (name, shape) in (block | own[kind]).items():
                tensors[f"v.blk.{layer}.{part}"] = f"layers.{layer}.{name}", shape
        parameters = {
            f"{name}.weight": Parameter(shape, _tower(f"{theirs}.weight"))
            for name, (theirs, shape) in tensors.items()
        }
        ends: dict[str, tuple[str, Shape]] = {
            "mm.input_norm": ("layer_norm", (width,)),
            "mm.1": ("linear_1", (self.inner, merged)),
            "mm.2": ("linear_2", (self.text_width, self.inner)),
        }
        projection = biased_parameters(
            ends, lambda name: checkpoint_names(f"multi_modal_projector.{name}")
        )
        without = () if self.bias else ("mm.1.bias", "mm.2.bias")
        parameters |= {name: p for name, p in projection.items() if name not in without}
        return parameters | self._kernels()

    def _kernels(self) -> dict[str, Parameter]:
        """The kernels of two frames, of which a still picture is both, as one and side by side."""
        width, patch = self.width, self.resolution.patch
        stored, sources = (width, 6 * patch**2), _tower("patchifier.weight")
        frames = (width, 3, 2, patch, patch)
        return {
            "v.patch_embd.weight": Parameter(
                (width, 3, patch, patch), sources, stored, lambda w: w.view(frames).float().sum(2)
            ),
            FRAMES_WEIGHT: Parameter(
                (width, 6, patch, patch),
                sources,
                stored,
                lambda w: w.view(frames).transpose(1, 2).flatten(1, 2),
            ),
        }

    def prompt(self, plan: ImagePlan) -> str:
        return self.image_token * plan.tokens

    def graph(self, tiles: Node, weights: WeightSource, attention: AttentionForm) -> Node:
        """tiles [B, 3 or 6, Y, X] -> embeddings [B, T, D]"""
        w, grids = Weights(weights, tiles.dtype), OneGrid.of(tiles, Cells(self.resolution.patch))
        angles = ops.rope_table(grids.positions(), rotary=self.rotary, name="v.angles")
        x = ops.patch_embed(tiles, frames_kernel(tiles, w), name="v.patch_embd")
        x = w.rms_norm(x, "v.pre_ln", self.eps)
        for layer in w.layers(len(self.kinds)):
            at = f"v.blk.{layer}"
            y = w.rms_norm(x, f"{at}.ln1", self.eps)
            if self.kinds[layer] == CONV:
                y = self._convolved(y, at, grids.shape, w)
            else:
                y = rotary_attention(
                    y,
                    at,
                    w,
                    attention,
                    heads=self.heads,
                    groups=self.groups,
                    angles=angles,
                    bias=False,
                    out_bias=False,
                    norm_eps=self.eps,
                )
            x = ops.add(y, x, name=f"{at}.attn_residual")
            y = swiglu(w.rms_norm(x, f"{at}.ln2", self.eps), at, w)
            x = ops.add(y, x, name=f"{at}.ffn_residual")
        x = w.layer_norm(x, "mm.input_norm", PROJECTOR_EPS)
        x = ops.unshuffle(x, grid=grids.shape, factor=self.resolution.merge, name="mm.merged")
        x = ops.gelu(w.linear(x, "mm.1", bias=self.bias), approximate=self.gelu, name="mm.gelu")
        return w.linear(x, "mm.2", bias=self.bias)

    def _convolved(self, x: Node, at: str, grid: tuple[int, int], w: Weights) -> Node:
        """c * conv(b * x') of three projections, each channel by itself          [B, P, C]"""
        width, edge = self.width, self.kernel // 2
        all_three = w.linear(x, f"{at}.conv_in")
        b, c, value = (
            ops.columns(all_three, start=i * width, stop=(i + 1) * width, name=f"{at}.conv_{part}")
            for i, part in enumerate("bcx")
        )
        mixed = ops.conv2d(
            ops.mul(b, value, name=f"{at}.conv_bx"),
            w.tensor(f"{at}.conv.weight"),
            grid=grid,
            padding=(edge,) * 4,
            groups=width,
            name=f"{at}.conv",
        )
        return w.linear(ops.mul(mixed, c, name=f"{at}.conv_gated"), f"{at}.conv_out")


def _tower(name: str) -> tuple[str, ...]:
    return checkpoint_names(f"vision_tower.{name}")


def read(top: Settings, image: Settings) -> Lfm3Vision:
    """Read it from config.json and the image processor's settings, with transformers' defaults;
    ModelError where a value cannot be followed.
    """
    c, marks = top.part("vision_config"), read_marks(image, Marks())
    for key, value in (("in_channels", 3), ("temporal_patch_size", 2)):
        c.choice(key, (value,), value)
    width = c.count("hidden_size", 1024, maximum=MAX_WIDTH)
    heads = c.count("num_attention_heads", 16, maximum=MAX_HEADS)
    groups = c.count("num_key_value_heads", 8, maximum=MAX_HEADS)
    kernel = c.count("conv_kernel_size", 3, maximum=MAX_KERNEL)
    if heads % groups or kernel % 2 == 0:
        raise ModelError(
            f"{c.where}: {heads} heads in {groups} groups and conv_kernel_size {kernel}, expected "
            "groups that divide the heads, and an odd number of cells"
        )
    rope = {"rope_theta": 1e6, **c.part("rope_parameters").values}
    turned = Settings({**c.values, "rope_parameters": rope}, c.where)
    patch, merge = c.count("patch_size", 16), c.count("spatial_merge_size", 2)
    return Lfm3Vision(
        kinds=_kinds(c),
        width=width,
        ffn=c.count("intermediate_size", 2560, maximum=MAX_WIDTH),
        heads=heads,
        groups=groups,
        kernel=kernel,
        eps=c.number("norm_eps", 1e-5),
        rotary=read_grid_rotary(turned, width, heads),
        inner=top.count("projector_hidden_size", 4096, maximum=MAX_WIDTH),
        bias=top.flag("projector_bias", True),
        gelu=ACTIVATIONS[top.choice("projector_hidden_act", ACTIVATIONS, "gelu")],
        text_width=top.part("text_config").count("hidden_size", 2048, maximum=MAX_WIDTH),
        resolution=read_dynamic(image, patch, merge, on_grid=False),
        video=read_timed_pairs(
            image.part("video_processor"), patch=patch, merge=merge, marks=marks, on_grid=False
        ),
        marks=marks,
    )


def _kinds(c: Settings) -> tuple[str, ...]:
    """The kind of each layer."""
    layers = c.count("num_hidden_layers", 14, maximum=MAX_LAYERS)
    kinds: object = c.get("layer_types", None)
    if kinds is None:
        kinds = [KINDS[i > 1 and i % 2 == 0] for i in range(layers)]
    if not isinstance(kinds, list) or len(kinds) != layers or any(k not in KINDS for k in kinds):
        raise ModelError(
            f"{c.where}: layer_types has to name {layers} layers, each {' or '.join(KINDS)}"
        )
    return tuple(kinds)
