"""The one answer that the diagnostics page begins with: is it fast, slower than it could be, or is
something wrong; why; and what to do about it.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from mtmd import WarmupReport
from mtmd.base.text import plural
from mtmd.checkpoint.hub import DEMO_NAME
from mtmd.service.decode_speed import DecodeSpeed

FAST, SLOWER, WRONG = "fast", "slower", "wrong"
WORDS = {
    FAST: "Fast: everything runs as it should",
    SLOWER: "Works, but slower than it could be",
    WRONG: "Something is wrong",
}
UNMEASURED = "Good: everything takes its fast path"
NAMED = 3  # refused ops that are told one by one


@dataclass(frozen=True)
class Finding:
    """`what` was found and what it means, what to `do`, and the `command` for that, if there is
    one.
    """

    what: str
    do: str
    command: str = ""


@dataclass(frozen=True)
class Verdict:
    """`state` is fast, slower or wrong. `checked`: the warm-up ran the model, so that its results
    are known to be right. `speed`: how fast answers are written beside what the machine could, ""
    where that is not known.
    """

    state: str
    title: str
    summary: str
    findings: tuple[Finding, ...]
    checked: bool
    speed: str = ""

    def asdict(self) -> dict[str, Any]:
        return asdict(self)


def verdict(report: WarmupReport, fault: str | None, speed: DecodeSpeed | None = None) -> Verdict:
    """`fault`: why the device cannot answer any more, None where it can. `speed`: as measured."""
    wrong = [*_fault(report, fault), *_failed_checks(report)]
    slower = [
        *(f for flash in report.flash for f in _flash(report, flash)),
        *_refused(report),
        *_moved(report),
        *_dequantized(report),
        *_threads(report),
    ]
    state = WRONG if wrong else SLOWER if slower else FAST
    title = WORDS[state] if report.checks or state != FAST else UNMEASURED
    reported = "" if speed is None else str(speed)
    findings, checked = (*wrong, *slower), bool(report.checks)
    return Verdict(state, title, _summary(report, state), findings, checked, reported)


def _summary(report: WarmupReport, state: str) -> str:
    where = f"{report.model} on {report.device_name or report.device}, {report.dtype}"
    if state == WRONG:
        return f"{where}. Answers may fail or be false until this is mended."
    if not report.checks:
        return f"{where}. It is known where everything runs; the results were not checked."
    times = "; ".join(f"{c.graph}: {c.what} in {_ms(c.best_ms)}" for c in report.checks)
    known = "The results agree with the reference." if state == FAST else "The results are right."
    return f"{where}. {known} {times}."


def _fault(report: WarmupReport, fault: str | None) -> list[Finding]:
    if fault is None:
        return []
    return [
        Finding(
            f"The server cannot answer: {fault}.",
            "Start the server again. If it comes back, see what the device says:",
            _command(report, "warmup"),
        )
    ]


def _failed_checks(report: WarmupReport) -> list[Finding]:
    return [
        Finding(
            f"The {check.graph} gives false results: {'; '.join(check.failed[:NAMED])}.",
            "Do not trust its answers. Run with plain attention, and see whether that is right:",
            _command(report, "warmup", "--flash-attn off"),
        )
        for check in report.checks
        if check.failed
    ]


def _flash(report: WarmupReport, flash: Any) -> list[Finding]:
    if not flash.nodes:
        return []
    if flash.on_fallback:
        what = (
            f"Attention of the {flash.graph} runs on another backend in "
            f"{len(flash.on_fallback)} of {flash.nodes} places: each costs a copy there and back."
        )
    elif flash.state == "on":
        return []
    elif flash.setting == "off":
        return [
            Finding(
                f"Flash attention of the {flash.graph} is off, as requested: "
                "attention takes more memory, and more time for large pictures "
                "and long texts.",
                "Leave the choice to the server:",
                _command(report, "serve", "--flash-attn auto"),
            )
        ]
    else:
        what = (
            f"Flash attention of the {flash.graph} is {flash.state}: {len(flash.rebuilt)} of "
            f"{flash.nodes} nodes were rebuilt as explicit attention, which takes more memory "
            "and more time."
        )
    return [Finding(what, "The reasons are below, under Refused.")]


def _refused(report: WarmupReport) -> list[Finding]:
    """The ops with the most nodes first. Attention is told of by `_flash`."""
    others = [r for r in report.refused if r.op != "attention"]
    others.sort(key=lambda r: -r.count)
    findings = [_refusal(report, r) for r in others[:NAMED]]
    if rest := sum(r.count for r in others[NAMED:]):
        findings.append(
            Finding(f"{plural(rest, 'more node')} refused.", "They are below, under Refused.")
        )
    return findings


def _refusal(report: WarmupReport, refused: Any) -> Finding:
    share = max(
        (
            op.ms / total
            for check in report.checks
            if check.graph == refused.graph and (total := sum(o.ms for o in check.ops))
            for op in check.ops
            if op.op == refused.op
        ),
        default=None,
    )
    cost = f", {share:.0%} of the {refused.graph}'s time" if share is not None else ""
    nodes = plural(refused.count, f"{refused.op} node")
    runs = "runs" if refused.count == 1 else "run"
    return Finding(
        f"{nodes} of the {refused.graph} {runs} on {refused.runs_on}{cost}: {refused.reason}.",
        "Another number type may be taken:" if report.dtype != "fp32" else "",
        _command(report, "warmup", "--dtype fp32") if report.dtype != "fp32" else "",
    )


def _moved(report: WarmupReport) -> list[Finding]:
    if report.refused or not report.elsewhere:
        return []
    return [
        Finding(
            f"{plural(report.elsewhere, 'node')} placed on another backend than "
            f"{', '.join(report.devices)}, "
            "as requested.",
            "Start the server without --override-tensor.",
        )
    ]


def _dequantized(report: WarmupReport) -> list[Finding]:
    if not report.dequantized:
        return []
    kinds = ", ".join(sorted({d.kind for d in report.dequantized}))
    return [
        Finding(
            f"{plural(len(report.dequantized), 'tensor')} ({kinds}) kept dequantized: no kernel "
            "takes their block type, so they take more memory and more time to read.",
            "Take a file of another block type, Q4_K_M or Q8_0:",
            "mtmd serve -m org/name:Q4_K_M",
        )
    ]


def _threads(report: WarmupReport) -> list[Finding]:
    """Return what other programs do is of a moment, and told by the warm-up alone."""
    machine = report.machine
    if machine is None or not machine.oversubscribed:
        return []
    return [
        Finding(
            f"{plural(machine.threads, 'thread')} share {machine.cores}, and wait for each other.",
            "Start the server with as many as there are cores:",
            _command(report, "serve", f"--threads {machine.cores.usable}"),
        )
    ]


def _command(report: WarmupReport, verb: str, options: str = "") -> str:
    model = "" if report.model == DEMO_NAME else "-m MODEL"
    return " ".join(part for part in ("mtmd", verb, model, options) if part)


def _ms(value: float) -> str:
    return f"{value:.0f} ms" if value >= 10 else f"{value:.1f} ms"
