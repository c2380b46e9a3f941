"""Trials of several kernels on an attention node, as plain data. Loads without torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Trial:
    """Result of one kernel: its time, or why it is not to run such nodes. `lasting`: it would be
    the same another time; a shortage of memory, or what a library says, may not be.
    """

    name: str
    ms: float | None
    refused: str | None = None
    lasting: bool = True


@dataclass(frozen=True)
class Measured:
    """Every kernel's trial on `node`, the shapes of one."""

    node: str
    trials: tuple[Trial, ...]

    @property
    def lasting(self) -> bool:
        return all(trial.lasting for trial in self.trials)


@dataclass(frozen=True)
class ClassFacts:
    """Facts about one class of shapes. `saved`: from before, not measured now."""

    shape: str
    chosen: str
    kept: bool
    measured: Measured


@dataclass(frozen=True)
class Learned:
    """Results of a warm-up, and why there are none for other nodes, each reason with their
    number.
    """

    classes: tuple[ClassFacts, ...]
    unasked: tuple[tuple[str, int], ...]
