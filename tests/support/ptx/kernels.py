"""Our kernels on a card that is not here: what launches them in Triton's interpreter has them compiled
for it, and runs the PTX.

    emulator = Emulator(compiler, "cuda:80")
    emulator.install(monkeypatch)
    kernel.run(...)
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from compiler_process import Compiler
from torch import Tensor

from mtmd.kernels.gpu import triton_kernel
from mtmd.kernels.gpu.launch import Call
from mtmd.kernels.gpu.triton_kernel import Located, Program
from mtmd.kernels.graph import Type
from ptx.instructions import Array
from ptx.machine import grain_of, launch
from ptx.memory import UNWRITTEN, WRITTEN, Memory
from ptx.program import Program as Text
from ptx.program import parse

FRESH = 32  # more than a run makes
BASE, APART = 1 << 44, 4096  # where operands lie, and what lies between them: nobody's
COMPILE = "from ptx.compiled import ptx_of\nout = ptx_of(target, description)"


def described(program: Program) -> dict[str, Any]:
    """A program as JSON has it."""
    call = program.call
    return {
        "function": (program.function.fn.__module__, program.function.fn.__name__),
        "call": {name: getattr(call, name) for name in Call.__dataclass_fields__},
        "operands": {
            name: {
                "shape": kind.shape,
                "dtype": str(kind.dtype).removeprefix("torch."),
                "strides": kind.strides,
                "aligned": not isinstance(kind, Located) or kind.aligned,
                "storage": kind.storage if isinstance(kind, Located) else kind.bytes,
            }
            for name, kind in program.operands.items()
        },
    }


class Emulator:
    """compiler: a process that compiles; texts: of programs compiled so far, by their description."""

    def __init__(self, compiler: Compiler, target: str):
        self.compiler, self.target = compiler, target
        self.texts: dict[str, tuple[Text, list[str], int]] = {}
        self.fresh: dict[int, tuple[Tensor, Array]] = {}  # by address: who wrote what of them
        self.launches = 0

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Kernels that run meanwhile run here."""
        empty = triton_kernel._empty

        def fresh(kind: Type, device: torch.device) -> Tensor:
            result = empty(kind, device)
            storage = result.untyped_storage()
            status = np.full(storage.nbytes(), UNWRITTEN, np.uint8)
            self.fresh[storage.data_ptr()] = result, status
            if len(self.fresh) > FRESH:  # until then nobody else gets the address
                del self.fresh[next(iter(self.fresh))]
            return result

        monkeypatch.setattr(triton_kernel, "run_call", self.run_call)
        monkeypatch.setattr(triton_kernel, "_empty", fresh)

    def run_call(self, function: Any, call: Call, pointers: Mapping[str, Tensor]) -> None:
        """As `kernels/gpu/launch.py` has it. Raises Fault, Unsupported."""
        kinds = {name: located(tensor) for name, tensor in pointers.items()}
        description = described(Program(function, call, kinds))
        key = json.dumps(description, sort_keys=True)
        if key not in self.texts:
            made = self.compiler(COMPILE, target=self.target, description=description)
            self.texts[key] = parse(made["text"]), made["arguments"], made["shared"]
        program, names, shared = self.texts[key]
        statuses = {address: status for address, (_, status) in self.fresh.items()}
        grid = call.programs, call.across
        execute(program, names, pointers, call.scalars, grid, shared, statuses)
        self.launches += 1


def execute(
    program: Text,
    names: Sequence[str],
    pointers: Mapping[str, Tensor],
    scalars: Mapping[str, int | float],
    grid: tuple[int, int],
    shared: int,
    statuses: Mapping[int, Array],
) -> None:
    """Run a program on tensors. names: of its parameters, without the compiler's own two; shared:
    bytes; statuses: who wrote what of some storages, by address.

    Raises Fault, Unsupported.
    """
    operands = Operands(pointers, statuses, program)
    values = [operands.addresses[n] if n in pointers else scalars[n] for n in names]
    parameters = packed(program, [*values, 0, 0][: len(program.parameters)])
    launch(program, parameters, operands.memory, BASE, shared, grid)
    operands.write_back()


def located(tensor: Tensor) -> Located:
    """The type of a tensor, and whether it lies as a launch wants to know."""
    storage = tensor.untyped_storage().nbytes() or 1
    aligned = tensor.data_ptr() % 16 == 0
    return Located(tuple(tensor.shape), tensor.dtype, tuple(tensor.stride()), aligned, storage)


def packed(program: Text, values: list[int | float]) -> bytes:
    """Values of parameters as they lie in memory."""
    size = max((at + size for at, size in program.parameters.values()), default=0)
    result = bytearray(size)
    for (at, size), value in zip(program.parameters.values(), values, strict=True):
        if isinstance(value, float):
            struct.pack_into({4: "<f", 8: "<d"}[size], result, at, value)
        else:
            result[at : at + size] = (value % (1 << 8 * size)).to_bytes(size, "little")
    return bytes(result)


def extent(tensor: Tensor) -> tuple[int, int]:
    """The bytes of its storage that a tensor spans."""
    first = tensor.storage_offset() * tensor.itemsize
    if not tensor.numel():
        return first, first
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return first, first + (last + 1) * tensor.itemsize


class Operands:
    """Tensors in the memory of a card: each storage apart from the others, and of a storage only what
    an operand spans is to be touched.
    """

    def __init__(
        self, pointers: Mapping[str, Tensor], statuses: Mapping[int, Array], program: Text
    ):
        # By address: where it lies here, its bytes, and who wrote which.
        self.storages: dict[int, tuple[int, Array, Array]] = {}
        self.spans: list[tuple[int, int, str]] = []
        size = APART
        for tensor in pointers.values():
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in self.storages:
                size += storage.data_ptr() % 256
                flat = torch.tensor([], dtype=torch.uint8).set_(storage).numpy()
                status = statuses.get(storage.data_ptr(), np.full(len(flat), WRITTEN, np.uint8))
                self.storages[storage.data_ptr()] = size, flat, status
                size = -(-(size + storage.nbytes() + APART) // 256) * 256
        self.addresses: dict[str, int] = {}
        self.memory = Memory(size, grain_of(program, "global"), program.threads, self._where)
        for begin, content, _ in self.storages.values():
            self.memory.bytes[begin : begin + len(content)] = content
        for name, tensor in pointers.items():
            begin, _, status = self.storages[tensor.untyped_storage().data_ptr()]
            first, last = extent(tensor)
            self.memory.status[begin + first : begin + last] = status[first:last]
            self.addresses[name] = BASE + begin + first
            self.spans.append((begin + first, begin + last, name))

    def _where(self, at: int) -> str:
        first, last, name = min(self.spans, key=lambda s: max(s[0] - at, at - s[1] + 1, 0))
        return f"byte {at - first} of {name} ({last - first} bytes)"

    def write_back(self) -> None:
        for begin, content, status in self.storages.values():
            content[:] = self.memory.bytes[begin : begin + len(content)]
            status[self.memory.status[begin : begin + len(content)] == WRITTEN] = WRITTEN
