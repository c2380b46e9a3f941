"""What those are told whose model cannot be had."""

from __future__ import annotations

import pytest
from huggingface_hub import constants

from mtmd import ModelError
from mtmd.checkpoint.collection import Source
from mtmd.web.models.entry import Entry
from mtmd.web.models.presets import Preset
from mtmd.web.models.refusals import reason_for

SNAPSHOT = "models--org--name/snapshots/" + "0" * 40
OF_THE_HUB = Source("org/name:Q4_K_M", "org/name:Q4_K_M", 5, "GGUF")
LOCAL = Source("x", "/srv/the models/x.gguf", 5, "GGUF")
REASONS = {
    "{cache}/{snapshot}/x-Q4_K_M.gguf is cut off": "x-Q4_K_M.gguf is cut off",
    "found '{cache}/{snapshot}/a/x.gguf', expected a GGUF": "found 'x.gguf', expected a GGUF",
    "mmproj:/srv/eyes/mmproj.gguf: no GGUF, nor is ~/b/y.gguf": "mmproj:mmproj.gguf: no GGUF, nor is y.gguf",
    "/srv/my prompts/one.jinja and /tmp/a/b/: no": "one.jinja and b/: no",
    "'/srv/a/x.gguf' and /: no": "'x.gguf' and /: no",
    "model 'org/name:Q4_K_M': 3/4 of it, a / b, https://x.org/a/b": "model 'org/name:Q4_K_M': 3/4 of it, a / b, https://x.org/a/b",
}


@pytest.mark.parametrize("reason", REASONS)
def test_clients_are_told_the_names_of_files_and_not_where_they_lie(
    reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", "/mnt/large disk/hub")
    entry = Entry(OF_THE_HUB, Preset(load={"chat_template": "/srv/my prompts/two.jinja"}))
    slots = {"cache": "/mnt/large disk/hub", "snapshot": SNAPSHOT}
    assert reason_for(entry, ModelError(reason.format(**slots))) == REASONS[reason]


def test_a_local_model_is_called_by_its_name_and_its_neighbours_by_theirs() -> None:
    error = ModelError("/srv/the models/x.gguf does not go with /srv/the models/mmproj.gguf")
    assert reason_for(Entry(LOCAL), error) == "x does not go with mmproj.gguf"
