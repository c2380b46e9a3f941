"""Triton, or, where it is not installed, what lets the kernels' files be read all the same: what
they take, how they would be called and what memory they need is plain arithmetic, and a prediction
asks for it on any machine. Kernels import `triton` and `tl` from here.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

from mtmd.base.errors import PlacementError
from mtmd.base.extras import install_command
from mtmd.kernels.gpu.ahead.compilations import listen

INSTALL = install_command("gpu")


def has_triton() -> bool:
    return find_spec("triton") is not None


class NotCompiled:
    """A kernel on a machine without Triton: it has a name and arguments, and cannot be launched."""

    def __init__(self, function: Callable[..., Any]):
        self.__name__ = function.__name__
        self.arg_names = list(function.__code__.co_varnames[: function.__code__.co_argcount])

    def __getitem__(self, grid: object) -> Any:
        raise PlacementError(
            f"{self.__name__}: kernels are compiled by Triton, which is not installed; {INSTALL}"
        )


def _jit(function: Callable[..., Any] | None = None, **options: Any) -> Any:  # noqa: ARG001
    """`@triton.jit`, with options or without."""
    return NotCompiled if function is None else NotCompiled(function)


triton: Any = import_module("triton") if has_triton() else SimpleNamespace(jit=_jit)
if has_triton():
    listen(triton)
tl: Any = (
    import_module("triton.language")
    if has_triton()
    else SimpleNamespace(constexpr=lambda value: value)
)

BEFORE_3_8 = has_triton() and tuple(map(int, triton.__version__.split(".")[:2])) < (3, 8)


def on_amd(_semantic: Any = None) -> Any:
    """Return it in a kernel: whether it is being compiled for an AMD GPU, here or ahead of time.
    False where it is interpreted.
    """
    return tl.constexpr(_semantic is not None and _semantic.builder.options.backend_name == "hip")


def on_rdna(_semantic: Any = None) -> Any:
    """The same of those of AMD's that have 32 threads in a warp, and 256 registers a thread."""
    amd = _semantic is not None and _semantic.builder.options.backend_name == "hip"
    return tl.constexpr(amd and _semantic.builder.options.warp_size == 32)


def joins_wide(_semantic: Any = None) -> Any:
    """Return it in a kernel: whether the compiler takes what is joined for operands of eight bits,
    of which a lane has four values that follow each other in place of two and two: Triton before
    3.8, on NVIDIA.
    """
    return tl.constexpr(BEFORE_3_8 and not on_amd(_semantic).value)


def last_first(locations: Any, _semantic: Any = None) -> Any:
    """Return it in a kernel: addresses of what is loaded, of which neighbouring threads take
    neighbours in the last dimension, then in the one before it. Triton before 3.7 takes the first
    one first unless it believes that more values follow each other in later ones. Nothing else is
    made of that as long as a thread has no two values that are not neighbours in the last
    dimension.
    """
    if _semantic is None or not joins_wide(_semantic).value:
        return locations
    powers = [tl.constexpr(2**i) for i in range(len(locations.shape))]
    return tl.max_contiguous(locations, powers, _semantic=_semantic)


# As triton.language.core.builtin marks the functions that it hands the compiler's state, which none
# does in the interpreter.
for function in map(vars, (on_amd, on_rdna, joins_wide, last_first)):
    function["__triton_builtin__"] = True
