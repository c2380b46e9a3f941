"""Shared by the tests of the compute floor: fresh memory full of NaN, the peak of what the
allocator hands out, and exact bf16 in Triton's interpreter.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch
from allocator_peak import allocator_peak
from quick_interpreter import quicken


def is_interpreted(config: pytest.Config) -> bool:
    """Whether kernels run in Triton's interpreter: not on a device, with whose version of Triton it
    may not be as it is here.
    """
    return find_spec("triton") is not None and config.getoption("device") in (None, "cpu")


@pytest.fixture(scope="session", autouse=True)
def quick_interpreter(pytestconfig: pytest.Config) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        if is_interpreted(pytestconfig):
            quicken(monkeypatch)
        yield


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that is taken without being filled holds NaN, or a large number where the type has no
    NaN.
    """

    def poison(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        @functools.wraps(make)
        def fresh(*args: Any, **kwargs: Any) -> torch.Tensor:
            tensor = make(*args, **kwargs)
            return tensor.fill_(torch.nan if tensor.is_floating_point() else 99)

        return fresh

    for owner, name in (
        (torch, "empty"),
        (torch, "empty_like"),
        (torch.Tensor, "new_empty"),
        (torch.Tensor, "new_empty_strided"),
    ):
        monkeypatch.setattr(owner, name, poison(getattr(owner, name)))


@pytest.fixture
def peak_bytes() -> Callable[[Callable[[], Any]], int]:
    return allocator_peak


@pytest.fixture
def exact_bf16(monkeypatch: pytest.MonkeyPatch, pytestconfig: pytest.Config) -> None:
    """The interpreter (triton 3.9) keeps bf16 as its bits: it multiplies those bits in a dot
    product, and truncates where a GPU rounds.
    """
    if not is_interpreted(pytestconfig):
        return
    import triton.language as tl
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    dot, cast = builder.create_dot, builder.cast_impl

    def widen(handle: Any) -> Any:
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        return interpreter.TensorHandle(
            (handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32
        )

    def rounding_cast(self: Any, source: Any, requested: Any) -> Any:
        if (source.dtype.scalar, requested.scalar) != (tl.float32, tl.bfloat16):
            return cast(self, source, requested)
        rounded = torch.from_numpy(np.ascontiguousarray(source.data)).to(torch.bfloat16)
        return interpreter.TensorHandle(
            rounded.view(torch.int16).numpy().view(np.uint16), tl.bfloat16
        )

    monkeypatch.setattr(
        builder, "create_dot", lambda self, a, b, *rest: dot(self, widen(a), widen(b), *rest)
    )
    monkeypatch.setattr(builder, "cast_impl", rounding_cast)
