"""The long video of the benchmark is one: its scenes follow each other at their times."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from mtmd.clip.video.footage import VideoFile


def test_scenes_follow_each_other(tmp_path):
    spec = importlib.util.spec_from_file_location(
        "video", Path(__file__).parents[2] / "benchmarks" / "video.py"
    )
    assert spec and spec.loader
    video = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(video)
    path = tmp_path / "long.mkv"
    video.make(path, 20, 480, 620)
    with VideoFile(path).opened() as reader:
        assert (reader.facts.frames, round(reader.facts.seconds)) == (20 * video.FPS, 20)
        first, second = (p.mean() for _, _, p in reader.take([0, video.GOP], (48, 62)))
    assert second > first + 10
