"""Activations in 8 bits: which products have them, what that changes, and where it is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mtmd.base.errors import OptionError
from mtmd.bench.shapes import random_checkpoint
from mtmd.kernels import ops
from mtmd.kernels.cpu import quant_matmul
from mtmd.kernels.cpu.native.compile import Cpu, host
from mtmd.kernels.cpu.tiled import many_rows, octets
from mtmd.kernels.cpu.tiled.cpu import host_form
from mtmd.kernels.gpu.quant_matmul.cases import random_blocks
from mtmd.kernels.graph import Node, Type, graph_input, toposort
from mtmd.kernels.layers import Weights
from mtmd.kernels.plan import int8_products
from mtmd.llm.batch import BatchShape
from mtmd.llm.engine.make_batch import make_batch
from mtmd.llm.engine.runner import Runner
from mtmd.llm.engine.spans import Span
from mtmd.loading import load
from mtmd.model import Model
from mtmd.options.load import LoadOptions

HERE = octets.why_not(host_form("f32"), host()) is None
PICTURE = Path(__file__).parents[3] / "examples" / "one.png"
needs_it = pytest.mark.skipif(not HERE, reason="no product is faster in 8 bits on this CPU")


def random_text(**chosen: Any) -> Model:
    """A decoder alone, with random weights in BF16."""
    return Model(random_checkpoint("qwen3-0.6b", "BF16"), LoadOptions(threads=1, **chosen))


def read(runner: Runner, tokens: int) -> torch.Tensor:
    """Logits of the last of so many tokens, read at once."""
    cache = runner.new_cache()
    sequence = runner.begin(cache, 0)
    batch = make_batch([(sequence, [Span(tuple(range(5, 5 + tokens)))])], cache)
    return runner.forward(batch)[0].double()


@needs_it
def test_prompts_are_read_in_8_bits_and_answers_written_as_before() -> None:
    with (
        load("demo", threads=1, weights="Q4_0", dtype="fp32") as plain,
        load("demo", threads=1, weights="Q4_0", dtype="fp32", activations="int8") as rounded,
    ):
        graph = rounded.runner.graph(BatchShape(1))
        products = [node for node in toposort(*graph) if node.op == "matmul"]
        assert not int8_products.count(plain.runner.graph(BatchShape(1)))
        assert 0 < int8_products.count(graph) < len(products)
        assert not next(n for n in reversed(products)).attrs.get("int8"), "logits are as before"
        assert torch.equal(read(plain.runner, 3), read(rounded.runner, 3))
        exact, result = (read(model.runner, 60) for model in (plain, rounded))
        error = float((exact - result).square().mean() / exact.square().mean())
        assert 1e-9 < error < 1e-2


@needs_it
def test_what_is_rounded_is_reported() -> None:
    with load("demo", threads=1, weights="Q4_0", dtype="fp32", activations="int8") as model:
        receipt = model.answer(PICTURE, "How many?", max_tokens=2).receipt
        assert receipt.activations == "int8"
        assert ", activations: int8; " in str(receipt)
        count = int8_products.count(model.runner.graph(BatchShape(1)))
        told = str(model.warmup_report)
        assert f"activations: int8 in {count} of the decoder's " in told
    with load("demo", threads=1) as model:
        assert "activations" not in str(model.warmup_report), "its weights are not quantized"
    with load("demo", threads=1, weights="Q4_0", dtype="fp32") as model:
        told = str(model.warmup_report)
        assert "activations: not rounded; --activations int8 would read prompts faster" in told
        assert f"less exactly, in {count} products of the decoder" in told


@needs_it
@pytest.mark.parametrize("has_dots", [False, True])
def test_weights_of_8_bits_take_7_bits_without_an_instruction_for_both(
    has_dots: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a tower asks for them; a decoder stays at 16."""
    monkeypatch.setattr(octets, "_has_dots", lambda _: has_dots)
    x = graph_input("x", (32, 64), torch.float32, lambda x: x)
    w = graph_input("w", (64, 68), torch.uint8, lambda w: w)
    first = ops.matmul(x, w, quant="Q8_0", name="first")
    last = ops.matmul(first, w, quant="Q8_0", name="last")
    tower = int8_products.marked([last], int8_products.TOWER_BITS)
    decoder = int8_products.marked([last])
    assert int8_products.count(tower) == 1 and int8_products.count_in_16_bits(tower) == 0
    assert int8_products.count_in_7_bits(tower) == (0 if has_dots else 1)
    assert int8_products.count(decoder) == (1 if has_dots else 0)
    assert int8_products.count_in_7_bits(decoder) == 0
    assert int8_products.count_in_16_bits(decoder) == (0 if has_dots else 1)


@needs_it
def test_a_decoder_of_8_bits_is_read_as_before_without_that(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(octets, "_has_dots", lambda _: False)
    with (
        load("demo", threads=1, weights="Q8_0", dtype="fp32") as plain,
        load("demo", threads=1, weights="Q8_0", dtype="fp32", activations="int8") as same,
    ):
        graph = same.runner.graph(BatchShape(1))
        assert int8_products.count(graph) == 0
        assert torch.equal(read(plain.runner, 60), read(same.runner, 60))
        said = f"16 bits in {int8_products.count_in_16_bits(graph)} of the decoder's products"
        assert said in str(same.warmup_report)
        assert same.loaded.activations == "int8 (encoder)"


@needs_it
@pytest.mark.parametrize("shape", [(40, 96), (3, 20, 96), (1, 25, 96)])
def test_x_of_several_ranks(shape: tuple[int, ...]) -> None:
    x, w = torch.randn(shape), random_blocks("Q4_0", 37, 96)
    result = quant_matmul.KERNEL.run(x, w, None, quant="Q4_0", int8=True)
    flat, out = x.reshape(-1, 96), torch.empty(x.numel() // 96, 37)
    many_rows.multiply("Q4_0", flat, w, None, out, int8=True)
    assert result.shape == (*shape[:-1], 37) and torch.equal(result.view(-1, 37), out)
    exact = quant_matmul.KERNEL.run(x, w, None, quant="Q4_0")
    assert not torch.equal(result, exact)


def test_a_cpu_where_nothing_is_gained() -> None:
    amx = octets.why_not(("tiles", 16, 8, 2), Cpu("sapphirerapids", "+avx512bw,+avx512vnni"))
    assert amx is not None and "AMX multiplies bf16 faster" in amx
    assert octets.why_not(None, Cpu("x86-64", "")) == "it has neither AVX2 nor AVX-512 BW"
    vnni = Cpu("x86-64-v4", "+avx512f,+avx512bw,+avx512vnni")
    assert octets.why_not(("pairs", 16, 8, 2), vnni) is None
    assert octets.in_octets("Q8_0", ("pairs", 16, 8, 2), vnni) == ("octets", 16, 8, 2)
    avx2 = Cpu("x86-64-v3", "+avx2")
    assert octets.in_octets("Q8_0", ("single", 8, 4, 2), avx2) == ("octets", 8, 4, 2)
    assert [octets.bits_of(kind, avx2.has) for kind in ("Q4_0", "Q6_K", "Q8_0")] == [8, 8, 7]
    assert octets.bits_of("Q8_0", vnni.has) == 8
    assert octets.in_octets("NF4_64", ("single", 16, 8, 2), vnni) is None


def test_the_option_is_refused_where_it_would_do_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    if HERE:
        with pytest.raises(
            OptionError, match=r"found weights in (plain numbers|BF16), expected some in"
        ):
            random_text(activations="int8", dtype="fp32")
    monkeypatch.setattr(int8_products, "host_form", lambda _: ("tiles", 16, 8, 2))
    with pytest.raises(
        OptionError,
        match=r"activations int8: found this CPU, but its AMX .*, expected one with AVX2",
    ):
        load("demo", threads=1, weights="Q4_0", activations="int8")


def tower(source: StoredTower) -> Node:
    """A patch embedding, a layer whose table and products have weights of their own, and the
    projector.
    """
    weights = Weights(source, torch.float32)
    pixels = graph_input("pixels", (1, 64, 64), torch.float32, lambda x: x)
    x = weights.linear(pixels, "patch")
    x = ops.add(x, weights.tensor("position.weight"), name="x")
    y = weights.linear(x, "up")
    y = weights.linear(y, "narrow")
    y = weights.linear(y, "down")
    x = weights.linear(ops.add(x, y, name="y"), "shared")
    x = ops.add(x, weights.tensor("shared.weight"), name="z")
    return weights.linear(weights.linear(x, "first_mlp"), "projector")


SHAPES = {
    "patch": (64, 64),
    "position": (64, 64),
    "up": (1040, 64),
    "narrow": (24, 1040),
    "down": (64, 24),
    "shared": (64, 64),
    "first_mlp": (96, 64),
    "projector": (32, 96),
}


class StoredTower:
    def type_of(self, name: str, dtype: torch.dtype) -> Type:
        return Type.contiguous(SHAPES[name.removesuffix(".weight")], dtype)

    def read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(self.type_of(name, dtype).shape, dtype=dtype)

    def quant(self, name: str) -> str | None:  # noqa: ARG002
        return None

    def order(self, name: str) -> str | None:  # noqa: ARG002
        return None


def test_weights_of_a_tower_that_are_quantized() -> None:
    """Neither the first product's nor the last one's, none that something else reads, none whose
    rows are far from whole blocks.
    """
    chosen = int8_products.weights_to_quantize([tower(StoredTower())])
    assert chosen == {f"{name}.weight": "Q8_0" for name in ("up", "narrow", "first_mlp")}
