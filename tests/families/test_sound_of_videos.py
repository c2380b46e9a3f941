"""The sound of videos with their frames, in families that hear both, against transformers: prompt
ids, logits, greedy tokens; files with sound, and what the receipt says of it.
"""

from __future__ import annotations

import gc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import audio_cases
import numpy as np
import pytest
import torch
from clips import with_sound
from common import load_tokenizer
from sounds import tones
from test_videos import conversation, video_of
from torchvision_stand_in import torchvision_here
from videos import Clip, clip

from mtmd import VideoInput
from mtmd.checkpoint.open import open_checkpoint
from mtmd.cli import main
from mtmd.clip.audio.recording import GivenSamples
from mtmd.clip.video.sound import ByTime, Chunks
from mtmd.kernels.resources.threads import ask_threads
from mtmd.model import Model
from mtmd.options.load import LoadOptions
from mtmd.prompt.bridge import flat
from mtmd.prompt.prompts import PreparedPrompt

TOKENS = 6


class Subject:
    """Our model of a thinker, and transformers' with its processors."""

    def __init__(self, folder: Path, three: bool):
        self.three, self.audio = three, audio_cases.qwen_omni_case(folder, three=three)
        self.model = Model(open_checkpoint(folder), LoadOptions(device="cpu", dtype="fp32"))
        with torchvision_here():
            from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor
        stated = {"patch_size": 16} if three else {"patch_size": 14}
        limits = self.model.encoder.family.video.limits  # type: ignore[union-attr]
        edges = {"shortest_edge": limits.minimum, "longest_edge": limits.maximum}
        means = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3} if three else {}
        self.videos = Qwen2VLVideoProcessor(size=edges, **stated, **means)

    def inputs(self, shown: Clip, samples: np.ndarray) -> dict[str, Any]:
        """What transformers' processor makes of a video with its sound."""
        import transformers

        made = dict(self.audio.extract([samples]))
        (count,) = self.audio.counts(made)
        frames = torch.from_numpy(np.stack(shown.frames)).permute(0, 3, 1, 2)
        made |= self.videos([frames], do_sample_frames=False, return_tensors="pt")
        second = 2 * (shown.indices[-1] / shown.fps) / (len(shown.indices) - 1)
        kind = (
            transformers.Qwen3OmniMoeProcessor if self.three else transformers.Qwen2_5OmniProcessor
        )
        tokens = SimpleNamespace(
            audio_bos_token="<|audio_bos|>",
            audio_eos_token="<|audio_eos|>",
            audio_token="<|AUDIO|>",
            video_token="<|VIDEO|>",
            video_processor=self.videos,
        )
        tokens.get_chunked_index = lambda *args: kind.get_chunked_index(tokens, *args)
        each = self.model.encoder.family.video.clock.each  # type: ignore[union-attr]
        text = kind.replace_video_with_audio_token(
            tokens,
            {"video_grid_thw": made["video_grid_thw"].numpy(), "video_second_per_grid": [second]},
            0,
            {"num_audio_tokens": [count]},
            0,
            position_id_per_seconds=each,
            seconds_per_chunk=2.0,
        )
        rendered = self.model.checkpoint.template.render(conversation(["What is", shown, "here?"]))
        tokenizer = load_tokenizer(self.audio.folder)
        ids = tokenizer(rendered.replace("<|VIDEO|>", text), return_tensors="pt")
        made |= {"input_ids": ids["input_ids"], "attention_mask": ids["attention_mask"]}
        made |= {"video_second_per_grid": torch.tensor([second]), "use_audio_in_video": True}
        return made

    def prompt(self, shown: Clip, samples: np.ndarray) -> PreparedPrompt:
        bridge = self.model.prompts.bridge
        video = bridge.prepare_video(video_of(shown))
        video = bridge.with_sound(video, bridge.prepare_audio(GivenSamples(samples, 16_000)))
        rendered = self.model.checkpoint.template.render(conversation(["What is", shown, "here?"]))
        return PreparedPrompt(bridge.read(rendered, [video]), flat([video]), (), (video,))


@pytest.fixture(scope="module", params=[False, True], ids=["2.5", "3"])
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Subject:
    return Subject(tmp_path_factory.mktemp("omni"), request.param)


@pytest.mark.parametrize("seconds", [4.3, 2.2], ids=["as long", "shorter"])
def test_frames_and_sound_are_those_of_transformers(subject: Subject, seconds: float) -> None:
    shown, samples = clip(1, 8, 62, 45, every=4, fps=8.0), tones(seconds)
    inputs, prompt = subject.inputs(shown, samples), subject.prompt(shown, samples)
    assert list(prompt.tokens) == inputs["input_ids"][0].tolist()
    runner, spans = subject.model.runner, subject.model.prompts.encode(prompt).spans
    logits = runner.prefill(spans, runner.new_cache())
    with torch.no_grad():
        expected = subject.audio.model(**inputs).logits[0, -1]
    error = (logits - expected).pow(2).sum() / expected.pow(2).sum()
    assert error <= 1e-8


def test_a_file_with_sound(subject: Subject, tmp_path: Path) -> None:
    path = tmp_path / "talk.mp4"
    path.write_bytes(with_sound(tones(3.0), 16_000, frames=24, fps=8, size=(62, 44)))
    how: dict[str, Any] = {"prompt": "What?", "max_tokens": TOKENS, "ignore_eos": True}
    heard = subject.model.answer(path, **how)
    (video,), (sound,) = heard.receipt.videos, heard.receipt.audio
    assert "with its sound" in video.notes and sound.tokens == heard.receipt.audio_tokens > 0
    again = subject.model.answer(path, **how)
    assert again.output_token_ids == heard.output_token_ids and again.receipt.audio[0].cached
    alone = subject.model.answer(VideoInput(path, no_sound=True), **how)
    assert "its sound is left out, as requested" in alone.receipt.videos[0].notes
    assert not alone.receipt.audio
    token = subject.model.checkpoint.tokenizer.id("<|AUDIO|>")
    counts = [one.prompt_token_ids.count(token) for one in (heard, alone)]
    assert counts == [sound.tokens, 0]
    part = subject.model.answer(VideoInput(path, start=1.0, end=2.0), **how)
    assert 0 < part.receipt.audio_tokens < sound.tokens


@pytest.mark.parametrize(
    ("options", "said"),
    [((), "with its sound"), (("--no-sound",), "its sound is left out, as requested")],
)
def test_the_command_leaves_the_sound_out(
    subject: Subject,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    options: tuple[str, ...],
    said: str,
) -> None:
    path = tmp_path / "talk.mp4"
    path.write_bytes(with_sound(tones(1.0), 16_000, frames=8, fps=8, size=(62, 44)))
    model = ("-m", str(subject.audio.folder), "--device", "cpu", "--dtype", "fp32")
    threads = torch.get_num_threads()
    code = main(["describe", str(path), "-p", "What?", "--max-tokens", "1", *model, *options])
    gc.unfreeze()  # a command has a process of its own else
    ask_threads(None)
    torch.set_num_threads(threads)
    printed = "".join(capsys.readouterr())
    assert code == 0 and said in printed
    assert ("audio 1:" in printed) is not bool(options)


def test_orders() -> None:
    assert Chunks(50)([0.0, 25.0, 50.0, 75.0], 90) == [0, 1, (0, 50), 2, 3, (50, 90)]
    assert Chunks(50)([0.0, 120.0], 20) == [0, (0, 20), 1]
    assert ByTime()([0.0, 6.5, 13.0], 20) == [0, (0, 7), 1, (7, 13), 2, (13, 20)]
    assert ByTime()([0.0, 13.0, 26.0], 9) == [0, (0, 9), 1, 2]
