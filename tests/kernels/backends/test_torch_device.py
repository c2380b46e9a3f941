"""A device of which only torch knows what it can do: asked op by op, here in the place of the CPU."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from op_cases import MAKERS, copies, draw, node_of

from mtmd.base.errors import DeviceError, OptionError
from mtmd.base.extras import install_command
from mtmd.kernels.backends import (
    Cpu,
    Limited,
    Reference,
    backends_for,
    several_backends,
    torch_device,
)
from mtmd.kernels.backends.gpu import Gpu
from mtmd.kernels.backends.torch_device import TorchDevice, attention
from mtmd.kernels.graph import Node, Type
from mtmd.kernels.ops import OPS
from mtmd.kernels.ops.moe import Routing
from mtmd.kernels.parallel.shard import Member


@pytest.fixture
def device() -> TorchDevice:
    return TorchDevice("mps", torch.device("cpu"))


def nmse(result: torch.Tensor, expected: torch.Tensor) -> float:
    power = expected.double().square().sum()
    return float((result.double() - expected.double()).square().sum() / power.clamp(min=1e-30))


@pytest.mark.parametrize("op", sorted(MAKERS))
def test_what_torch_does_rightly_is_taken_and_runs(op: str, device: TorchDevice) -> None:
    for seed in range(3):
        inputs, attrs = draw(op, seed, torch.float32)
        node = node_of(op, inputs, attrs)
        assert device.rejects(node) is None
        actual = device.lower(node)(*copies(inputs))
        assert Type.of(actual) == node.type
        expected = OPS[op].reference(*copies(inputs), **attrs)
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_is_torchs_own(dtype: torch.dtype, device: TorchDevice) -> None:
    taken = 0
    for seed in range(40):
        inputs, attrs = draw("attention", seed, dtype)
        node = node_of("attention", inputs, attrs)
        run = device.lower(node)
        assert device.rejects(node) is None
        taken += getattr(run, "func", None) is attention
        actual = run(*inputs)
        exact = [i.float() if i is not None and i.is_floating_point() else i for i in inputs]
        expected = OPS["attention"].reference(*exact, **attrs)
        assert nmse(actual, expected) <= (1e-9 if dtype == torch.float32 else 1e-4), seed
    assert taken > 10


def test_rows_that_see_nothing_give_zeros() -> None:
    q, k, v = (torch.randn(1, size, 2, 8) for size in (3, 5, 5))
    bounds = torch.tensor([[0, 2], [4, 3], [0, 4]], dtype=torch.int32)
    mask = torch.zeros(3, 5)
    mask[2] = -torch.inf
    result = attention(q, k, v, mask, bounds, scale=0.3)
    assert result[0, 0].abs().min() > 0 and not result[0, 1:].any()


def not_there(*_: object, **__: object) -> torch.Tensor:
    raise NotImplementedError("The operator 'aten::gelu' is not\n implemented for the device")


def on_the_device(monkeypatch: pytest.MonkeyPatch, op: str, wrong: Callable[..., Any]) -> None:
    """What the device runs, and not the reference."""
    right = OPS[op].reference
    calls = iter((right, wrong))
    monkeypatch.setattr(OPS[op], "reference", lambda *a, **k: next(calls)(*a, **k))


@pytest.mark.parametrize(
    ("wrong", "reported"),
    [
        (not_there, "torch on mps: The operator 'aten::gelu' is not implemented for the device"),
        (lambda x, **_: x * 1.1, r"torch on mps gives a wrong result in fp32: NMSE \d"),
        (lambda x, **_: x * torch.nan, "wrong result in fp32: NMSE inf from the reference"),
    ],
)
def test_what_the_device_lacks_or_gets_wrong_is_said(
    device: TorchDevice, monkeypatch: pytest.MonkeyPatch, wrong: Callable[..., Any], reported: str
) -> None:
    inputs, attrs = draw("gelu", 0)
    node = node_of("gelu", inputs, attrs)
    on_the_device(monkeypatch, "gelu", wrong)
    reason = device.rejects(node)
    assert reason is not None and re.search(reported, reason)
    assert device.rejects(node) == reason, "asked once"


def shifted(x: torch.Tensor, by: int = 1) -> torch.Tensor:
    return (x + by) % (x.max() + 1)


WRONG: dict[str, Callable[..., Any]] = {
    "attn_softmax": lambda s, b, **o: OPS["attn_softmax"].reference(s, b.flip(0), **o),
    "embed": lambda t, w, **o: OPS["embed"].reference(shifted(t), w, **o),
    "gather_pages": lambda c, p, **o: OPS["gather_pages"].reference(c, shifted(p), **o),
    "linear_attention": lambda *i, **o: OPS["linear_attention"].reference(
        *i[:-3], -i[-3], *i[-2:], **o
    ),
    "kv_store": lambda c, k, v, s: OPS["kv_store"].reference(c, k, v, shifted(s)),
    "paged_attention": lambda q, *i, **o: OPS["paged_attention"].reference(q * 3, *i, **o),
    "rope_table": lambda p, *i, **o: OPS["rope_table"].reference(p * 2, *i, **o),
    "take_rows": lambda x, at: OPS["take_rows"].reference(x, shifted(at)),
}


@pytest.mark.parametrize("op", sorted(WRONG))
def test_places_positions_and_bounds_are_such_that_a_wrong_one_shows(
    op: str, device: TorchDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Among random problems: of one row, or one key, nothing can be told."""
    nodes = [node_of(op, *draw(op, seed)) for seed in range(12)]
    if op == "attn_softmax":
        nodes = [node for node in nodes if node.inputs[1] is not None]
    assert all(device.rejects(node) is None for node in nodes)
    right, wrong = OPS[op].reference, WRONG[op]
    noticed = 0
    for node in nodes:
        calls = iter((right, wrong, right))
        monkeypatch.setattr(OPS[op], "reference", lambda *a, calls=calls, **k: next(calls)(*a, **k))
        noticed += TorchDevice("mps", torch.device("cpu")).rejects(node) is not None
    assert noticed >= len(nodes) // 3


def test_attention_under_bounds_is_tried_with_many_keys(
    device: TorchDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k = (torch.randn(1, rows, 2, 16) for rows in (40, 3000))
    bounds = torch.zeros(40, 2, dtype=torch.int32)
    node = node_of("attention", [q, k, k, None, bounds], {"scale": 0.25})
    assert device.rejects(node) is None
    monkeypatch.setattr(
        torch_device, "attention", lambda *i, scale, **o: attention(*i, scale=scale * 10, **o)
    )
    reported = TorchDevice("mps", torch.device("cpu")).rejects(node)
    assert reported is not None and "wrong result" in reported


def test_large_weights_are_tried_with_fewer_rows(
    device: TorchDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    right = OPS["matmul"].reference

    def look(x: torch.Tensor, w: torch.Tensor, *bias: Any, **options: Any) -> torch.Tensor:
        seen.append((*w.shape,))
        return right(x, w, *bias, **options)

    leaves = [
        Node("input", (), Type.contiguous(shape, torch.bfloat16), {}, name)
        for name, shape in (("x", (1, 4096)), ("w", (262144, 4096)), ("bias", (262144,)))
    ]
    node = OPS["matmul"](*leaves, name="lm_head")
    monkeypatch.setattr(OPS["matmul"], "reference", look)
    assert device.rejects(node) is None and seen == [(256, 4096), (256, 4096)]


def input_node(name: str, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Node:
    return Node("input", (), Type.contiguous(shape, dtype), {}, name)


def of_real_size(op: str) -> Node:
    """On caches and states of more than 64 MiB: as of Gemma 3 4B with four answers of 8,192 tokens,
    of 64 states of Qwen3-Next, and of a picture of 16,384 patches.
    """
    locations = [input_node(name, 4, dtype=torch.int64) for name in ("slots", "starts", "pages")]
    slots, starts, pages = locations
    rows = [input_node(name, 4, 4, 256) for name in ("k", "v")]
    cache, angles = input_node("cache", 2, 32800, 4, 256), input_node("table", 4, 2, 128)
    state = input_node("state", 65, 128, 32, 128, dtype=torch.float32)
    bounds = input_node("bounds", 4, 2, dtype=torch.int32)
    patches = [input_node(name, 1, 16384, 1280, dtype=torch.float32) for name in "ab"]
    long = input_node("pages", 4096, dtype=torch.int64)
    problems: dict[str, tuple[list[Node | None], dict[str, Any]]] = {
        "kv_store": ([cache, *rows, slots], {}),
        "rope_store": ([cache, *rows, slots, angles], {}),
        "gather_pages": ([cache, pages], {"which": 1, "size": 32}),
        "paged_attention": (
            [input_node("q", 1, 4, 8, 256), input_node("cache", 2, 131104, 4, 256), long, bounds,
             starts],
            {"size": 32, "scale": 0.0625},
        ),
        "state_store": ([state, input_node("rows", 512, 32, 128, dtype=torch.float32), slots], {}),
        "add": (list(patches), {}),
        "rms_norm": ([patches[0], input_node("w", 1280, dtype=torch.float32)], {"eps": 1e-6}),
        "rope": (
            [input_node("x", 1, 16384, 16, 80, dtype=torch.float32),
             input_node("table", 16384, 2, 40, dtype=torch.float32)],
            {},
        ),
    }  # fmt: skip
    inputs, attrs = problems[op]
    node = OPS[op](*inputs, name=op, **attrs)
    assert sum(one.type.bytes for one in node.operands) > 64 << 20
    return node


@pytest.mark.parametrize(
    "op",
    [
        *("kv_store", "rope_store", "gather_pages", "paged_attention"),
        *("state_store", "add", "rms_norm", "rope"),
    ],
)
def test_what_is_large_is_tried_with_less_of_it(
    op: str, device: TorchDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = of_real_size(op)
    assert device.rejects(node) is None and not device.untried
    on_the_device(monkeypatch, op, not_there)
    reported = TorchDevice("mps", torch.device("cpu")).rejects(node)
    assert reported is not None and "is not implemented for the device" in reported


def cut_from(name: str, kind: Type) -> Node:
    """As views are that are cut from a wider value: rows three times as far apart."""
    strides = (*(3 * step for step in kind.strides[:-1]), 1)
    return Node("input", (), Type.strided(kind.shape, kind.dtype, strides), {}, name)


@pytest.mark.parametrize(("op", "cut"), [("add", "b"), ("rope", "x")])
def test_views_are_tried_with_less_of_them_as_what_goes_with_them_is(
    op: str, cut: str, device: TorchDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = of_real_size(op)
    inputs = [cut_from(cut, n.type) if n and n.name == cut else n for n in whole.inputs]
    node = OPS[op](*inputs, name=op, **whole.attrs)
    assert device.rejects(node) is None and not device.untried
    on_the_device(monkeypatch, op, not_there)
    reported = TorchDevice("mps", torch.device("cpu")).rejects(node)
    assert reported is not None and "is not implemented for the device" in reported


def test_attention_of_views_is_tried_with_fewer_rows(device: TorchDevice) -> None:
    q, k, v = (cut_from(name, Type.contiguous((1, 400, 2, 8), torch.float32)) for name in "qkv")
    mask = input_node("mask", 400, 400, dtype=torch.float32)
    node = OPS["attention"](q, k, v, mask, name="attention", scale=0.3)
    assert device.rejects(node) is None and not device.untried


def test_experts_are_not_tried_and_that_is_kept(device: TorchDevice) -> None:
    leaves = [
        input_node("x", 4, 2048),
        input_node("router", 4, 64),
        *(input_node(name, 64, 1024, 2048) for name in ("gate", "up")),
        input_node("down", 64, 2048, 1024),
    ]
    node = OPS["moe"](*leaves, name="experts", routing=Routing(8, normalize=True))
    assert device.rejects(node) is None and list(device.untried) == ["moe"]
    assert device.untried["moe"] > 3 * 64 * 1024 * 2048 * 2


def test_no_memory_to_try_with_says_nothing_of_the_op(
    device: TorchDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = node_of("gelu", *draw("gelu", 0))
    right = OPS["gelu"].reference

    def full(*_: object, **__: object) -> torch.Tensor:
        raise RuntimeError("MPS backend out of memory (MPS allocated: 9 GB)")

    for wrong, reported in ((full, False), (not_there, True)):
        calls = iter((right, wrong))
        monkeypatch.setattr(
            OPS["gelu"], "reference", lambda *a, calls=calls, **k: next(calls)(*a, **k)
        )
        assert bool(device.rejects(node)) == reported, "asked again"


def test_devices_that_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OptionError, match="'mps': found 0 Metal devices; use device='cpu'"):
        backends_for("mps")
    with pytest.raises(OptionError, match="'xpu:1': found 0 XPU devices"):
        backends_for("xpu:1")
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert [b.name for b in backends_for("mps")] == ["mps", "cpu", "reference"]


@pytest.mark.parametrize("system", ["Linux", "Windows"])
def test_a_cuda_device_without_triton_is_torchs(
    system: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert [type(b) for b in backends_for("cuda:1")] == [Gpu, Cpu, Reference]
    monkeypatch.setattr("mtmd.kernels.backends.find_spec", lambda _: None)
    monkeypatch.setattr("platform.system", lambda: system)
    for device, names in (("cuda:1", ["cuda:1"]), ("auto", ["cuda:0"])):
        accelerator, *others = backends_for(device)
        assert isinstance(accelerator, TorchDevice) and str(accelerator.device) == accelerator.name
        assert [accelerator.name] == names and [b.name for b in others] == ["cpu", "reference"]
        assert accelerator.lacks is not None and "Triton" in accelerator.lacks
        reported = install_command("gpu") if system == "Linux" else "pip install triton-windows"
        assert reported in accelerator.lacks
    every = several_backends("auto")
    assert [b.name for b in every] == ["cuda:0", "cuda:1", "cpu", "reference"]
    assert all(isinstance(b, TorchDevice) for b in every[:2])
    (limited, *_) = backends_for("cuda", ["attention"])
    assert isinstance(limited, Limited) and isinstance(limited.inner, TorchDevice)


def test_a_collective_is_not_tried_by_one_rank_alone(
    device: TorchDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OPS["all_reduce"], "reference", not_there)
    assert device.rejects(OPS["all_reduce"](input_node("x", 1, 8), group=Member(0, 2))) is None


def test_a_device_that_fails_is_no_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of CUDA's: nothing runs there any more, and no other op is to be blamed."""

    def fails(*_: object, **__: object) -> torch.Tensor:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    subject, node = TorchDevice("cuda:0", torch.device("cpu")), node_of("gelu", *draw("gelu", 0))
    on_the_device(monkeypatch, "gelu", fails)
    with pytest.raises(DeviceError, match="cuda:0 has failed while gelu was tried"):
        subject.rejects(node)
