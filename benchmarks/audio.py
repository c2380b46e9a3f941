"""A long recording transcribed: memory while it goes on, and CPU seconds by stage; and the encoder
of a published size beside transformers and llama.cpp.

    .venv/bin/python benchmarks/audio.py --model DIR             # an hour of 44.1 kHz WAV
    .venv/bin/python benchmarks/audio.py --model DIR --encoder --llama-dir DIR --decoder text.gguf

DIR is a folder of Qwen2-Audio of any size, as small as it may be: for `--encoder` its tower is made
anew, with random weights, in a size of Whisper's (`--size`), and the rest is taken as it is. One
thread, so CPU seconds are those of the work, whatever else the machine does.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
import wave
from pathlib import Path
from typing import Any

import numpy as np

RATE, WINDOW_S = 44_100, 30
SIZES = {  # of Whisper's encoders, as published: width, layers, heads, mel bins
    "large-v3": (1280, 32, 20, 128),
    "small": (768, 12, 12, 80),
}
NAMES = "mtmd", "transformers"


def make(path: Path, seconds: int, rate: int = RATE) -> None:
    """Noise that comes and goes as words do, and pauses, in a mono WAV file."""
    rng = np.random.default_rng(0)
    at = np.arange(10 * rate) / rate
    loud = np.clip(np.sin(2 * np.pi * 1.3 * at), 0, 1) * (np.sin(2 * np.pi * 0.15 * at) > -0.7)
    ten = (rng.normal(0, 0.1, len(at)) * loud * 32767).astype("<i2").tobytes()
    with wave.open(str(path), "wb") as out:
        out.setnchannels(1)
        out.setsampwidth(2)
        out.setframerate(rate)
        for _ in range(seconds // 10):
            out.writeframes(ten)


def memory() -> tuple[float, float]:
    """MiB of this process now, and at most."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    now, peak = (int(lines[key].split()[0]) / 1024 for key in ("VmRSS", "VmHWM"))
    return now, peak


def long(model_folder: str, seconds: int) -> dict[str, Any]:
    """The recording read, cut, encoded and answered, with four tokens for each piece."""
    from mtmd import load
    from mtmd.clip.audio.pieces import pieces
    from mtmd.clip.audio.recording import AudioFile
    from mtmd.transcription import TranscriptionRequest

    result: dict[str, Any] = {"seconds": seconds, "memory_mib": []}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "long.wav"
        make(path, seconds)
        with load(model_folder, device="cpu", threads=1) as model:
            family = model.loaded.audio_encoder.family  # type: ignore[union-attr]
            start = time.process_time()
            audio = AudioFile(path).audio(family.rate)
            result["read_cpu_s"] = time.process_time() - start
            start = time.process_time()
            parts = list(pieces(audio.samples, family.rate, WINDOW_S))
            result["cut_cpu_s"], result["pieces"] = time.process_time() - start, len(parts)
            start = time.process_time()
            for first, last in parts:
                family.resolution.windows(audio.samples[first:last])
            result["spectra_cpu_s"] = time.process_time() - start
            del audio
            start, last = time.process_time(), 0.0
            for _, done, _ in model.transcribing(
                [path], TranscriptionRequest(), max_tokens=4, ignore_eos=True
            ):
                assert not isinstance(done, Exception)
                end = done.segments[-1].end
                if end - last >= 600 or end >= seconds - 1:
                    last = end
                    now, peak = memory()
                    result["memory_mib"].append([round(end), round(now), round(peak)])
            result["transcribe_cpu_s"] = time.process_time() - start
    return result


def with_tower(folder: Path, target: Path, size: str) -> int:
    """Write the same model with a tower of that size; return its mel bins."""
    import torch
    from transformers import AutoConfig, Qwen2AudioForConditionalGeneration

    config = AutoConfig.from_pretrained(folder)
    width, layers, heads, bins = SIZES[size]
    sizes = {"d_model": width, "encoder_layers": layers, "encoder_attention_heads": heads}
    sizes |= {"encoder_ffn_dim": 4 * width, "num_mel_bins": bins}
    for key, value in sizes.items():
        setattr(config.audio_config, key, value)
    torch.manual_seed(0)
    model = Qwen2AudioForConditionalGeneration(config).to(torch.bfloat16)
    model.save_pretrained(target)
    for file in folder.glob("*"):
        if not (target / file.name).exists() and file.suffix != ".safetensors":
            shutil.copy(file, target / file.name)
    features = target / "preprocessor_config.json"
    settings = json.loads(features.read_text()) | {"feature_size": bins}
    features.unlink()
    features.write_text(json.dumps(settings))
    (target / "processor_config.json").unlink(missing_ok=True)
    return bins


def encoders(
    model_folder: Path, size: str, rounds: int, llama: Path | None, decoder: Path | None, dtype: str
) -> dict[str, Any]:
    """CPU seconds of one window of 30 s by stage, by turns; of llama.cpp those of both stages."""
    import torch
    from transformers import Qwen2AudioForConditionalGeneration, WhisperFeatureExtractor

    from mtmd.checkpoint.open import open_checkpoint
    from mtmd.convert.gguf import convert_to_gguf
    from mtmd.model import Model
    from mtmd.options.load import LoadOptions

    stages = [(name, stage) for stage in ("spectrum", "encoder") for name in NAMES]
    result: dict[str, Any] = {f"{name}, {stage}": [] for name, stage in stages}
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made) / "whole"
        bins = with_tower(model_folder, folder, size)
        checkpoint = open_checkpoint(folder)
        path = Path(made) / "window.wav"
        make(path, WINDOW_S, 16_000)
        with wave.open(str(path)) as file:
            samples = np.frombuffer(file.readframes(1 << 30), "<i2").astype(np.float32) / 32768
        ours = Model(checkpoint, LoadOptions(device="cpu", threads=1, dtype=dtype))
        encoder = ours.loaded.audio_encoder
        assert encoder is not None
        compute = torch.bfloat16 if dtype == "bf16" else torch.float32
        theirs = Qwen2AudioForConditionalGeneration.from_pretrained(folder, dtype=compute)
        extractor = WhisperFeatureExtractor(feature_size=bins)
        torch.set_num_threads(1)

        @torch.inference_mode()
        def heard_by_them(spectrum: torch.Tensor) -> None:
            heard = theirs.model.audio_tower(spectrum.to(compute))
            theirs.model.multi_modal_projector(heard.last_hidden_state)

        def spectrum_of_theirs() -> torch.Tensor:
            return extractor(samples, sampling_rate=16_000, return_tensors="pt")["input_features"]

        spectra = {
            "mtmd": lambda: encoder.family.resolution.windows(samples).tiles,
            "transformers": spectrum_of_theirs,
        }
        hear = {"mtmd": encoder.encode, "transformers": heard_by_them}
        for turn in range(rounds + 1):
            for name in NAMES:
                start = time.process_time()
                spectrum = spectra[name]()
                middle = time.process_time()
                hear[name](spectrum)
                if turn:  # the first warms up
                    result[f"{name}, spectrum"].append(round(middle - start, 3))
                    result[f"{name}, encoder"].append(round(time.process_time() - middle, 2))
        print(json.dumps(result), file=sys.stderr)  # the other program takes long
        if llama is not None and decoder is not None:
            *_, last = convert_to_gguf(checkpoint, Path(made) / "whole.gguf", "F16")
            result["llama.cpp"] = _by_llama(llama, decoder, last.path, path)
    return result


def _by_llama(llama: Path, decoder: Path, projector: Path, audio: Path) -> list[float]:
    """What a window takes beside loading both files: spectrum, encoder, a token of the decoder."""
    spent = []
    for more in ((), ("--audio", str(audio))):
        command = [
            *(str(llama / "llama-mtmd-cli"), "-m", str(decoder), "--mmproj", str(projector)),
            *more,
            *("-p", "x", "-n", "1", "-t", "1", "-ngl", "0", "--no-warmup", "--jinja"),
        ]
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        # without audio it waits for a line, and ends with the input
        subprocess.run(command, check=True, capture_output=True, stdin=subprocess.DEVNULL)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        spent.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return [round(spent[1] - spent[0], 2)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", required=True, help="a folder of Qwen2-Audio")
    parser.add_argument("--seconds", type=int, default=3600)
    parser.add_argument("--encoder", action="store_true", help="an encoder beside others, too")
    parser.add_argument("--size", choices=SIZES, default="large-v3", help="of that encoder")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--dtype",
        choices=("bf16", "fp32"),
        default="bf16",
        help="that mtmd and transformers compute in; fp32 for a CPU that does not multiply bf16",
    )
    parser.add_argument("--llama-dir", type=Path, help="where llama-mtmd-cli is")
    parser.add_argument("--decoder", type=Path, help="a GGUF of the decoder, for llama.cpp")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    result = long(options.model, options.seconds)
    if options.encoder:
        print(json.dumps(result), file=sys.stderr)
        others = options.llama_dir, options.decoder
        result |= encoders(
            Path(options.model), options.size, options.rounds, *others, options.dtype
        )
    print(json.dumps(result))


if __name__ == "__main__":
    main()
