"""What is compiled ahead is what a launch looks up, and finds. In a process of its own, as this one
interprets kernels, with a driver in place of a device's: launches are asked for, and none is made.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mtmd.kernels.backends.vision_attention.candidates import CARRIED, TILES
from mtmd.kernels.gpu.table import KERNELS

SCRIPT = """
import json, logging, os, sys
from pathlib import Path
from types import SimpleNamespace
import torch, triton
from triton.backends.nvidia.compiler import get_ptxas_version
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction
from mtmd.inspect import save_kernels as saving
from mtmd.kernels.backends.vision_attention.candidates import tiled
from mtmd.kernels.gpu import launch as launching
from mtmd.kernels.gpu.ahead import saved
from mtmd.kernels.gpu.ahead.compilations import compilations
from mtmd.kernels.gpu.ahead.compiling import compile_all
from mtmd.kernels.gpu.compile import cache_key, disk_key, parse_target
from mtmd.kernels.gpu.table import KERNELS
from mtmd.kernels.gpu.triton_kernel import Located
from mtmd.kernels.graph import Type

HERE = SimpleNamespace(target="cuda:90", launchers=0)

class Driver:
    def get_current_target(self):
        return parse_target(HERE.target)
    def get_current_device(self):
        return 0
    def get_current_stream(self, device):
        return 0
    def launcher_cls(self, source, metadata):
        HERE.launchers += 1

def located(tensor):
    if tensor is None:
        return None
    kind, size = Type.of(tensor), tensor.untyped_storage().nbytes()
    return Located(kind.shape, kind.dtype, kind.strides, tensor.data_ptr() % 16 == 0, size)

def forget():
    # what was launched before
    kernels = [m for name, m in sys.modules.items() if name.startswith("mtmd.kernels.gpu")]
    for entry in [entry for module in kernels for entry in vars(module).values()]:
        if isinstance(entry, JITFunction):
            entry.device_caches.clear()

driver.set_active(Driver())
launching.threads_of_a_warp = lambda device: parse_target(HERE.target).warp_size
launching.is_nvidia = lambda device: HERE.target.startswith("cuda")
compile_for_launch = JITFunction._do_compile
requested, out = [], {"differ": [], "launches": {}, "limited": 0, "tiled": []}

def note(self, key, signature, device, constants, options, attributes, warmup):
    requested.append((self.ASTSource(self, signature, constants, attributes).hash(), options.hash()))

JITFunction._do_compile = note
for HERE.target in ("cuda:90", "hip:gfx942"):
    for op, entries in KERNELS.items():
        for kernel in (entry.load() for entry in entries):
            for case in kernel.cases:
                inputs = case.inputs()
                requested.clear()
                forget()
                kernel.run(*inputs, **case.options)
                programs = kernel.launched(*map(located, inputs), **case.options)
                if requested != [cache_key(HERE.target, program) for program in programs]:
                    out["differ"].append(f"{HERE.target} {op} {case}")
                out["launches"][op] = out["launches"].get(op, 0) + len(requested)
                out["limited"] += sum(p.call.registers is not None for p in programs)
    for name, kernel in tiled(HERE.target).items():
        whole = torch.zeros(1, 200, 3 * 2 * 72, dtype=torch.bfloat16)
        parts = [part.unflatten(2, (2, 72)) for part in whole.chunk(3, 2)]
        for inputs in (parts, [part.contiguous() for part in parts]):
            requested.clear()
            forget()
            kernel.run(*inputs, None, None, scale=0.1)
            programs = kernel.programs(*map(located, inputs), None, None, scale=0.1)
            if not requested or requested != [cache_key(HERE.target, program) for program in programs]:
                out["differ"].append(f"{HERE.target} {name}")
            out["tiled"].append(name)

HERE.target = "cuda:90"
cache, kept, other = (Path(sys.argv[1]) / name for name in ("cache", "kept", "other"))
triton.knobs.cache.dir = str(cache)
kernel = KERNELS["silu_mul"][0].load()
inputs = torch.ones(3, 40), torch.ones(3, 40)
program, = kernel.launched(*map(Type.of, inputs))
saving.foreseen_programs = lambda *given: [program, program]
steps = []
report = saving.save_kernels("h100", kept, progress=lambda *numbers: steps.append(numbers))
out["saved"] = [report.programs, steps, str(report), HERE.launchers]
out["again"] = [len(compile_all("cuda:90", [program])), compilations().compiled, compilations().late]

def launch():
    forget()
    kernel.run(*inputs)
    return [compilations().compiled, compilations().late, compilations().from_cache]

class Stop(Exception):
    pass

def then_stop(self, *given):
    compile_for_launch(self, *given)
    return None  # which launches nothing

JITFunction._do_compile = then_stop
triton.knobs.cache.dir = str(other)
out["installed"] = [saved.install(saved.read_saved(kept, "cuda:90")) for _ in "12"]
before = compilations().from_cache
result = launch()
out["keys"] = [disk_key("cuda:90", program)] == list(saved.read_saved(kept, "cuda:90").programs)
out["launched"] = [result[0], result[1], result[2] - before]
next(other.glob("*/*.cubin")).write_bytes(b"torn")
out["mended"] = saved.install(saved.read_saved(kept, "cuda:90"))
triton.knobs.cache.dir = str(Path(sys.argv[1]) / "empty")
logging.basicConfig(stream=sys.stderr)
out["late"] = launch()[:2]
out["refused"] = []
for setting in ({"DISABLE_LLVM_OPT": "1"}, {"TRITON_MOCK_PTX_VERSION": "another"}):
    os.environ.update(setting)
    get_ptxas_version.cache_clear()  # of this process
    try:
        saved.read_saved(kept, "cuda:90")
    except saved.OptionError as error:
        out["refused"].append(str(error))
    for name in setting:
        del os.environ[name]
print(json.dumps(out))
"""


@pytest.fixture(scope="module")
def reported(tmp_path_factory: pytest.TempPathFactory) -> dict:
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    folder = tmp_path_factory.mktemp("ahead")
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(folder)],
        capture_output=True,
        text=True,
        env=env,
        cwd=Path(__file__).parent,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return {**json.loads(done.stdout), "log": done.stderr}


def test_what_is_compiled_ahead_is_what_every_launch_of_a_run_asks_for(reported: dict) -> None:
    """By Triton's keys of source and options, in order, for each kernel's cases."""
    assert reported["differ"] == []
    assert set(reported["launches"]) == set(KERNELS) and all(reported["launches"].values())
    names = {*TILES, *CARRIED}
    assert (
        len(reported["tiled"]) == 2 * (len(names) + len(TILES)) and set(reported["tiled"]) == names
    )
    assert reported["limited"], "in registers of a thread: an option that NVIDIA alone has"


def test_programs_are_compiled_once_with_their_launchers_and_saved(reported: dict) -> None:
    programs, steps, text, launchers = reported["saved"]
    assert programs == 1 and steps == [[1, 1]], "it was named twice"
    assert "1 programs of demo model for cuda:90" in text and "not run" in text
    assert launchers == 1, "on the device that is here a first launch has nothing left to make"
    assert reported["again"] == [1, 1, 0]


def test_a_launch_finds_what_was_saved_elsewhere(reported: dict) -> None:
    assert reported["installed"] == [1, 0], "the second time it is there"
    assert reported["launched"] == [reported["again"][1], 0, 1], "nothing compiled, one read"
    assert reported["mended"] == 1 and reported["keys"], "the name on disk is foreseen, too"


def test_other_tools_and_variables_are_refused(reported: dict) -> None:
    """With them no launch would look where the programs lie."""
    variables, tools = reported["refused"]
    assert "DISABLE_LLVM_OPT" in variables and "set the same" in variables
    assert "another version of the tools" in tools


def test_what_is_compiled_as_it_is_launched_is_counted_and_told(reported: dict) -> None:
    assert reported["late"] == [reported["again"][1] + 1, 1]
    assert "compiled the GPU program gated_kernel in" in reported["log"]
