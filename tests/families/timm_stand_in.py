"""The one network of timm that transformers' Gemma 3n builds its eyes with, MobileNet-V5's encoder,
for environments without timm, which needs torchvision.

`golden/mobilenetv5.npz` holds what timm's own gives for the same weights, and
`tests/clip/families/test_gemma3n.py` compares; with timm installed `golden/mobilenetv5.py` writes
it anew.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

Blocks = list[list[dict[str, Any]]]


def edge(out: int, ratio: float, stride: int = 1) -> dict[str, Any]:
    """An edge residual block in timm's words."""
    return {
        "block_type": "er",
        "out_chs": out,
        "stride": stride,
        "act_layer": None,
        "exp_kernel_size": 3,
        "pw_kernel_size": 1,
        "exp_ratio": ratio,
        "force_in_chs": 0,
        "se_ratio": 0.0,
        "noskip": False,
    }


def bottleneck(out: int, start: int, mid: int, ratio: float, stride: int = 1) -> dict[str, Any]:
    """A universal inverted bottleneck in timm's words."""
    return {
        "block_type": "uir",
        "out_chs": out,
        "stride": stride,
        "act_layer": None,
        "dw_kernel_size_start": start,
        "dw_kernel_size_mid": mid,
        "dw_kernel_size_end": 0,
        "exp_ratio": ratio,
        "se_ratio": 0.0,
        "noskip": False,
    }


def attention(out: int, heads: int, head: int, down: int = 1) -> dict[str, Any]:
    """A multi-query attention block in timm's words."""
    return {
        "block_type": "mqa",
        "out_chs": out,
        "stride": 1,
        "act_layer": None,
        "dw_kernel_size": 3,
        "num_heads": heads,
        "key_dim": head,
        "value_dim": head,
        "kv_stride": down,
        "noskip": False,
    }


def tiny_args() -> dict[str, Any]:
    """`model_args` of a network with each kind of block, for pictures of 32 n pixels a side with an
    even n.
    """
    blocks: Blocks = [
        [edge(24, 4.0, 2), edge(24, 3.0)],
        [bottleneck(32, 3, 5, 3.0, 2), bottleneck(32, 5, 0, 2.0)],
        [bottleneck(40, 5, 5, 3.0, 2), attention(40, 3, 16, 2), bottleneck(40, 0, 0, 1.0)],
        [bottleneck(56, 5, 3, 2.0, 2), attention(56, 4, 24), bottleneck(56, 0, 0, 2.0)],
    ]
    return {"block_args": blocks, "stem_size": 16, "msfa_output_resolution": 2}


class _Norm(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        scale = (x.square().mean(1, keepdim=True) + 1e-6).rsqrt()
        return x * scale * self.weight.view(1, -1, 1, 1)


class _Conv(nn.Conv2d):
    """Padding "same", as TensorFlow has it."""

    def __init__(
        self,
        inner: int,
        outer: int,
        kernel: int,
        stride: int = 1,
        groups: int = 1,
        bias: bool = False,
    ):
        super().__init__(inner, outer, kernel, stride, groups=groups, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        pads: list[int] = []
        for size in reversed(x.shape[-2:]):
            step, kernel = self.stride[0], self.kernel_size[0]
            total = max((-(-size // step) - 1) * step + kernel - size, 0)
            pads += [total // 2, total - total // 2]
        return super().forward(F.pad(x, pads))


class _ConvNorm(nn.Module):
    def __init__(self, conv: _Conv, act: bool = False):
        super().__init__()
        self.conv, self.bn, self.act = conv, _Norm(conv.out_channels), act

    def forward(self, x: Tensor) -> Tensor:
        x = self.bn(self.conv(x))
        return F.gelu(x, approximate="tanh") if self.act else x


class _Scale(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.gamma = nn.Parameter(torch.full((width,), 1e-5))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma.view(1, -1, 1, 1)


class _Edge(nn.Module):
    def __init__(self, inner: int, a: Mapping[str, Any]):
        super().__init__()
        middle, outer, stride = round(inner * a["exp_ratio"]), a["out_chs"], a["stride"]
        self.conv_exp = _Conv(inner, middle, a["exp_kernel_size"], stride)
        self.bn1 = _Norm(middle)
        self.conv_pwl, self.bn2 = _Conv(middle, outer, 1), _Norm(outer)
        self.skips = inner == outer and stride == 1

    def forward(self, x: Tensor) -> Tensor:
        y = F.gelu(self.bn1(self.conv_exp(x)), approximate="tanh")
        y = self.bn2(self.conv_pwl(y))
        return y + x if self.skips else y


class _Bottleneck(nn.Module):
    def __init__(self, inner: int, a: Mapping[str, Any], scaled: bool = True):
        super().__init__()
        middle, outer, stride = round(inner * a["exp_ratio"]), a["out_chs"], a["stride"]
        start, mid = a["dw_kernel_size_start"], a["dw_kernel_size_mid"]
        first = 1 if mid else stride
        dw_start = _Conv(inner, inner, start, first, groups=inner) if start else None
        self.dw_start = _ConvNorm(dw_start) if dw_start else nn.Identity()
        self.pw_exp = _ConvNorm(_Conv(inner, middle, 1), act=True)
        dw_mid = _Conv(middle, middle, mid, stride, groups=middle) if mid else None
        self.dw_mid = _ConvNorm(dw_mid, act=True) if dw_mid else nn.Identity()
        self.pw_proj = _ConvNorm(_Conv(middle, outer, 1))
        self.layer_scale = _Scale(outer) if scaled else nn.Identity()
        self.skips = scaled and inner == outer and stride == 1

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer_scale(self.pw_proj(self.dw_mid(self.pw_exp(self.dw_start(x)))))
        return y + x if self.skips else y


def _smaller(inner: int, head: int, a: Mapping[str, Any]) -> nn.Sequential:
    made = nn.Sequential()
    if a["kv_stride"] > 1:
        down = _Conv(inner, inner, a["dw_kernel_size"], a["kv_stride"], groups=inner)
        made.add_module("down_conv", down)
        made.add_module("norm", _Norm(inner))
    made.add_module("proj", _Conv(inner, head, 1))
    return made


class _Queries(nn.Module):
    def __init__(self, inner: int, a: Mapping[str, Any]):
        super().__init__()
        self.heads, self.head = a["num_heads"], a["key_dim"]
        flat = self.heads * self.head
        self.query = nn.Sequential()
        self.query.add_module("proj", _Conv(inner, flat, 1))
        self.key, self.value = (_smaller(inner, self.head, a) for _ in range(2))
        self.output = nn.Sequential()
        self.output.add_module("proj", _Conv(flat, inner, 1))

    def forward(self, x: Tensor) -> Tensor:
        q = self.query(x).unflatten(1, (self.heads, self.head)).flatten(3)
        k, v = self.key(x).flatten(2), self.value(x).flatten(2)
        scores = torch.einsum("bhkp,bks->bhps", q, k) * self.head**-0.5
        y = torch.einsum("bhps,bvs->bhvp", scores.softmax(-1), v)
        return self.output(y.flatten(1, 2).unflatten(2, x.shape[2:]))


class _Attention(nn.Module):
    def __init__(self, inner: int, a: Mapping[str, Any]):
        super().__init__()
        self.norm, self.attn, self.layer_scale = _Norm(inner), _Queries(inner, a), _Scale(inner)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer_scale(self.attn(self.norm(x))) + x


class _Fusion(nn.Module):
    def __init__(self, inner: int, cells: int):
        super().__init__()
        self.ffn = _Bottleneck(inner, bottleneck(2048, 0, 0, 2.0), scaled=False)
        self.norm, self.cells = _Norm(2048), cells

    def forward(self, large: Tensor, small: Tensor) -> Tensor:
        small = F.interpolate(small, large.shape[2:], mode="nearest")
        y = self.ffn(torch.cat((large, small), 1))
        return self.norm(F.avg_pool2d(y, y.shape[2] // self.cells))


class MobileNetV5(nn.Module):
    """Weights by timm's names."""

    def __init__(self, block_args: Blocks, stem_size: int = 64, msfa_output_resolution: int = 16):
        super().__init__()
        self.conv_stem = _ConvNorm(_Conv(3, stem_size, 3, 2, bias=True), act=True)
        kinds = {"er": _Edge, "uir": _Bottleneck, "mqa": _Attention}
        width, stages = stem_size, []
        for stage in block_args:
            blocks = []
            for a in stage:
                blocks.append(kinds[a["block_type"]](width, a))
                width = a["out_chs"]
            stages.append(nn.Sequential(*blocks))
        self.blocks = nn.Sequential(*stages)
        fused = sum(stage[-1]["out_chs"] for stage in block_args[-2:])
        self.msfa = _Fusion(fused, msfa_output_resolution)

    def forward_features(self, x: Tensor) -> Tensor:
        """x [B, 3, Y, X] -> [B, 2048, R, R]"""
        features = [self.conv_stem(x)]
        for stage in self.blocks:
            features.append(stage(features[-1]))
        return self.msfa(*features[-2:])


def weights(network: nn.Module) -> nn.Module:
    """The same weights for every network with the same names and shapes, by numpy's generator."""
    rng = np.random.default_rng(5)
    for name, p in sorted(network.state_dict().items()):
        drawn = rng.standard_normal(tuple(p.shape)).astype(np.float32)
        if p.ndim == 4:
            drawn /= np.sqrt(np.prod(p.shape[1:]), dtype=np.float32)
        else:
            drawn = drawn * np.float32(0.2) + np.float32(not name.endswith("bias"))
        p.copy_(torch.from_numpy(drawn))
    return network.eval()


def picture() -> Tensor:
    """fp32 [1, 3, 128, 128], between 0 and 1"""
    return torch.from_numpy(np.random.default_rng(6).random((1, 3, 128, 128), np.float32))


def digest(shapes: Mapping[str, tuple[int, ...]]) -> str:
    """A digest of names and shapes."""
    lines = [f"{name} {list(shape)}" for name, shape in sorted(shapes.items())]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _create_model(
    architecture: str, pretrained: bool, num_classes: int, **args: Any
) -> MobileNetV5:
    assert (architecture, pretrained, num_classes) == ("mobilenetv5_300m_enc", False, 0)
    return MobileNetV5(**args)


@contextmanager
def timm_here() -> Iterator[None]:
    """While open, transformers' models around timm's MobileNet-V5 can be built."""
    import transformers.models.timm_wrapper.modeling_timm_wrapper as wrapper
    from transformers.utils import import_utils

    if import_utils.is_timm_available():
        yield
        return
    before = import_utils.BACKENDS_MAPPING["timm"]
    import_utils.BACKENDS_MAPPING["timm"] = (lambda: True, "")
    vars(wrapper).update(timm=SimpleNamespace(create_model=_create_model))
    try:
        yield
    finally:
        import_utils.BACKENDS_MAPPING["timm"] = before
        del vars(wrapper)["timm"]
