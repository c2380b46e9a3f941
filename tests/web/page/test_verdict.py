"""What the diagnostics answer first, from reports of every kind."""

from __future__ import annotations

from dataclasses import replace

import pytest
from browsing import PHONE
from fake_service import FakeService
from serving import client_for, running

from mtmd import DeviceError
from mtmd.base.cores import Cores
from mtmd.cli import main
from mtmd.kernels.report.facts import (
    Check,
    DequantizedTensor,
    FlashFacts,
    OpTime,
    PreprocessingFacts,
    RefusedOp,
    VisionAttentionFacts,
)
from mtmd.kernels.report.machine import MachineFacts
from mtmd.kernels.report.warmup_report import WarmupReport
from mtmd.kernels.trials import ClassFacts, Learned, Measured, Trial
from mtmd.service.decode_speed import DecodeSpeed
from mtmd.web.app import create_app
from mtmd.web.page.verdict import FAST, WORDS, verdict
from mtmd.web.settings import ServerSettings
from mtmd.web.store.store import Store

ON = FlashFacts("encoder", "auto", "on", 12, (), ())
CHECK = Check(
    "encoder",
    "one picture",
    None,
    (("matmul", "n1", 1e-9),),
    1e-4,
    20.0,
    12.0,
    (OpTime("matmul", 3, 9.0, 1.0, 1.0), OpTime("rope", 3, 3.0, 1.0, 1.0)),
)
GOOD = WarmupReport("a model", "cuda", "a GPU", "bf16", (ON,), (), (), (CHECK,))
ROPE = RefusedOp("encoder", "rope", "n7", 3, "cuda", "head size 72 is not known", "cpu", ())


def test_a_good_report_is_fast_and_says_how_fast():
    result = verdict(GOOD, None)
    assert (result.state, result.findings) == ("fast", ())
    assert "one picture in 12 ms" in result.summary and "agree with the reference" in result.summary


def test_how_fast_answers_are_written_is_told_where_it_is_known():
    assert verdict(GOOD, None).speed == ""
    assert "at 20 tokens/s" in verdict(GOOD, None, DecodeSpeed(20.0, 40.0, 64e9)).speed


def test_a_report_without_a_run_does_not_say_that_results_are_right():
    result = verdict(replace(GOOD, checks=()), None)
    assert (
        result.state == "fast" and "not checked" in result.summary and "right" not in result.summary
    )


@pytest.mark.parametrize(
    ("change", "words", "command"),
    [
        (
            {"refused": (ROPE,)},
            "3 rope nodes of the encoder run on cpu, 25% of the encoder",
            "fp32",
        ),
        (
            {"flash": (replace(ON, state="mixed", rebuilt=("a", "b")),)},
            "2 of 12 nodes were rebuilt as explicit attention",
            "",
        ),
        (
            {"flash": (replace(ON, state="off", setting="off"),)},
            "as requested",
            "--flash-attn auto",
        ),
        ({"flash": (replace(ON, on_fallback=("a",)),)}, "runs on another backend in 1 of 12", ""),
        (
            {"dequantized": (DequantizedTensor("w", "IQ1_S", 1, 4),)},
            "1 tensor (IQ1_S) kept dequantized",
            "Q4_K_M",
        ),
        (
            {"machine": MachineFacts(Cores(2), 64)},
            "64 threads share 2 cores",
            "mtmd serve -m MODEL --threads 2",
        ),
    ],
    ids=["refused", "rebuilt", "off", "elsewhere", "dequantized", "threads"],
)
def test_what_is_slower_is_told_with_its_reason_and_its_remedy(change, words, command):
    result = verdict(replace(GOOD, **change), None)
    (finding,) = result.findings
    assert result.state == "slower" and words in finding.what and command in finding.command


def test_false_results_and_a_device_that_is_gone_are_wrong_whatever_else_there_is():
    false = replace(CHECK, worst=(("matmul", "n1", 0.5),))
    result = verdict(replace(GOOD, checks=(false,), refused=(ROPE,)), None)
    assert result.state == "wrong" and "matmul at n1" in result.findings[0].what
    assert "false" in result.summary and len(result.findings) == 2
    assert verdict(GOOD, "the device hangs").state == "wrong"


def test_every_command_of_a_verdict_is_one_that_there_is(capsys):
    reports = (
        replace(GOOD, refused=(ROPE,), flash=(replace(ON, state="off", setting="off"),)),
        replace(GOOD, checks=(replace(CHECK, first_nan="n3"),)),
    )
    for finding in (f for r in reports for f in verdict(r, None).findings if f.command):
        _, verb, *rest = finding.command.split()
        with pytest.raises(SystemExit):
            main([verb, "--help-all"])
        known = capsys.readouterr().out
        assert all(option in known for option in rest if option.startswith("--")), finding.command


def test_the_report_tells_what_was_measured_and_where_pictures_go():
    trials = Trial("triton", 1.02), Trial("torch cuDNN", 0.8), Trial("torch flash", None, "no <b>")
    shape = ClassFacts("bf16, 16 heads of 72", "torch cuDNN", True, Measured("q, k", trials))
    service = FakeService()
    service.warmup_report = replace(
        GOOD,
        vision_attention=VisionAttentionFacts(
            "auto", {}, None, Learned((shape,), ()), (("another", "it plans"),)
        ),
        preprocessing=PreprocessingFacts("cuda:0", "auto", None, notes=("resized on the host",)),
    )
    text = client_for(service).get("/api/report").get_data(as_text=True)
    assert "Attention of the encoder, bf16, 16 heads of 72" in text
    assert (
        "torch cuDNN; triton 1.020 ms; torch cuDNN 0.800 ms; torch flash refused: no &lt;b&gt;"
        in text
    )
    assert "not by another</dt><dd>it plans" in text
    assert "prepared on cuda:0; resized on the host" in text


def test_the_diagnostics_begin_with_the_verdict(visit, fake):
    """A server shows the report that it has begun with: another one is fast."""
    good = FakeService()
    good.warmup_report = GOOD
    with running(good, create_app(good, ServerSettings(port=0), Store(None))) as server:
        person = visit(server.url, size=PHONE)
        page = person.page
        page.wait_for_selector("#badge.fast", state="attached")
        assert not page.is_visible("#badge"), "there is nothing to tell"
        person.go("/diagnostics")
        assert page.inner_text("#verdict.fast h2") == WORDS[FAST]
        page.goto("about:blank")  # so that it asks no server that has ended
    fake.warmup_report = replace(GOOD, refused=(ROPE,))
    person = visit(size=PHONE)
    page = person.page
    person.expects = ("503",)
    for state in ("slower", "wrong"):
        fake.fault = DeviceError("the device hangs") if state == "wrong" else None
        person.go("/")
        page.wait_for_selector(f"#badge.{state}", state="attached")
        person.go("/diagnostics")
        page.wait_for_selector(f"#verdict.{state} h2")
        assert page.evaluate("document.querySelector('#verdict').getBoundingClientRect().top") < 100
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.click("text=Copy report")
    page.wait_for_selector("text=Copied")
    assert page.evaluate("navigator.clipboard.readText()").startswith(
        "mtmd warm-up: a model on cuda"
    )
