"""Audio files that are made to hurt, and damaged ones: samples, or a refusal in one line, decoded in
a worker process. `HOSTILE_FILES=2000` tries as many.
"""

from __future__ import annotations

import os
import random

import numpy as np
import pytest
from damaged_audio import BOMBS, recording

from mtmd.base.errors import AudioError
from mtmd.clip.audio.limits import AudioLimits
from mtmd.clip.audio.recording import AudioFile

LIMITS = AudioLimits(max_seconds=600, cpu_s=20)
COUNT = int(os.environ.get("HOSTILE_FILES", 120))


def outcome(data: bytes) -> str:
    try:
        audio = AudioFile(data, LIMITS, "talk", isolate=True).audio(16_000)
    except AudioError as error:
        assert str(error).isprintable() and len(str(error)) < 400
        return "crashed" if "crashed" in str(error) else "refused"
    assert np.isfinite(audio.samples).all() and len(audio.samples) <= 601 * 16_000
    return "heard" if len(audio.samples) else "nothing"


def test_damaged_ones() -> None:
    rng = random.Random(1)
    found = [(what, outcome(data)) for what, data in (recording(rng) for _ in range(COUNT))]
    assert {result for _, result in found} == {"heard", "refused"}, [
        one for one in found if one[1] not in ("heard", "refused")
    ]


@pytest.mark.parametrize("name", BOMBS)
def test_bombs(name: str) -> None:
    assert outcome(BOMBS[name](random.Random(0))) in ("heard", "refused")
