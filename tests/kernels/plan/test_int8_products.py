"""Activations in 8 bits: which products have them, what that changes, and where it is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mtmd.base.errors import OptionError
from mtmd.kernels.cpu import quant_matmul
from mtmd.kernels.cpu.native.compile import Cpu, host
from mtmd.kernels.cpu.tiled import many_rows, octets
from mtmd.kernels.cpu.tiled.cpu import host_form
from mtmd.kernels.gpu.quant_matmul.cases import random_blocks
from mtmd.kernels.graph import toposort
from mtmd.kernels.plan import int8_products
from mtmd.llm.batch import BatchShape
from mtmd.llm.engine.make_batch import make_batch
from mtmd.llm.engine.runner import Runner
from mtmd.llm.engine.spans import Span
from mtmd.loading import load

HERE = octets.why_not(host_form("f32"), host()) is None
PICTURE = Path(__file__).parents[3] / "examples" / "one.png"
needs_it = pytest.mark.skipif(not HERE, reason="no product is faster in 8 bits on this CPU")


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
        assert "activations" not in str(model.warmup_report)


@needs_it
def test_weights_that_16_bits_multiply_as_fast_are_read_as_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(octets, "_has_dots", lambda _: False)
    with (
        load("demo", threads=1, weights="Q8_0", dtype="fp32") as plain,
        load("demo", threads=1, weights="Q8_0", dtype="fp32", activations="int8") as same,
    ):
        graph = same.runner.graph(BatchShape(1))
        products = sum(1 for node in toposort(*graph) if node.op == "matmul")
        assert int8_products.count(graph) == 0
        assert 0 < int8_products.count_as_fast(graph) < products
        assert torch.equal(read(plain.runner, 60), read(same.runner, 60))
        told = str(same.warmup_report)
        assert f"activations: int8 in 0 of the decoder's {products} products" in told
        assert f"16 bits in {int8_products.count_as_fast(graph)} products" in told
        receipt = same.answer(PICTURE, "How many?", max_tokens=2).receipt
        assert receipt.activations == "auto" and "activations" not in str(receipt)


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
    assert octets.in_octets("Q8_0", ("single", 8, 4, 2), Cpu("x86-64-v3", "+avx2")) is None
    assert octets.in_octets("NF4_64", ("single", 16, 8, 2), vnni) is None


def test_the_option_is_refused_where_it_would_do_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    if HERE:
        with pytest.raises(OptionError, match="found weights in plain numbers, expected some in"):
            load("demo", threads=1, activations="int8")
    monkeypatch.setattr(int8_products, "host_form", lambda _: ("tiles", 16, 8, 2))
    with pytest.raises(
        OptionError,
        match=r"activations int8: found this CPU, but its AMX .*, expected one with AVX2",
    ):
        load("demo", threads=1, weights="Q4_0", activations="int8")
