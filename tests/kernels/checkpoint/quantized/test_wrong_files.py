"""Quantized files that are wrong, cut or hostile: one line that says what, before any weight is
read; values that cannot be are found when they are.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from quantized_files import FORMATS, ordered
from safetensors.torch import save_file
from torch import Tensor

from mtmd.base.errors import ModelError
from mtmd.kernels.checkpoint.open_weights import open_weights
from mtmd.kernels.checkpoint.quantized.parts import Packed

Held = dict[str, Tensor]
Change = Callable[[Held, dict[str, Any]], Any]
STATE = "weight.quant_state.bitsandbytes__nf4"


def put(**tensors: Tensor | None) -> Change:
    """Replace parts, by names with __ for dots; None takes one away."""

    def change(held: Held, settings: dict[str, Any]) -> None:  # noqa: ARG001
        for name, tensor in tensors.items():
            held.pop(name.replace("__", "."), None)
            if tensor is not None:
                held[name.replace("__", ".")] = tensor

    return change


def stated(tensor: Tensor | None) -> Change:
    def change(held: Held, settings: dict[str, Any]) -> None:  # noqa: ARG001
        held.pop(STATE)
        if tensor is not None:
            held[STATE] = tensor

    return change


def cut(part: str) -> Change:
    return lambda held, _: held.update({part: held[part].flatten()[:-1]})


def poison(part: str, value: float) -> Change:
    def change(held: Held, settings: dict[str, Any]) -> None:  # noqa: ARG001
        tensor = held[part].float().flatten()
        tensor[1 % len(tensor)] = value
        held[part] = tensor.view(held[part].shape).to(held[part].dtype)

    return change


def say(**values: Any) -> Change:
    return lambda _, settings: settings.update(values)


def state(**values: Any) -> Change:
    """The JSON of bitsandbytes with other values."""

    def change(held: Held, settings: dict[str, Any]) -> None:  # noqa: ARG001
        known = json.loads(bytes(held[STATE].tolist()))
        held[STATE] = raw(json.dumps(known | values))

    return change


def raw(text: str) -> Tensor:
    return torch.tensor(list(text.encode()), dtype=torch.uint8)


def groups(**weights: Any) -> Change:
    return say(config_groups={"group_0": {"weights": weights}})


HUGE = 1 << 60
OPENED: list[tuple[str, Change, str]] = [
    ("fp8", put(weight_scale_inv=None), "weight_scale is missing; the checkpoint is inc"),
    ("fp8", cut("weight_scale_inv"), r"weight_scale_inv has shape \[3\], expected \[2, 2\] or"),
    ("fp8", put(weight_scale_inv=torch.ones(2, 2).int()), "weight_scale_inv is i32, expected fp32"),
    ("fp8", say(weight_block_size=[0, 128]), "weight_block_size is .0, 128., expected 2 sizes"),
    ("fp8", say(weight_block_size=[-128, HUGE]), "expected 2 sizes from 1 to 1048576"),
    ("fp8", say(weight_block_size="all"), "weight_block_size is 'all', expected 2 sizes"),
    ("fp8", say(weight_block_size=[64, 64]), r"expected \[3, 4\] or"),
    (
        "fp8-tensor",
        put(weight__pre_quant_scale=None, pre_quant_scale=torch.ones(256)),
        "scales act",
    ),
    ("awq", put(scales=None), "scales is missing"),
    ("awq", put(qzeros=None), "qzeros is missing"),
    ("awq", cut("scales"), r"scales has shape \[319\], expected \[319, 160\]"),
    ("awq", put(qweight=torch.zeros(256, 20)), "qweight is fp32, expected i32"),
    ("awq", put(qweight=torch.zeros(9).int()), r"qweight has shape \[9\], expected a matrix"),
    (
        "awq",
        put(qzeros=torch.zeros(2, 21).int()),
        r"qzeros has shape \[2, 21\], expected \[2, 20\]",
    ),
    ("awq", say(group_size=-5), "group_size is -5, expected -1 or from 1 to 1048576"),
    ("awq", say(group_size=HUGE), "group_size is 1152921504606846976, expected -1 or"),
    ("awq", say(version="gemv"), "weights are AWQ in version 'gemv', expected gemm"),
    (
        "gptq",
        put(qzeros=torch.zeros(2, 3).int()),
        r"qzeros \[2, 3\] are no codes of 2 or 3 or 4 or",
    ),
    (
        "gptq",
        put(scales=torch.ones(3, 160).half(), qzeros=torch.zeros(3, 20).int()),
        "has 3 groups of",
    ),
    ("gptq", put(g_idx=torch.zeros(5).int()), r"g_idx has shape \[5\], expected \[256\]"),
    (
        "gptq",
        put(g_idx=torch.full((256,), 7).int()),
        "g_idx does not put 128 columns into each group",
    ),
    (
        "gptq",
        put(g_idx=-ordered(256, 128).int()),
        "does not put 128 columns into each group from 0 to 1",
    ),
    ("gptq", put(g_idx=torch.ones(256)), "g_idx is fp32, expected i32 or i64"),
    (
        "gptq",
        say(checkpoint_format="marlin"),
        "checkpoint_format is 'marlin', expected gptq or gptq_v2",
    ),
    ("int4", put(weight_scale=None), "weight_scale is missing"),
    ("int4", put(weight_shape=None), "weight_shape is missing"),
    ("int4", put(weight_shape=torch.tensor([160, HUGE])), "has rows of 32 words for 11529215"),
    ("int4", put(weight_shape=torch.tensor([160, -256])), "has rows of 32 words for -256 values"),
    ("int4", put(weight_scale=torch.ones(160, 3)), "has 3 groups of scales for rows of 256 values"),
    (
        "int4",
        put(weight_scale=torch.ones(7, 4)),
        r"weight_scale has shape \[7, 4\], expected \[160, 4\]",
    ),
    ("int4", groups(num_bits=5), "has rows of 32 words for 256 values, expected 5 bits each"),
    ("int4", groups(num_bits=-4), "num_bits is -4, expected an integer from 1 to 32"),
    ("int4", groups(num_bits=4, group_size=HUGE), "group_size is 1152921504606846976, expected an"),
    ("int4", say(config_groups=[1]), "config_groups: found list, expected an object"),
    ("int4-zeros", cut("weight_zero_point"), r"weight_zero_point has shape \[159\], expected"),
    (
        "int8-bytes",
        put(weight_scale=torch.ones(3)),
        r"weight_scale has shape \[3\], expected \[160, 1\]",
    ),
    ("nvfp4", put(weight_global_scale=None), "weight_global_scale is missing"),
    (
        "nvfp4",
        put(weight_scale=torch.ones(160, 16)),
        "weight_scale is fp32, expected float8_e4m3fn",
    ),
    (
        "nvfp4",
        put(weight_global_scale=torch.ones(5)),
        r"weight_global_scale has shape \[5\], expected",
    ),
    ("mxfp4", cut("weight_scale"), r"weight_scale has shape \[1279\], expected \[160, 8\]"),
    ("nf4", put(weight__absmax=None), "absmax is missing"),
    ("nf4", put(weight=None), "tensor .*nf4 is quantized, but .*weight is missing"),
    ("nf4", stated(None), "quant_state.bitsandbytes__nf4 is missing"),
    ("nf4", stated(raw("{" * 9)), "is not JSON; fetch the checkpoint again"),
    ("nf4", stated(raw("[" * 16000)), "is not JSON; fetch the checkpoint"),
    ("nf4", stated(raw(" " * 20000)), "expected at most 16384 bytes of JSON"),
    ("nf4", stated(raw("[1]")), "found list, expected an object"),
    ("nf4", state(shape=[HUGE, HUGE]), "shape is .*, expected two sizes of a matrix"),
    ("nf4", state(shape=[-160, -256]), "shape is .*, expected two sizes of a matrix"),
    ("nf4", state(shape=[160, 512]), r"expected two values of \[160, 512\] in each byte"),
    ("nf4", state(blocksize=0), "blocksize is 0, expected an integer from 1 to 1048576"),
    ("nf4", state(blocksize=HUGE), "blocksize is 1152921504606846976, expected an integer"),
    ("nf4-nested", state(nested_offset="x"), "nested_offset is 'x', expected a number"),
    ("nf4-nested", state(nested_blocksize=3), r"nested_absmax has shape \[2\], expected \[107\]"),
    ("bnb-int8", cut("SCB"), r"SCB has shape \[159\], expected \[160\]"),
    ("mlx", put(scales=None), "scales is missing"),
    ("mlx", put(biases=None), "biases is missing"),
    ("mlx", say(group_size=0), "group_size is 0, expected an integer from 1 to 1048576"),
    (
        "mlx",
        say(group_size=48),
        "has rows of 32 words and 4 scales for 48 values each, expected 2, 3",
    ),
    ("mlx", say(mode="mxfp8"), "mode is 'mxfp8', expected one of affine, mxfp4"),
]
READ: list[tuple[str, Change, str]] = [
    ("fp8", poison("weight_scale_inv", float("inf")), "has scales that are no finite numbers"),
    ("fp8", poison("weight", float("nan")), "weight has codes that are no numbers"),
    ("gptq", poison("scales", float("nan")), "has scales that are no finite numbers"),
    ("nvfp4", poison("weight_scale", -1.0), "has scales that are negative or no finite numbers"),
    ("nvfp4", poison("weight_scale", float("nan")), "has scales that are negative or no finite"),
    ("nvfp4", put(weight_global_scale=torch.zeros(1)), "has scales that are negative or no finite"),
    (
        "mxfp4",
        put(weight_scale=torch.full((160, 8), 255).byte()),
        "has scales that are negative or",
    ),
    ("nf4", put(weight__quant_map=torch.ones(16)), "quant_map differs from the values of nf4"),
    (
        "mlx",
        put(scales=torch.full((160, 4), 1e30)),
        "has numbers beyond fp16, in which they are kept",
    ),
]


def changed(path: Path, name: str, change: Change) -> Path:
    form, weight = FORMATS[name], torch.randn(160, 256, generator=torch.Generator().manual_seed(1))
    held, settings = dict(form.quantize(weight)[0]), dict(form.settings)
    change(held, settings)
    (path / "config.json").write_text(json.dumps({"quantization_config": settings}))
    tensors = {f"x.{part}": tensor.contiguous() for part, tensor in held.items()}
    save_file(tensors, path / "model.safetensors")
    return path


@pytest.mark.parametrize("case", range(len(OPENED)), ids=lambda i: f"{OPENED[i][0]}-{i}")
def test_wrong_parts(case: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name, change, words = OPENED[case]
    monkeypatch.setattr(Packed, "read", lambda _: pytest.fail("a weight was read"))
    with pytest.raises(ModelError, match=words) as raised:
        open_weights(changed(tmp_path, name, change))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("case", range(len(READ)), ids=lambda i: f"{READ[i][0]}-{i}")
def test_wrong_values(case: int, tmp_path: Path) -> None:
    name, change, words = READ[case]
    file = open_weights(changed(tmp_path, name, change))
    with pytest.raises(ModelError, match=words) as raised:
        file.read("x.weight")
    assert "\n" not in str(raised.value)
