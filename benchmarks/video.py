"""A long video asked about: memory of the process that answers and of the worker that reads, times
by stage, and a second question.

    .venv/bin/python benchmarks/video.py                 # two hours, 1920 x 1080, made first
    .venv/bin/python benchmarks/video.py --file film.mkv --model org/name --fps 0.1

The file that it makes has 24 frames a second and a key frame every ten seconds. Few scenes are
encoded, and their packets repeated: it is made in a fraction of the time that it plays.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import threading
import time
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

FPS, GOP, SCENES = 24, 240, 8
MIB = 1 << 20


def make(path: Path, seconds: int, width: int = 1920, height: int = 1080) -> None:
    """A file of so many `seconds`, by the ending of `path`."""
    import av

    needed = min(SCENES, -(-seconds * FPS // GOP))
    scenes = [_scene(av, number, width, height) for number in range(needed)]
    with av.open(str(path), "w") as out:
        stream = out.add_stream("libx264", rate=FPS)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        stream.codec_context.extradata = scenes[0][0]
        stream.codec_context.time_base = Fraction(1, FPS)
        out.start_encoding()
        for start in range(0, seconds * FPS, GOP):
            for data, pts, dts, key in scenes[start // GOP % needed][1]:
                packet = av.Packet(data)
                packet.stream, packet.time_base = stream, Fraction(1, FPS)
                packet.pts, packet.dts, packet.is_keyframe = start + pts, start + dts, key
                out.mux(packet)


def _scene(av: Any, number: int, width: int, height: int) -> tuple[bytes, list[Any]]:
    """Head and packets of one scene: a square that crosses the picture."""
    codec = av.CodecContext.create("libx264", "w")
    codec.width, codec.height, codec.pix_fmt = width, height, "yuv420p"
    codec.time_base, codec.framerate, codec.gop_size = Fraction(1, FPS), Fraction(FPS), GOP
    codec.options = {
        "preset": "ultrafast",
        "tune": "zerolatency",
        "crf": "30",
        "x264-params": "repeat-headers=1",
    }
    codec.open()
    packets = []
    for index in range(GOP):
        frame = np.full((height, width, 3), 25 * (number + 1), np.uint8)
        left = index * (width - 200) // GOP
        frame[400:600, left : left + 200] = (230, 40 * (number % 6), 60)
        shown = av.VideoFrame.from_ndarray(frame, format="rgb24")
        shown.pts = index
        packets += codec.encode(shown)
    packets += codec.encode(None)
    return bytes(codec.extradata or b""), [
        (bytes(p), p.pts, p.dts if p.dts is not None else p.pts, p.is_keyframe) for p in packets
    ]


def peak(pid: int | str = "self") -> int:
    """Bytes of memory that a process had at most (VmHWM)."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) << 10
    return 0


class Workers:
    """The most memory that any process which reads videos had."""

    def __init__(self) -> None:
        self.maximum, self._over = 0, threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Workers:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        from mtmd.clip.video.isolated import server_pid

        while not self._over.wait(0.01):
            parent = server_pid()
            if parent is None:
                continue
            try:
                children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
                self.maximum = max([self.maximum, *(peak(child) for child in children)])
            except (FileNotFoundError, ProcessLookupError):
                continue


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--file", type=Path, help="a video of your own")
    parser.add_argument("--seconds", type=int, default=7200, help="of the one that is made")
    parser.add_argument("--ending", default=".mp4", help="of the one that is made")
    parser.add_argument("--model")
    parser.add_argument("--fps", type=float)
    parser.add_argument("--max-frames", type=int)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path, made_s = args.file, 0.0
        if path is None:
            path, start = Path(folder) / f"long{args.ending}", time.perf_counter()
            make(path, args.seconds)
            made_s = time.perf_counter() - start
        print(json.dumps(measured(path, args) | {"made_s": round(made_s, 1)}, indent=1))


def measured(path: Path, args: argparse.Namespace) -> dict[str, Any]:
    from mtmd import VideoInput, load

    model = load(args.model, isolate=True)
    requested = VideoInput(path, fps=args.fps, max_frames=args.max_frames)
    model.answer(np.zeros((64, 64, 3), np.uint8), "What?", max_tokens=8)
    before, answers = peak(), []
    with Workers() as workers:
        for prompt in ("What moves?", "Which colour is it?"):
            start, first = time.perf_counter(), None
            question = {
                "role": "user",
                "content": [
                    {"type": "video", "video": requested},
                    {"type": "text", "text": prompt},
                ],
            }
            for event in model.stream([question], max_tokens=8):
                if first is None and type(event).__name__ == "TextPiece":
                    first = time.perf_counter() - start
            receipt = event.answer.receipt
            answers.append((first, receipt))
    return {
        "file": f"{path.stat().st_size / MIB:.1f} MiB",
        "of this process beyond the model, MiB": round((peak() - before) / MIB),
        "of the worker, MiB": round(workers.maximum / MIB),
        "answers": [
            {
                "first token, ms": round((first or 0) * 1e3),
                "read, ms": round(receipt.videos[0].read_ms),
                "encode, ms": round(receipt.encode_ms),
                "prefill, ms": round(receipt.prefill_ms),
                "frames": len(receipt.videos[0].frames),
                "from the cache": sum(f.cached for f in receipt.videos[0].frames),
                "receipt": str(receipt).splitlines()[0],
            }
            for first, receipt in answers
        ],
    }


if __name__ == "__main__":
    main()
