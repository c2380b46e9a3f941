"""A device that is not there: on the CPU, and as strict about recorded runs as a GPU's graphs.

What torch runs is recorded operator by operator, with the tensors it read and made, and what a
Triton kernel would run on a GPU as one call. A replay calls the same on the same tensors: whatever
the host has decided, it has decided for good. Operators that are not known to be launches alone
are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from mtmd.kernels.backends.backend import Run
from mtmd.kernels.backends.cuda_graphs import Recording, results_bytes
from mtmd.kernels.backends.reference import Reference
from mtmd.kernels.gpu.table import choose
from mtmd.kernels.graph import Node

# What plans may call while they are recorded: each is launches on the device that its inputs are
# on, of sizes that shapes alone tell. None waits, and none brings numbers from the host. In
# inference mode those that torch makes of others come as they are called.
ALLOWED = frozenset(
    {
        "_addmm_activation",
        "_upsample_bicubic2d_aa",
        "_upsample_bilinear2d_aa",
        "adaptive_avg_pool2d",
        "add",
        "add_",
        "amax",
        "arange",
        "baddbmm",
        "bmm",
        "cat",
        "clamp",
        "clamp_",
        "clone",
        "contiguous",
        "copy_",
        "cos",
        "cumsum",
        "detach",
        "div",
        "div_",
        "einsum",
        "embedding",
        "empty",
        "eq",
        "exp_",
        "expand",
        "eye",
        "flatten",
        "gelu",
        "gelu_",
        "index_copy_",
        "index_select",
        "layer_norm",
        "linalg_vector_norm",
        "linear",
        "masked_fill_",
        "matmul",
        "mean",
        "mul",
        "mul_",
        "narrow",
        "new_zeros",
        "pad",
        "permute",
        "relu_",
        "reshape",
        "rms_norm",
        "rsqrt",
        "select",
        "sigmoid",
        "sigmoid_",
        "silu",
        "silu_",
        "sin",
        "slice",
        "softmax",
        "softplus",
        "sqrt",
        "square",
        "square_",
        "std_mean",
        "stack",
        "sub",
        "sub_",
        "sum",
        "t",
        "tanh_",
        "to",
        "transpose",
        "unflatten",
        "unsqueeze",
        "upsample_bicubic2d",
        "upsample_bilinear2d",
        "upsample_linear1d",
        "view",
    }
)


class Refused(RuntimeError):
    """As torch raises of an operator that cannot be captured."""


class _Recorder(TorchDispatchMode):
    def __init__(self, results: Tensor) -> None:
        """`results`: the only memory that is copied to."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._results = storage(results)
        self.calls: list[tuple[Callable[[], Any], list[Tensor]]] = []
        self.ops: set[str] = set()
        self.before: dict[int, tuple[Tensor, Tensor]] = {}
        self._own: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        self.ops.add(name)
        kwargs = kwargs or {}
        assert name != "copy_" or storage(args[0]) == self._results, "copied over another value"
        if func._schema.is_mutable:
            self.keep(args[0])
        result = func(*args, **kwargs)
        given = {storage(t) for t in tensors([*args, *kwargs.values()])}
        made = [t for t in tensors(result) if storage(t) not in given]
        self._own.update(map(storage, made))
        if made or func._schema.is_mutable:
            self.calls.append((lambda: func(*args, **kwargs), made))
        return result

    def keep(self, tensor: Tensor) -> None:
        """What a tensor from outside holds before it is written to: recording runs nothing."""
        key = storage(tensor)
        if key not in self._own and key not in self.before:
            with _disable_current_modes():
                whole = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
                self.before[key] = whole, whole.clone()

    def call(self, kernel: Run, inputs: tuple[Tensor | None, ...], writes: bool) -> Tensor:
        if writes:
            assert inputs[0] is not None
            self.keep(inputs[0])
        with _disable_current_modes():
            result = kernel(*inputs)
        self.calls.append((lambda: kernel(*inputs), [] if writes else [result]))
        self._own.add(storage(result))
        return result


def storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [t for v in value for t in tensors(v)] if isinstance(value, (list, tuple)) else []


class _Staging:
    def __init__(self, size: int):
        self.host, self.device = (torch.zeros(size, dtype=torch.uint8) for _ in range(2))
        self._under_way = False

    def wait(self) -> None:
        self._under_way = False

    def upload(self) -> None:
        assert not self._under_way, "the host's bytes are written while they are copied"
        self.device.copy_(self.host)
        self._under_way = True


class StandInRecorder:
    def __init__(self) -> None:
        self.active: _Recorder | None = None
        self.recordings = self.replays = 0
        self.given_up: str | None = None
        self.ops: set[str] = set()
        self._results = torch.empty(0, dtype=torch.uint8)

    def staging(self, size: int) -> _Staging:
        return _Staging(size)

    def results(self, size: int) -> Tensor:
        if self._results.nbytes < size:
            self._results = torch.empty(results_bytes(size), dtype=torch.uint8)
        return self._results

    def record(self, run: Callable[[], list[Tensor]]) -> Recording:
        self.active = recorder = _Recorder(self._results)
        try:
            with recorder:
                outputs = run()
            if unknown := sorted(recorder.ops - ALLOWED):
                raise Refused(
                    f"operation not permitted when stream is capturing: {', '.join(unknown)}"
                )
        finally:
            self.active = None
            for whole, stored in recorder.before.values():
                whole.copy_(stored)
        self.ops |= recorder.ops
        self.recordings += 1

        def replay() -> None:
            self.replays += 1
            for call, made in recorder.calls:
                again = tensors(call())
                for location, value in zip(made, again if made else (), strict=True):
                    location.copy_(value)

        return Recording(outputs, replay)


class StandInMark:
    """Reached when it has been asked about often enough, or was waited for."""

    def __init__(self, stream: StandInStream):
        self._stream, self._left = stream, stream.polls

    def is_reached(self) -> bool:
        self._left -= 1
        self._stream.events.append("asked")
        return self._left < 0

    def wait(self) -> None:
        self._left = 0
        self._stream.events.append("waited")


class StandInStream:
    """A queue that keeps to the rules of a GPU's: inputs come, and marks are set, while it is
    entered; the caller's own queue is followed, and let first, while it is not. `polls`: how often
    a mark is asked about before it is reached.
    """

    device = torch.device("cpu")

    def __init__(self, polls: int = 3):
        self.polls, self.inside = polls, False
        self.events: list[str] = []

    @contextmanager
    def entered(self) -> Iterator[None]:
        assert not self.inside
        self.inside = True
        try:
            yield
        finally:
            self.inside = False

    def let_first(self) -> None:
        self._note("let first", inside=False)

    def follow(self) -> None:
        self._note("followed", inside=False)

    def upload(self, shape: tuple[int, ...], fill: Callable[[Tensor], None]) -> Tensor:
        self._note("uploaded", inside=True)
        host = torch.full(shape, 255, dtype=torch.uint8)
        fill(host)
        return host

    def mark(self) -> StandInMark:
        self._note("marked", inside=True)
        return StandInMark(self)

    def hand_over(self, value: Tensor) -> None:  # noqa: ARG002
        self._note("handed over", inside=False)

    def wait_for_caller(self) -> None:
        self._note("waited for the caller", inside=False)

    def _note(self, event: str, inside: bool) -> None:
        assert self.inside == inside, event
        self.events.append(event)


class StandIn(Reference):
    """`records` False: each run is launched, as before there were recordings. `fuses`: graphs are
    rewritten for it. `side`: a queue of its own for what is encoded, another for each
    other use; None for one queue for all.
    """

    def __init__(self, records: bool = True, fuses: bool = True, side: StandInStream | None = None):
        super().__init__("cpu")
        self.name = self.space = "stand-in"
        self.fuses = fuses
        self.recorder = StandInRecorder() if records else None  # type: ignore[assignment]
        self.records = records
        self.sides = {"encode": side} if side else {}
        self.side_streams = side is not None

    def side_stream(self, use: str) -> StandInStream | None:  # type: ignore[override]
        return self.sides.setdefault(use, StandInStream()) if self.sides else None

    def lower(self, node: Node, in_place: bool = False) -> Run:
        kernel = super().lower(node, in_place)
        if choose(node, lambda _: None).kernel is None:
            return kernel
        writes = node.alias

        def run(*inputs: Tensor | None) -> Tensor:
            recorder = self.recorder and self.recorder.active
            return recorder.call(kernel, inputs, writes) if recorder else kernel(*inputs)

        return run
