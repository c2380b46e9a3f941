"""Set before anything imports torch or Triton, which read their environment once. And nothing of
what is imported and collected is garbage: looking for some meanwhile, and again during every test,
takes half the time of collecting ten thousand of them.
"""

import atexit
import gc
import os
import signal
import sys
import time
from pathlib import Path

import blocks
import cpu_seconds
import pytest
import requested_device as devices

os.environ["TRITON_INTERPRET"] = "1"  # GPU kernels run in Triton's interpreter
# The models here are too small to share between threads, and several workers run side by side.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Workers and the processes that tests start import the same files again: compiled once.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# Where the tests run in the background, Ctrl-C is ignored, by children too: those that test it need
# it.
signal.signal(signal.SIGINT, signal.default_int_handler)
gc.disable()


STARTED_S = time.monotonic()
DEVICE = pytest.StashKey[devices.RequestedDevice]()


def pytest_addoption(parser: pytest.Parser) -> None:
    devices.add_option(parser)
    cpu_seconds.add_option(parser)
    parser.addoption(
        "--ptx",
        metavar="TARGET",
        help="run kernels as they are compiled for a card of NVIDIA's (cuda:80), in an emulator of "
        "PTX; default: in Triton's interpreter",
    )
    parser.addoption(
        "--within",
        type=float,
        metavar="SECONDS",
        help="begin no further test after so many seconds: those are skipped",
    )
    parser.addoption(
        "--record-compiled",
        action="store_true",
        help="compile all GPU programs of tests/kernels/gpu and write what they take to "
        "compiled.txt there; in one process, without -n",
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("record_compiled") and config.getoption("numprocesses", None):
        raise pytest.UsageError("--record-compiled: found -n, expected one process")
    config.pluginmanager.register(blocks)
    config.stash[DEVICE] = devices.configure(config.getoption("device"))
    if config.getoption("cpu_seconds"):
        config.pluginmanager.register(cpu_seconds.CpuSeconds())
    if config.getoption("device") is not None:
        config.addinivalue_line("filterwarnings", "default")  # the last one holds


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    if config.getoption("device") is None or devices.is_requesting(collection_path):
        return None
    return True


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("device") is not None:
        items[:], others = devices.choose(items)
        config.hook.pytest_deselected(items=others)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    limit_s = item.config.getoption("within")
    if limit_s is not None and time.monotonic() - STARTED_S > limit_s:
        pytest.skip(f"not begun within {limit_s:g} s (--within)")


@pytest.fixture(scope="session")
def requested_device(pytestconfig: pytest.Config) -> devices.RequestedDevice:
    """What `pytest --device` asks for; the CPU without it."""
    return pytestconfig.stash[DEVICE]


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


atexit.register(gc.unfreeze)  # what is imported is freed at the end, as some libraries check
