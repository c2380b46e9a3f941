"""Common part of the models that write nothing and give what is computed from a decoder's states:
vectors or scores.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mtmd.checkpoint.checkpoint import Checkpoint
from mtmd.checkpoint.facts import CheckpointFacts, facts_of
from mtmd.embedding.state_reader import StateReader, Times
from mtmd.kernels.backends import Backend
from mtmd.kernels.dtype import name_of
from mtmd.kernels.report.warmup_report import WarmupReport
from mtmd.loaded.report import attention_report, refusal_warnings
from mtmd.model import Model
from mtmd.options.load import LoadOptions


class StateModel:
    """A loaded decoder that is read for its states. Safe to use from several threads, which take
    turns.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        chosen: LoadOptions,
        backends: Sequence[Backend] | None = None,
        name: str | None = None,
    ):
        self.model = Model(checkpoint, chosen, backends, name)
        self._reader = StateReader(self.model)

    @property
    def checkpoint(self) -> Checkpoint:
        return self.model.checkpoint

    @property
    def name(self) -> str:
        return self.model.name

    @property
    def backends(self) -> list[Backend]:
        return self.model.backends

    @property
    def context(self) -> int:
        """Tokens of the longest prompt that is read, all that stands around a text included."""
        return self._reader.context

    @property
    def sees(self) -> bool:
        """Return whether it takes pictures."""
        return self.checkpoint.vision is not None

    @property
    def facts(self) -> CheckpointFacts:
        """Return what the model's files say of themselves."""
        return facts_of(self.checkpoint)

    def weights_read(self) -> tuple[int, int]:
        """Bytes of weights that are where they are needed, and of all of them."""
        return self.model.weights_read()

    def is_cut(self, text: str) -> bool:
        """Return whether a text would not be read to its end: none is cut, those that do not fit
        are refused.
        """
        del text
        return False

    @property
    def warmup_report(self) -> WarmupReport:
        """Return where everything runs and what it will take. Nothing is run for it: `warm_up`
        does.
        """
        return self.model.warmup_report

    def warm_up(self) -> WarmupReport:
        """The report with a real picture and a real prompt read."""
        return self.model.warm_up()

    def _receipt_fields(self, times: Times) -> dict[str, Any]:
        """Return what every receipt says of the model, its device and the time it took."""
        loaded = self.model.loaded
        return {
            "model": self.name,
            "preprocess_ms": times.preparing,
            "encode_ms": times.computing,
            "device": self.backends[0].name,
            "dtype": name_of(self.model.dtype),
            "attention": attention_report(loaded),
            "warnings": tuple(refusal_warnings(loaded.placements)),
        }
