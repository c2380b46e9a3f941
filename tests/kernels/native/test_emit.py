"""Functions of the emitter against numpy's in float64, on every kind of number."""

from __future__ import annotations

import ctypes
import math
import os
import platform
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from mtmd.kernels.cpu.native import compile
from mtmd.kernels.cpu.native.compile import Compiler, Cpu, compile_kernel, compiler
from mtmd.kernels.cpu.native.emit import F32, I16, Emitter, vec

CALL = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p)


def call(address: int, args: list[int], first: int, last: int) -> None:
    words = np.array(args, np.int64)
    CALL(address)(words.ctypes.data, first, last, None)


def emit_function(e: Emitter, name: str, dtype: str) -> None:
    x, y = e.arg_ptr(0), e.arg_ptr(1)
    for i, mask in e.spans(e.first, e.last, 16):
        value = e.read(x, dtype, i, 16, mask)
        if name.startswith("gelu"):
            result = e.gelu(value, name.removeprefix("gelu_"))
        elif name in ("sin", "cos"):
            result = e.sin_cos(value)[name == "cos"]
        else:
            result = getattr(e, name)(value)
        e.write(y, dtype, i, result, mask)


def erf(x: np.ndarray) -> np.ndarray:
    return np.array([math.erf(v) for v in x])


FUNCTIONS: dict[str, tuple[Callable[[np.ndarray], np.ndarray], float, float, float]] = {
    "exp": (np.exp, -86.0, 88.0, 2e-7),
    "tanh": (np.tanh, -20.0, 20.0, 5e-7),
    "sigmoid": (lambda x: 1 / (1 + np.exp(-x)), -80.0, 80.0, 3e-7),
    "silu": (lambda x: x / (1 + np.exp(-x)), -80.0, 80.0, 3e-7),
    "log": (np.log, 1e-30, 1e30, 3e-7),
    "softplus": (lambda x: np.logaddexp(0, x), -80.0, 80.0, 1e-6),
    "sin": (np.sin, -3e5, 3e5, 0),
    "cos": (np.cos, -3e5, 3e5, 0),
    "erf": (erf, -5.0, 5.0, 0),
    "gelu_none": (lambda x: x * 0.5 * (1 + erf(x / math.sqrt(2))), -8.0, 8.0, 0),
    "gelu_quick": (lambda x: x / (1 + np.exp(-1.702 * x)), -8.0, 8.0, 3e-6),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_function(name: str) -> None:
    function, low, high, relative = FUNCTIONS[name]
    x = np.linspace(low, high, 100003).astype(np.float32)
    y = np.full_like(x, np.nan)
    call(compile_kernel(emit_function, name, "f32"), [x.ctypes.data, y.ctypes.data], 0, len(x))
    np.testing.assert_allclose(
        y, function(x.astype(np.float64)), rtol=relative, atol=6e-7 if not relative else 1e-30
    )


@pytest.mark.parametrize("name", ["exp", "tanh", "sigmoid"])
def test_what_is_no_number(name: str) -> None:
    x = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-30, -1e30], np.float32)
    y = np.zeros_like(x)
    call(compile_kernel(emit_function, name, "f32"), [x.ctypes.data, y.ctypes.data], 0, len(x))
    np.testing.assert_allclose(y, getattr(torch, name)(torch.from_numpy(x)).numpy(), rtol=1e-6)


def test_bf16_rounds_as_torch_does() -> None:
    x = torch.cat(
        [torch.randn(1000), torch.tensor([0.0, torch.inf, -torch.inf, torch.nan])]
    ).bfloat16()
    y = torch.zeros_like(x)
    call(compile_kernel(emit_function, "tanh", "bf16"), [x.data_ptr(), y.data_ptr()], 0, len(x))
    torch.testing.assert_close(y, torch.tanh(x.float()).bfloat16(), rtol=0, atol=0, equal_nan=True)


def emit_sums(e: Emitter, count: int, lanes: int) -> None:
    x, y = e.arg_ptr(0), e.arg_ptr(1)
    result = e.sums([e.load(x, vec(F32, lanes), i * lanes) for i in range(count)])
    e.store(y, result)


@pytest.mark.parametrize(("count", "lanes"), [(16, 16), (8, 16), (4, 16), (1, 16), (4, 4), (2, 8)])
def test_sums(count: int, lanes: int) -> None:
    x = np.arange(count * lanes, dtype=np.float32).reshape(count, lanes) % 37
    y = np.full(count, np.nan, np.float32)
    call(compile_kernel(emit_sums, count, lanes), [x.ctypes.data, y.ctypes.data], 0, 1)
    np.testing.assert_array_equal(y, x.sum(1))


def test_code_for_other_cpus(tmp_path) -> None:
    """A CPU without AVX-512, and one of the oldest, from the same kernel."""
    for features in ("", "+sse2"):
        other = Compiler(Cpu("x86-64-v3" if not features else "x86-64", features), tmp_path)
        x, y = np.linspace(-3, 3, 37).astype(np.float32), np.full(37, np.nan, np.float32)
        call(other.kernel(emit_function, "exp", "f32"), [x.ctypes.data, y.ctypes.data], 0, 37)
        np.testing.assert_allclose(y, np.exp(x), rtol=1e-6)


def emit_halves(e: Emitter, lanes: int) -> None:
    """Halves to float32, and that back."""
    halves, wide, back = (e.arg_ptr(i) for i in range(3))
    with e.loop(e.first, e.last) as i:
        value = e.load(halves, vec(I16, lanes), i * lanes).half_to_f32()
        e.store(wide, value, i * lanes)
        e.store(back, value.f32_to_half(), i * lanes)


def emit_to_halves(e: Emitter, lanes: int) -> None:
    wide, halves = e.arg_ptr(0), e.arg_ptr(1)
    with e.loop(e.first, e.last) as i:
        e.store(halves, e.load(wide, vec(F32, lanes), i * lanes).f32_to_half(), i * lanes)


@pytest.mark.parametrize("cpu", [None, Cpu("x86-64", "-f16c")], ids=["this", "without F16C"])
@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="code for x86")
def test_halves(cpu: Cpu | None, tmp_path) -> None:
    """Every half, and numbers that lie between; a CPU may have no instruction for them."""
    made = Compiler(cpu, tmp_path)
    halves = np.arange(1 << 16, dtype=np.uint16)
    wide, back = np.empty(1 << 16, np.float32), np.empty_like(halves)
    pointers = [a.ctypes.data for a in (halves, wide, back)]
    call(made.kernel(emit_halves, 8), pointers, 0, len(halves) // 8)
    expected = halves.view(np.float16).astype(np.float32)
    np.testing.assert_array_equal(wide, expected)
    numbers = ~np.isnan(expected)
    np.testing.assert_array_equal(back[numbers], halves[numbers])
    assert np.isnan(back[~numbers].view(np.float16)).all()
    size = expected[:0x7C01].copy()
    between = np.concatenate(
        [(size[1:] + size[:-1]) / 2, np.float32([65519.996, 65520, 1e9, 1e-9])]
    )
    x = np.concatenate([between, np.nextafter(between, np.float32(0)), -between])
    x = np.resize(x, -(-len(x) // 8) * 8).astype(np.float32)
    result = np.empty(len(x), np.uint16)
    call(made.kernel(emit_to_halves, 8), [x.ctypes.data, result.ctypes.data], 0, len(x) // 8)
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(result, x.astype(np.float16).view(np.uint16))


def test_kept_on_disk_and_damaged_files(tmp_path) -> None:
    from mtmd.kernels.cpu.native.rows import emit_store

    def used(compiler: Compiler) -> tuple[int, int]:
        compiler.kernel(emit_store, "f32", "f32", 2)
        return compiler.stats.kernels, compiler.stats.from_cache

    assert used(Compiler(folder=tmp_path)) == (1, 0)
    assert used(Compiler(folder=tmp_path)) == (1, 1)
    (file,) = tmp_path.glob("*.o")
    file.write_bytes(file.read_bytes()[:-40])
    assert used(Compiler(folder=tmp_path)) == (1, 0)
    assert used(Compiler(folder=tmp_path)) == (1, 1)
    assert not [f for f in tmp_path.iterdir() if f.suffix != ".o"]
    assert used(Compiler(folder=tmp_path / "not" / "there")) == (1, 0)


def test_what_kernels_are_written_with_is_part_of_their_key():
    """Else machine code of earlier tables would be taken from the disk."""
    root = Path(compile.__file__).parents[2]
    files = {p.name for folder in compile.SOURCES for p in (root / folder).glob("*.py")}
    assert all((root / folder).is_dir() for folder in compile.SOURCES)
    assert {"emit.py", "products.py", "unpack.py", "blocks.py", "blocks_of_32.py"} <= files


def emit_power(e: Emitter, degree: int, lanes: int) -> None:
    with e.loop(e.first, e.last, lanes) as i:
        x = e.load(e.arg_ptr(0), vec(F32, lanes), i)
        e.store(e.arg_ptr(1), e.exp2(x, degree), i)


TARGETS = {"this CPU": None, "AVX2": Cpu("x86-64-v3", "+avx2,+fma")}


def compilers(tmp_path: Path) -> list[Compiler]:
    """This CPU's, and one that makes code without AVX-512 where that runs."""
    old = [Compiler(TARGETS["AVX2"], tmp_path)] if compile.host().has("avx2") else []
    return [compiler(), *old]


@pytest.mark.parametrize("degree, error", [(3, 8e-5), (5, 2e-7)])
def test_powers_of_two(degree: int, error: float, tmp_path: Path) -> None:
    edges = [0.0, -0.0, -math.inf, math.inf, math.nan, -1e30, -3.4e38, 200.0]
    x = np.concatenate((np.linspace(-125.9, 127.99, 4096 - 8), edges)).astype(np.float32)
    for made in compilers(tmp_path):
        y = np.full_like(x, np.nan)
        address = made.kernel(emit_power, degree, 16)
        call(address, [x.ctypes.data, y.ctypes.data], 0, len(x))
        expected = np.exp2(x[:-8].astype(np.float64))
        assert np.abs(y[:-8] / expected - 1).max() < error
        assert y[-8:-6] == pytest.approx(1, rel=error)
        assert y[-6] == 0 and y[-5] == np.inf and np.isnan(y[-4])
        assert (y[-3:-1] == 0).all() and y[-1] == np.inf


def emit_turned(e: Emitter, lanes: int) -> None:
    rows = [e.load(e.arg_ptr(0), vec(F32, lanes), i * lanes) for i in range(lanes)]
    for i, row in enumerate(e.transposed(rows)):
        e.store(e.arg_ptr(1), row, i * lanes)
    largest = e.folded(rows[: lanes // 2], e.maximum)
    e.store(e.arg_ptr(2), largest)


@pytest.mark.parametrize("lanes", [4, 8, 16])
def test_rows_turned_and_folded(lanes: int, tmp_path: Path) -> None:
    x = np.random.default_rng(lanes).standard_normal((lanes, lanes)).astype(np.float32)
    for made in compilers(tmp_path):
        y, top = np.empty_like(x), np.empty(lanes // 2, np.float32)
        address = made.kernel(emit_turned, lanes)
        call(address, [x.ctypes.data, y.ctypes.data, top.ctypes.data], 0, 1)
        assert (y == x.T).all() and (top == x[: lanes // 2].max(1)).all()


def emit_bf16(e: Emitter) -> None:
    halves = [e.load(e.arg_ptr(0), vec(F32, 16), at) for at in (0, 16)]
    e.store(e.arg_ptr(1), e.pairs_of_bf16(*halves).bits(vec(I16, 32)))


def test_two_vectors_to_bf16(tmp_path: Path) -> None:
    x = torch.randn(32, generator=torch.Generator().manual_seed(0)) * 100
    x[:4] = torch.tensor([math.inf, -0.0, 1.00390625, math.nan])  # the third lies between two
    for made in compilers(tmp_path):
        y = torch.empty(32, dtype=torch.bfloat16)
        call(made.kernel(emit_bf16), [x.data_ptr(), y.data_ptr()], 0, 1)
        assert torch.equal(y.nan_to_num(7), x.bfloat16().nan_to_num(7))


def test_constants_are_written_once() -> None:
    """Numbers in all lanes are constants, which no instruction makes."""
    e = Emitter("f")
    lanes = vec(F32, 4)
    one, again, wide = e.f32(1.0), e.f32(1.0), e.f32(1.0).splat(4)
    assert one.ir is again.ir and wide.ir is e.f32(1.0, 4).ir and wide.type == lanes
    assert str(e.f32(-0.0).ir) != str(e.f32(0.0).ir), "equal numbers of other bits"
    assert e.const(I16, 1).ir is not e.const(F32, 1).ir
    e.store(e.arg_ptr(0), e.load(e.arg_ptr(1), lanes) * 2.0 + 1.0)
    text = e.finish()
    assert "shufflevector" not in text and "insertelement" not in text


def test_the_cache_has_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of kernels that nothing uses any more go when another is compiled."""
    from mtmd.kernels.cpu.native.rows import emit_store

    monkeypatch.setattr(compile, "FILES_MAX", 4)
    for number in range(6):
        (tmp_path / f"{number}.o").write_bytes(b"")
        os.utime(tmp_path / f"{number}.o", (number, number))
    used, unused = Compiler(folder=tmp_path), Compiler(folder=tmp_path)
    used.kernel(emit_store, "f32", "f32", 2)
    assert {"4.o", "5.o"} < {file.name for file in tmp_path.iterdir()}
    assert len(list(tmp_path.iterdir())) == 3 and used.stats.from_cache == 0
    (file,) = set(tmp_path.glob("*.o")) - {tmp_path / "4.o", tmp_path / "5.o"}
    os.utime(file, (1, 1))
    unused.kernel(emit_store, "f32", "f32", 2)
    assert unused.stats.from_cache == 1 and file.stat().st_mtime > 1, "used last"
