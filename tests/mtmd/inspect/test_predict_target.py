"""Prediction for a GPU that is not here. Kernels are compiled, so these run in a process where
Triton does not interpret.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import fields
from typing import Any

import pytest

from mtmd import OptionError, fit, predict
from mtmd.options.load import LoadOptions

pytest.importorskip(
    "triton", reason="ahead-of-time compilation needs Triton, which has no build for this platform"
)


def warmup(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "mtmd.cli", "warmup", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def hopper() -> dict[str, Any]:
    done = warmup("--target", "cuda:90", "--json", "--strict")
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def test_everything_is_taken_and_fits(hopper: dict[str, Any]) -> None:
    assert hopper["device"] == "cuda:90" and hopper["dtype"] == "bf16" and hopper["checks"] == []
    assert hopper["fully_accelerated"] and [f["state"] for f in hopper["flash"]] == ["on", "on"]
    assert {g["graph"] for g in hopper["graphs"]} == {"encoder", "decoder"}
    assert all(
        set(g["compute_bytes"]) == {"cuda:90"} and g["copies"] == [] for g in hopper["graphs"]
    )


def test_kernels_are_really_compiled(hopper: dict[str, Any]) -> None:
    names = ("attention", "paged attention")
    kernels = {k["graph"]: k for k in hopper["compiled"] if k["kernel"] in names}
    assert set(kernels) == {
        "encoder, warm-up",
        "encoder, largest",
        "decoder, decode",
        "decoder, prefill",
    }
    assert kernels["encoder, largest"]["head"] == 72 and kernels["decoder, prefill"]["head"] == 64
    for kernel in kernels.values():
        assert (
            0 < kernel["shared_bytes"] <= kernel["shared_limit"] and 0 < kernel["registers"] <= 255
        )
        assert kernel["instruction"] in ("wgmma", "mma.sync")


@pytest.mark.parametrize(
    "chosen",
    [
        *({"device": "cpu"}, {"refuse": ["gelu"]}, {"threads": 2}, {"isolate": True}),
        *({"kernels": "there"}, {"vision_attention": "torch"}, {"no_graphs": True}),
    ],
    ids=str,
)
def test_options_that_would_do_nothing_are_refused(chosen: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match=next(iter(chosen))):
        predict("cuda:90", **chosen)


def test_options_that_are_none_are_not_given() -> None:
    none = dict.fromkeys(field.name for field in fields(LoadOptions))
    result, usual = (predict("cuda:75", compile=False, **given) for given in (none, {}))
    assert str(result) == str(usual) and "fp32" in str(result)
    assert fit(memory="20MiB", **none) == fit(memory="20MiB")


def test_keys_and_values_may_lie_on_the_host(mtmd: Any) -> None:
    given = ("--target", "cuda:90", "--no-compile", "--json")
    there, here = (mtmd("warmup", *given, *more) for more in ((), ("--no-kv-offload",)))
    sizes = [json.loads(one.out)["graphs"][-1]["cache_bytes"] for one in (there, here)]
    assert "cpu" not in sizes[0] and sizes[1]["cpu"] > 0


def test_an_old_gpu_gets_explicit_attention_and_the_reason() -> None:
    done = warmup("--target", "cuda:75", "--strict")
    assert done.returncode == 3
    reported = " ".join(done.stdout.split())
    assert "needs compute capability 8.0, found 7.5" in reported
    assert "flash attention, encoder: OFF" in reported and "fp32" in reported.splitlines()[0]


@pytest.mark.parametrize(
    "arguments",
    [
        ("--target", "tpu:1"),
        ("--target", "cuda:90", "--device", "cpu"),
        ("--target", "cuda:90", "--refuse", "gelu"),
    ],
)
def test_refusals(arguments: tuple[str, ...], mtmd: Any) -> None:
    """Before anything is compiled, so that this process does as well as one of its own."""
    assert "target" in mtmd("warmup", *arguments).refused()
