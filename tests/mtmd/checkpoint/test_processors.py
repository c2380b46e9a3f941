"""Which file says how videos are prepared."""

from __future__ import annotations

import json
from pathlib import Path

from mtmd.checkpoint.folder import _image_processor
from mtmd.kernels.checkpoint.settings import Settings

NO_CONFIG = Settings({}, "config.json")


def test_the_first_that_speaks_of_videos_counts(tmp_path: Path) -> None:
    def says() -> object:
        return _image_processor(tmp_path, NO_CONFIG).part("video_processor").values

    def write(name: str, values: object) -> None:
        (tmp_path / name).write_text(json.dumps(values))

    write("preprocessor_config.json", {"fps": 1, "min_pixels": 7})
    assert says() == {"fps": 1, "min_pixels": 7}, "as with pictures"
    write("video_preprocessor_config.json", {"fps": 2})
    assert says() == {"fps": 2}
    write("processor_config.json", {"image_processor": {"fps": 3}})
    assert says() == {"fps": 2} and _image_processor(tmp_path, NO_CONFIG).get("fps", 0) == 3
    write("processor_config.json", {"image_processor": {"fps": 3}, "video_processor": {"fps": 4}})
    assert says() == {"fps": 4}
