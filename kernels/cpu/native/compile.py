"""Goes from a kernel's IR to the address of its machine code; the code is kept on disk.

`compile_kernel(emit, *params)` calls `emit(e, *params)` to write a kernel, unless the machine code
for the same sources, parameters, CPU and llvmlite lies in the cache: then nothing is written or
optimized, only loaded. Files of the cache are written aside and renamed, so that processes that
start together cannot read halves; one that is damaged is compiled anew.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import llvmlite
import llvmlite.binding as llvm
from llvmlite import ir

from mtmd.base.files import cache_folder, remove_oldest, write_atomically
from mtmd.base.heartbeat import beat
from mtmd.kernels.cpu.native.emit import I64, PTR, Emitter
from mtmd.kernels.resources.compiled import note_compiled

KERNEL = (PTR, I64, I64, PTR)
SOURCES = (
    "cpu/native",
    "cpu/sampling",
    "cpu/tiled",
    "quantization",
)  # whose text decides what a kernel is


FILES_MAX = 4096  # in the cache, 30 MB: some models, of some versions, on some CPUs


@dataclass
class Compiled:
    """Describes what was made ready in this process so far, for the report."""

    kernels: int = 0
    from_cache: int = 0
    compile_ms: float = 0.0
    load_ms: float = 0.0
    folder: str | None = None


@dataclass(frozen=True)
class Cpu:
    """Describes what code is made for."""

    name: str
    features: str

    def has(self, feature: str) -> bool:
        """Return whether it has a feature by LLVM's name, such as avx512vnni."""
        return f"+{feature}" in self.features.split(",")


@lru_cache(maxsize=1)
def host() -> Cpu:
    cpu = Cpu(llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten())
    if cpu.has("avx512vnni") or cpu.has("avxvnni"):
        # Else LLVM takes vpdpwssd apart again, for latency that loops over several rows hide
        cpu = Cpu(cpu.name, f"{cpu.features},+fast-dpwssd")
    return cpu


class Compiler:
    """Kernels of one process for one CPU. Safe to use from several threads."""

    def __init__(self, cpu: Cpu | None = None, folder: Path | None = None):
        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        self.cpu = cpu or host()
        self.stats = Compiled()
        self._folder = folder or cache_folder("kernels")
        self.stats.folder = str(self._folder) if self._folder else None
        self._lock = threading.Lock()
        self._known: dict[tuple[Any, ...], int] = {}
        target = llvm.Target.from_default_triple()
        self._machine = target.create_target_machine(
            cpu=self.cpu.name, features=self.cpu.features, opt=3, jit=True
        )
        empty = llvm.parse_assembly("")
        self._engine = llvm.create_mcjit_compiler(empty, self._machine)

    def kernel(
        self, emit: Callable[..., None], *params: Any, signature: Sequence[ir.Type] = KERNEL
    ) -> int:
        """The address of the function that `emit(e, *params)` writes; params have to be told
        apart by their repr.
        """
        key = (emit.__module__, emit.__qualname__, *params)
        with self._lock:
            if key not in self._known:
                self._known[key] = self._make(emit, params, signature)
            return self._known[key]

    def _make(
        self, emit: Callable[..., None], params: tuple[Any, ...], signature: Sequence[ir.Type]
    ) -> int:
        beat(f"kernel {emit.__name__}")
        known = emit.__module__.startswith("mtmd.kernels.")
        text = [emit.__module__, emit.__qualname__, repr(params), self.cpu.name, self.cpu.features]
        digest = hashlib.sha256("\0".join((*text, llvmlite.__version__)).encode())
        digest.update(_sources())
        key = digest.hexdigest()[:32]
        name = f"{emit.__name__}_{key}" if known else f"{emit.__name__}_{len(self._known)}"
        file = self._folder / f"{key}.o" if known and self._folder else None
        start = time.perf_counter()
        code = _read(file) if file else None
        if code is None:
            code = self._compile(emit, params, signature, name)
            took_ms = (time.perf_counter() - start) * 1e3
            self.stats.compile_ms += took_ms
            note_compiled(took_ms)
            if file:
                if self.stats.kernels == self.stats.from_cache:  # the first that is written
                    remove_oldest(file.parent, "*.o", FILES_MAX)
                write_atomically(file, code + hashlib.sha256(code).digest())
        else:
            self.stats.from_cache += 1
        start = time.perf_counter()
        self._engine.add_object_file(llvm.ObjectFileRef.from_data(code))
        self._engine.finalize_object()
        address: int = self._engine.get_function_address(name)
        assert address, name
        self.stats.kernels += 1
        self.stats.load_ms += (time.perf_counter() - start) * 1e3
        beat()
        return address

    def _compile(
        self,
        emit: Callable[..., None],
        params: tuple[Any, ...],
        signature: Sequence[ir.Type],
        name: str,
    ) -> bytes:
        module = self._optimized(emit, params, signature, name)
        code: bytes = self._machine.emit_object(module)
        return code

    def _optimized(
        self,
        emit: Callable[..., None],
        params: tuple[Any, ...],
        signature: Sequence[ir.Type],
        name: str,
    ) -> llvm.ModuleRef:
        e = Emitter(name, signature, self.cpu.has)
        emit(e, *params)
        module = llvm.parse_assembly(e.finish())
        module.triple = llvm.get_process_triple()
        module.data_layout = str(self._machine.target_data)
        options = llvm.create_pipeline_tuning_options(speed_level=2)
        # Kernels say what is a vector and what is unrolled
        options.loop_vectorization = options.slp_vectorization = False
        options.loop_unrolling = False
        builder = llvm.create_pass_builder(self._machine, options)
        builder.getModulePassManager().run(module, builder)
        return module

    def assembly(
        self, emit: Callable[..., None], *params: Any, signature: Sequence[ir.Type] = KERNEL
    ) -> str:
        """The machine code as text, for looking at."""
        text: str = self._machine.emit_assembly(
            self._optimized(emit, params, signature, emit.__name__)
        )
        return text


@dataclass
class _Shared:
    compiler: Compiler | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)


_shared = _Shared()


def compiler() -> Compiler:
    """The process's, for the CPU it runs on."""
    with _shared.lock:
        if _shared.compiler is None:
            _shared.compiler = Compiler()
        return _shared.compiler


def compiling_for() -> Cpu:
    """The CPU that the process's compiler makes code for."""
    with _shared.lock:
        return host() if _shared.compiler is None else _shared.compiler.cpu


_counting: ContextVar[bool] = ContextVar("counting", default=False)


@contextmanager
def not_compiling() -> Iterator[None]:
    """Kernels have the address 0 meanwhile: to count what a program takes without making it."""
    token = _counting.set(True)
    try:
        yield
    finally:
        _counting.reset(token)


def compile_kernel(emit: Callable[..., None], *params: Any) -> int:
    """Do what `Compiler.kernel` does, with the process's compiler."""
    return 0 if _counting.get() else compiler().kernel(emit, *params)


@lru_cache(maxsize=1)
def _sources() -> bytes:
    """A digest of everything that kernels are written with."""
    digest = hashlib.sha256()
    root = Path(__file__).parents[2]
    for folder in SOURCES:
        for file in sorted((root / folder).glob("*.py")):
            digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.digest()


def _read(file: Path) -> bytes | None:
    """The code of a file that is whole: it ends with its own digest."""
    try:
        data = file.read_bytes()
    except OSError:
        return None
    with suppress(OSError):
        os.utime(file)  # it was used now: the oldest are removed
    code, digest = data[:-32], data[-32:]
    return code if code and hashlib.sha256(code).digest() == digest else None
