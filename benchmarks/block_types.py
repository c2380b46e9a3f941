"""Products of one row, or a few, with weights of every block type, beside llama.cpp's: what a
decoded token costs.

    python benchmarks/block_types.py --llama-dir ~/llama.cpp/build/bin
    python benchmarks/block_types.py --llama-dir ... --types IQ2_XXS,Q4_K --sizes 4096x4096
    python benchmarks/block_types.py --rows 1,8,40,200          this project alone, beside BF16

--llama-dir has the shared libraries libggml*.so of a build of llama.cpp for this machine:

    cmake -B build -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON -DBUILD_SHARED_LIBS=ON
    cmake --build build --target ggml

Weights are random blocks, the same bytes on both sides; sizes are rows x values of a row, and each
measurement goes through several such matrices, as a decoder does. llama.cpp's is the faster of its
plain buffer and of those that lay weights out anew where it takes the type. The two sides take
turns, each in a process of its own; a time is the best of --rounds. Ratios above 1 say that this
project is faster.
"""

from __future__ import annotations

import argparse
import ctypes
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from mtmd.kernels.cpu.native import products
from mtmd.kernels.cpu.native.pool import shared_pool
from mtmd.kernels.cpu.native.program import CHUNKS, Instruction, Program
from mtmd.kernels.cpu.quant_matmul import quant_matmul
from mtmd.kernels.gpu.quant_matmul.cases import random_blocks
from mtmd.kernels.quantization.blocks import BLOCKS, OWN_IDS

TOGETHER_BYTES = 64 << 20  # of weights of a measurement, about
RUNS = 5  # of a round


class Ours:
    """Products of one row as a decoder's program makes them, of more as torch's operators do."""

    def __init__(self, kind: str, w: torch.Tensor, width: int, rows: int, copies: int):
        self.weights = [w.clone() for _ in range(copies)]
        self.x = torch.randn(rows, width).bfloat16()
        self.kind, self.outer = kind, w.shape[0]
        self.frame = self._program(width) if rows == 1 else None

    def _program(self, width: int) -> Any:
        kernel = products.product(self.kind, 1, "bf16", "bf16")
        self.out = torch.empty(1, self.outer, dtype=torch.bfloat16)
        stride = kernel.prepare.bytes(width) if kernel.prepare else width
        self.memory = torch.empty(stride + 64, dtype=torch.uint8)
        at = -(-self.memory.data_ptr() // 64) * 64 if kernel.prepare else self.x.data_ptr()
        chunk = max(products.grain(self.kind, width), -(-self.outer // CHUNKS))
        steps = []
        for w in self.weights:
            if kernel.prepare:
                first = (self.x.data_ptr(), width, at, width)
                steps.append(Instruction(kernel.prepare.address, first, 1))
            args = (at, stride, w.data_ptr(), products.row_bytes(self.kind, width))
            args += (self.out.data_ptr(), self.outer, width, 1, 0, 0, 0, self.outer)
            steps.append(Instruction(kernel.address, args, self.outer, chunk))
        return Program(steps, kernel.scratch(width)).frame(shared_pool().threads)

    def run(self) -> None:
        if self.frame is not None:
            self.frame.open([])
            shared_pool().run(self.frame)
            self.frame.close()
            return
        for w in self.weights:
            if self.kind == "BF16":
                torch.mm(self.x, w.T)
            else:
                quant_matmul(self.x, w, quant=self.kind)


class Llama:
    """The same through ggml."""

    def __init__(
        self, folder: Path, kind: str, w: torch.Tensor, width: int, rows: int, copies: int
    ):
        for name in ("libggml-base.so", "libggml-cpu.so"):
            self.base = ctypes.CDLL(str(folder / name), mode=ctypes.RTLD_GLOBAL)
        self.kind, self.w, self.width, self.rows, self.copies = kind, w, width, rows, copies
        self.backend = self.call("ggml_backend_cpu_init")
        self.call("ggml_backend_cpu_set_n_threads", self.backend, torch.get_num_threads())
        self.graphs = [self.graph(buffers) for buffers in self.buffer_types()]
        self.graphs = [graph for graph in self.graphs if graph]

    def call(self, name: str, *args: Any, gives: Any = ctypes.c_void_p) -> Any:
        function = getattr(self.base, name)
        function.restype = gives
        return function(
            *(ctypes.c_void_p(a) if isinstance(a, int) and a >> 31 else a for a in args)
        )

    def buffer_types(self) -> list[int]:
        registry = self.call("ggml_backend_cpu_reg")
        self.device = self.call("ggml_backend_reg_dev_get", registry, ctypes.c_size_t(0))
        name = ctypes.c_char_p(b"ggml_backend_dev_get_extra_bufts")
        address = self.call("ggml_backend_reg_get_proc_address", registry, name)
        more = ctypes.CFUNCTYPE(ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p)(address)(
            self.device
        )
        result = [self.call("ggml_backend_cpu_buffer_type")]
        for i in range(100):
            if not more[i]:
                break
            result.append(more[i])
        return result

    def graph(self, buffers: int) -> int | None:
        class Parameters(ctypes.Structure):
            _fields_ = (
                ("size", ctypes.c_size_t),
                ("memory", ctypes.c_void_p),
                ("bare", ctypes.c_bool),
            )

        own, more = (self.call("ggml_init", Parameters(1 << 20, None, True)) for _ in range(2))
        code = 30 if self.kind == "BF16" else BLOCKS[self.kind].id
        sizes = [ctypes.c_int64(n) for n in (self.width, len(self.w))]
        weights = [self.call("ggml_new_tensor_2d", own, code, *sizes) for _ in range(self.copies)]
        x = self.call("ggml_new_tensor_2d", more, 0, sizes[0], ctypes.c_int64(self.rows))
        if not self.call("ggml_backend_alloc_ctx_tensors_from_buft", own, buffers):
            return None
        graph = self.call("ggml_new_graph", more)
        for w in weights:
            result = self.call("ggml_mul_mat", more, w, x)
            supported = self.call(
                "ggml_backend_dev_supports_op", self.device, result, gives=ctypes.c_bool
            )
            if not supported:
                return None
            self.call("ggml_build_forward_expand", graph, result)
        self.call("ggml_backend_alloc_ctx_tensors", more, self.backend)
        for w in weights:
            nothing, size = ctypes.c_size_t(0), self.w.numel() * self.w.element_size()
            self.call(
                "ggml_backend_tensor_set", w, self.w.data_ptr(), nothing, ctypes.c_size_t(size)
            )
        numbers = torch.randn(self.rows, self.width)
        size = ctypes.c_size_t(4 * numbers.numel())
        self.call("ggml_backend_tensor_set", x, numbers.data_ptr(), ctypes.c_size_t(0), size)
        return int(graph)

    def run(self, graph: int) -> None:
        self.call("ggml_backend_graph_compute", self.backend, graph)


def weight(kind: str, outer: int, width: int) -> torch.Tensor:
    if kind == "BF16":
        return torch.randn(outer, width).bfloat16()
    return random_blocks(kind, outer, width)


def measure(side: str, kind: str, outer: int, width: int, rows: int, folder: str) -> None:
    """Answer each line of input with the least milliseconds of a product."""
    w = weight(kind, outer, width)
    copies = max(1, TOGETHER_BYTES // (w.numel() * w.element_size()))
    if side == "ours":
        ours = Ours(kind, w, width, rows, copies)
        runs = [ours.run]
    else:
        llama = Llama(Path(folder), kind, w, width, rows, copies)
        runs = [lambda graph=graph: llama.run(graph) for graph in llama.graphs]
    for run in runs:
        run()
    # Of one thread, what it computes: not what others take of its core meanwhile
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    print("ready", flush=True)
    for _ in sys.stdin:
        times = []
        for run in runs:
            for _ in range(RUNS):
                start = clock()
                run()
                times.append(clock() - start)
        print(min(times) / copies * 1e3, flush=True)


def compared(sides: dict[str, tuple[str, ...]], rounds: int) -> dict[str, float]:
    """The best of some rounds, by side; `sides` are arguments of `measure`."""
    workers = {}
    for name, arguments in sides.items():
        command = [sys.executable, __file__, "--threads", str(torch.get_num_threads())]
        command += ["--measure", *map(str, arguments)]
        workers[name] = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
    best = dict.fromkeys(sides, float("inf"))
    for worker in workers.values():
        assert worker.stdout and worker.stdout.readline() == "ready\n"
    for _ in range(rounds):
        for name, worker in workers.items():
            assert worker.stdin and worker.stdout
            worker.stdin.write("\n")
            worker.stdin.flush()
            best[name] = min(best[name], float(worker.stdout.readline()))
    for worker in workers.values():
        worker.communicate()
    return best


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--llama-dir", default="", metavar="DIR")
    parser.add_argument("--types", default="")
    parser.add_argument("--sizes", default="4096x4096,4096x14336")
    parser.add_argument("--rows", default="1")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--measure", nargs=6, help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.measure:
        side, kind, *sizes, folder = args.measure
        measure(side, kind, *map(int, sizes), folder)
        return
    kinds = args.types.split(",") if args.types else ["BF16", *(k for k in BLOCKS)]
    print("| type | bytes/value | rows | size | ours ms | GB/s | llama.cpp ms | its time / ours |")
    print("|---|---|---|---|---|---|---|---|")
    for kind in kinds:
        for size in args.sizes.split(","):
            outer, width = map(int, size.split("x"))
            for rows in map(int, args.rows.split(",")):
                sides = {"ours": ("ours", kind, outer, width, rows, "-")}
                peer = args.llama_dir and (kind == "BF16" or BLOCKS[kind].id < OWN_IDS)
                if peer:
                    sides["peer"] = ("llama", kind, outer, width, rows, args.llama_dir)
                best = compared(sides, args.rounds)
                row = products.row_bytes(kind, width)
                speed = row * outer / best["ours"] / 1e6
                other = (
                    f"{best['peer']:.3f} | {best['peer'] / best['ours']:.2f}" if peer else "– | –"
                )
                print(
                    f"| {kind} | {row / width:.3f} | {rows} | {size} | {best['ours']:.3f} | "
                    f"{speed:.1f} | {other} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
