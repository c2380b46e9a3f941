"""What is simulated: costs of a picture, machines, how pictures come, what fails. Checked when it
is made.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from mtmd.base.errors import OptionError

DAY_S = 86_400.0
PATTERNS = ("backlog", "steady", "wave", "bursts")
MEASURED, ESTIMATED = "measured", "estimated, not run"


def _check(owner: object, what: str, *, minimum: float, maximum: float = math.inf) -> None:
    for name in what.split():
        value = getattr(owner, name)
        if not isinstance(value, int | float) or isinstance(value, bool) or math.isnan(value):
            raise OptionError(f"{name}: found {value!r:.60}, expected a number")
        if not minimum <= value <= maximum:
            above = f" to {maximum:g}" if maximum < math.inf else " or more"
            raise OptionError(f"{name}: found {value:g}, expected {minimum:g}{above}")


@dataclass(frozen=True)
class Costs:
    """What one picture and its answer take, in seconds at full speed.

    A picture is fetched, decoded, preprocessed and asked about (`request_s`: threads, tickets) by
    threads of the host. Of that the part `locked` is done by one of a worker's threads at a time,
    as they hold the interpreter's lock. Then the engine works, which keeps `engine_cores` of the
    host busy meanwhile: on the `cpu` with its work, beside a `gpu` with waiting for it. The picture
    is encoded in `tiles`, up to `tiles_at_once` in a batch that costs `encode_batch_s` and
    `encode_tile_s` for each. A step of the decoder costs `step_s`, and more for each sequence that
    writes a token and for each token of a prompt that it reads: up to `step_tokens` together, up to
    `concurrent_tokens` of prompts where somebody writes. The first token comes with the last of the
    prompt. `answer_s` is what the engine's thread does for an answer beside all that. A file of
    rows costs `write_s`, and the process that shares out the work `assign_s` for it.
    """

    name: str
    kind: str
    how: str
    machine: str
    device: str
    engine_cores: float
    picture_bytes: float
    fetch_s: float
    decode_s: float
    preprocess_s: float
    request_s: float
    locked: float
    tiles: float
    tiles_at_once: int
    encode_batch_s: float
    encode_tile_s: float
    prompt_tokens: float
    output_tokens: float
    step_s: float
    prompt_token_s: float
    output_token_s: float
    step_tokens: int
    concurrent_tokens: int
    answer_s: float
    write_s: float
    assign_s: float
    load_cpu_s: float
    load_wait_s: float
    background_cores: float
    notes: str = ""

    def __post_init__(self) -> None:
        if self.kind not in (MEASURED, ESTIMATED):
            raise OptionError(f"kind: found {self.kind!r:.60}, expected {MEASURED} or {ESTIMATED}")
        if self.device not in ("cpu", "gpu"):
            raise OptionError(f"device: found {self.device!r:.60}, expected cpu or gpu")
        seconds = [f.name for f in fields(self) if f.name.endswith("_s")]
        _check(self, " ".join(seconds), minimum=0)
        _check(self, "picture_bytes background_cores", minimum=0)
        _check(self, "locked", minimum=0, maximum=1)
        _check(self, "engine_cores", minimum=0.01, maximum=1000)
        _check(self, "tiles_at_once step_tokens concurrent_tokens", minimum=1)
        _check(self, "tiles prompt_tokens", minimum=0, maximum=1e6)
        _check(self, "output_tokens", minimum=1, maximum=1e6)

    @property
    def host_s(self) -> float:
        """Of the host's threads, for a picture."""
        return self.fetch_s + self.decode_s + self.preprocess_s + self.request_s

    @classmethod
    def read(cls, path: Path) -> Costs:
        """Raises OptionError for a file that is none, or lacks something."""
        try:
            result: Any = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise OptionError(
                f"costs {path}: cannot be read ({error}); measure_costs.py writes such files"
            ) from error
        known = {f.name for f in fields(cls)}
        if not isinstance(result, dict):
            raise OptionError(f"costs {path}: found no object, expected one with {sorted(known)}")
        if strange := sorted(set(result) - known):
            raise OptionError(f"costs {path}: found {strange[0]!r:.60}, expected {sorted(known)}")
        if lacking := sorted(known - {"notes"} - set(result)):
            raise OptionError(
                f"costs {path}: {', '.join(lacking)} lacking; measure_costs.py writes all"
            )
        try:
            return cls(**result)
        except OptionError as error:
            raise OptionError(f"costs {path}: {error}") from error


@dataclass(frozen=True)
class Fleet:
    """`nodes` that fail each by itself, with `workers` each; `share` nodes are on one machine with
    `cores`. A worker has `slots` in its batch, and reads pictures for `ahead` more. `link_gbit`:
    of each machine, or its part of what the store gives where that is less; `fetch_wait_s` until
    the first byte comes. `queue`: pictures that may wait, for each worker; None for any number.
    """

    nodes: int = 1
    cores: float = 2
    workers: int = 1
    share: int = 1
    slots: int = 4
    ahead: int = 2
    link_gbit: float = 10.0
    fetch_wait_s: float = 0.0
    queue: int | None = 1024

    def __post_init__(self) -> None:
        _check(self, "nodes", minimum=1, maximum=100_000)
        _check(self, "workers share slots", minimum=1, maximum=10_000)
        _check(self, "ahead fetch_wait_s", minimum=0, maximum=10_000)
        _check(self, "cores", minimum=0.01, maximum=10_000)
        _check(self, "link_gbit", minimum=1e-6)
        if self.queue is not None:
            _check(self, "queue", minimum=0)
        if self.nodes % self.share:
            raise OptionError(
                f"share: found {self.share} nodes on a machine and {self.nodes} nodes, expected "
                "a number of which it is a part"
            )


@dataclass(frozen=True)
class Traffic:
    """How pictures come. `backlog`: all are there, in units of `unit`, as `mtmd batch --ray` has
    them. Else at random, `rate` a second in the mean of a period: `steady`; a `wave` once in
    `period_s`, its height `peak` times the mean; `bursts` of `burst_s`, one each `period_s` in
    the mean, at `peak` times what comes between them.

    `cache_hits` is the part of pictures that were encoded lately, of which the prompt's tokens are
    known but for `page_tokens`. `size_cv` and `length_cv`: coefficients of variation of pictures'
    sizes and of answers' lengths, gamma distributions.
    """

    pattern: str = "backlog"
    pictures: int = 10_000
    rate: float = 1.0
    peak: float = 1.0
    period_s: float = DAY_S
    burst_s: float = 60.0
    unit: int = 256
    cache_hits: float = 0.0
    page_tokens: int = 32
    size_cv: float = 0.0
    length_cv: float = 0.0

    def __post_init__(self) -> None:
        if self.pattern not in PATTERNS:
            raise OptionError(
                f"pattern: found {self.pattern!r:.60}, expected one of {', '.join(PATTERNS)}"
            )
        _check(self, "pictures", minimum=1, maximum=50_000_000)
        _check(self, "unit page_tokens", minimum=1, maximum=1_000_000)
        _check(self, "rate period_s burst_s", minimum=1e-9)
        _check(self, "cache_hits", minimum=0, maximum=1)
        _check(self, "size_cv length_cv", minimum=0, maximum=10)
        _check(self, "peak", minimum=1, maximum=2 if self.pattern == "wave" else 1000)
        if self.pattern == "bursts" and self.burst_s >= self.period_s:
            raise OptionError(
                f"burst_s: found {self.burst_s:g}, expected less than period_s {self.period_s:g}"
            )


@dataclass(frozen=True)
class Kill:
    """`node` is lost for good, when `after` of all pictures have their row."""

    node: int
    after: float

    @classmethod
    def parse(cls, text: str) -> Kill:
        node, _, after = text.partition("@")
        try:
            return cls(int(node), float(after.removesuffix("%")) / 100)
        except ValueError as error:
            raise OptionError(
                f"kill: found {text!r:.60}, expected NODE@PERCENT, such as 1@50"
            ) from error


@dataclass(frozen=True)
class Failures:
    """A node is lost once in `mtbf_s` in the mean (exponential; None for never); that is noticed
    after `notice_s`; another is there `restart_s` after the loss, where its workers load.
    """

    mtbf_s: float | None = None
    notice_s: float = 1.0
    restart_s: float = 120.0
    kills: tuple[Kill, ...] = ()

    def __post_init__(self) -> None:
        _check(self, "notice_s restart_s", minimum=0)
        if self.mtbf_s is not None:
            _check(self, "mtbf_s", minimum=1e-6)
        for kill in self.kills:
            if not 0 < kill.after < 1:
                raise OptionError(f"kill: found {kill.after:.0%}, expected more than 0, below 100")


@dataclass(frozen=True)
class Scenario:
    costs: Costs
    fleet: Fleet = field(default_factory=Fleet)
    traffic: Traffic = field(default_factory=Traffic)
    failures: Failures = field(default_factory=Failures)
    seed: int = 1

    def __post_init__(self) -> None:
        for kill in self.failures.kills:
            if not 0 <= kill.node < self.fleet.nodes:
                raise OptionError(
                    f"kill: found node {kill.node}, expected 0 to {self.fleet.nodes - 1}"
                )
        if len({kill.node for kill in self.failures.kills}) == self.fleet.nodes:
            raise OptionError(
                f"kill: found all {self.fleet.nodes} nodes, expected one that is left to finish"
            )
        if self.traffic.pattern != "backlog" and self.failures.kills:
            raise OptionError("kill: found with pictures that come, expected a backlog")
        if self.costs.device == "gpu":
            taken = self.costs.engine_cores * self.fleet.workers * self.fleet.share
            if taken >= self.fleet.cores:
                raise OptionError(
                    f"cores: found {self.fleet.cores:g} for {taken:g} threads that wait for GPUs, "
                    "expected more: pictures are decoded beside them"
                )
