"""InstructBLIP's encoder: settings that are refused, the text that it reads, what is computed again
for another question.
"""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import nmse
from common import picture
from instructblip import Instructed, instructblip
from tokenizers import Tokenizer
from torchvision_stand_in import torchvision_here
from videos import clip

from mtmd.base.errors import ModelError
from mtmd.checkpoint.hub import ALLOWED, IGNORED
from mtmd.checkpoint.open import open_checkpoint
from mtmd.clip.families.blip.instructblip import InstructBlipVision, read
from mtmd.clip.tasks import tasks_of
from mtmd.clip.video.video import Video, VideoFacts
from mtmd.inspect.info import model_info
from mtmd.inspect.info_text import render
from mtmd.kernels.checkpoint.settings import Settings
from mtmd.model import Model
from mtmd.options.load import LoadOptions
from mtmd.prompt.bridge import flat
from mtmd.prompt.prompts import PreparedPrompt

CONFIG: dict[str, Any] = {
    "vision_config": {},
    "qformer_config": {"vocab_size": 30523},
    "text_config": {"model_type": "llama", "hidden_size": 4096},
}
PICTURE = picture(0, 70, 50)
PROCESSOR = "transformers.models.instructblipvideo.video_processing_instructblipvideo"


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Instructed:
    return instructblip(tmp_path_factory.mktemp("instructblip") / "model")


@pytest.fixture(scope="module")
def model(oracle: Instructed) -> Model:
    return Model(open_checkpoint(oracle.folder), LoadOptions(device="cpu", dtype="fp32"))


def family(**qformer: Any) -> InstructBlipVision:
    config = CONFIG | {"qformer_config": CONFIG["qformer_config"] | qformer}
    image: dict[str, Any] = {"size": {"height": 224, "width": 224}}
    image["video_processor"] = {**image}
    return read(Settings(config, "config.json"), Settings(image, "preprocessor_config.json"))


def test_weights_of_the_qformer_are_in_what_is_reported(model: Model) -> None:
    info = model_info(model)
    weights = {g.graph: g.weight_bytes["cpu"] for g in info.graphs}
    assert weights["Q-Former"] > 0
    assert sum(weights.values()) == sum(row.memory_bytes for row in info.types)
    assert info.peak_bytes["cpu"] > sum(weights.values())
    assert "Q-Former, largest (" in render(info)


def test_published_sizes() -> None:
    """As in Salesforce/instructblip-vicuna-7b."""
    result = family()
    assert (result.instruction.rows, result.instruction.tokens) == (30523, 512)
    shapes = {name: one.shape for name, one in result.parameters().items()}
    assert shapes["mm.qformer.word_embd.weight"] == (30523, 768)
    assert shapes["mm.qformer.10.text.ffn_up.weight"] == (3072, 768)
    assert "mm.qformer.11.text.ffn_up.weight" not in shapes
    assert shapes["mm.fc.weight"] == (4096, 768)
    assert list(tasks_of(result)) == ["caption", "short-caption", "long-caption"]


@pytest.mark.parametrize(
    ("qformer", "reported"),
    [
        ({"vocab_size": 0}, "vocab_size is 0, expected an integer from 1"),
        ({"max_position_embeddings": 1 << 30}, "max_position_embeddings is 1073741824"),
        ({"num_hidden_layers": 1 << 30}, "num_hidden_layers is 1073741824"),
        ({"hidden_act": "relu"}, "hidden_act is 'relu'"),
    ],
)
def test_what_cannot_be_followed(qformer: dict[str, Any], reported: str) -> None:
    with pytest.raises(ModelError, match=reported):
        family(**qformer)


def test_a_tokenizer_of_another_model(tmp_path: Path) -> None:
    folder = instructblip(tmp_path / "model").folder
    path = folder / "qformer_tokenizer" / "tokenizer.json"
    inner = Tokenizer.from_file(str(path))
    inner.add_tokens(["another"])
    inner.save(str(path))
    with pytest.raises(
        ModelError, match=r"has \d+ tokens, and the encoder \d+; they belong to diff"
    ):
        open_checkpoint(folder)
    path.unlink()
    with pytest.raises(ModelError, match="qformer_tokenizer"):
        open_checkpoint(folder)


def test_the_tokenizer_is_fetched() -> None:
    from huggingface_hub.utils import filter_repo_objects

    files = ["qformer_tokenizer/tokenizer.json", "1_Pooling/config.json", "quality/a.json"]
    assert [*filter_repo_objects(files, allow_patterns=ALLOWED, ignore_patterns=IGNORED)] == (
        files[:2]
    )


def test_another_question_sees_another_picture(model: Model, oracle: Instructed) -> None:
    """Its features are encoded once; pages of a decoder are those of one question."""
    first = model.answer(PICTURE, "what do you see?", max_tokens=8)
    again = model.answer(PICTURE, "who is at left?", max_tokens=8)
    assert [one.receipt.images[0].cached for one in (first, again)] == [False, True]
    for answer, words in ((first, "what do you see?"), (again, "who is at left?")):
        inputs = oracle.put_together(words, [PICTURE])
        assert list(answer.output_token_ids) == oracle.greedy(inputs, 8)

    def seen(words: str) -> Any:
        parts = [{"type": "image", "image": PICTURE}, {"type": "text", "text": words}]
        return next(s for s in model.spans([{"role": "user", "content": parts}]) if not s.is_text)

    one, other, same = seen("a red circle"), seen("a blue circle"), seen("a red circle")
    assert one.content == same.content != other.content
    assert torch.equal(one.embeddings, same.embeddings)
    assert not torch.allclose(one.embeddings, other.embeddings, atol=1e-3)


def test_of_a_long_text_the_end_is_read(model: Model) -> None:
    words = "red " * 100 + "circle"
    parts = [{"type": "image", "image": PICTURE}, {"type": "text", "text": words}]
    prompt = model.prompts.prepare([{"role": "user", "content": parts}])
    read, tokenizer = prompt.pieces[0].instruction, model.checkpoint.instruction_tokenizer
    assert tokenizer is not None and len(read) == 40
    assert tokenizer.decode(read[-3:]) == "red circle" and read[0] == tokenizer.id("[CLS]")
    assert prompt.pieces[1].instruction == ()


def test_what_a_user_writes_is_no_control_token(model: Model) -> None:
    parts = [{"type": "image", "image": PICTURE}, {"type": "text", "text": "a [SEP] b"}]
    prompt = model.prompts.prepare([{"role": "user", "content": parts}])
    tokenizer = model.checkpoint.instruction_tokenizer
    assert tokenizer is not None
    assert prompt.pieces[0].instruction.count(tokenizer.id("[SEP]")) == 1


def test_weights_of_both_parts_are_counted(model: Model) -> None:
    weights = model.checkpoint.vision_weights
    assert weights is not None and model.encoder is not None
    size = sum(4 * torch.Size(shape).numel() for shape in weights.shapes.values())
    assert model.loaded.admission.needed.tower == {"cpu": size}


@pytest.mark.parametrize("of_videos", [False, True], ids=["instructblip", "instructblipvideo"])
def test_a_video_is_four_frames(tmp_path: Path, of_videos: bool) -> None:
    """Against transformers' model and processor of videos, which are loaded from either."""
    from transformers import InstructBlipVideoForConditionalGeneration as Reference

    oracle = instructblip(tmp_path / "model", video=of_videos)
    model = Model(open_checkpoint(oracle.folder), LoadOptions(device="cpu", dtype="fp32"))
    shown = clip(1, 4, 62, 45, every=8, fps=10.0)
    video = Video(shown.frames, shown.indices, shown.times, VideoFacts(32, 10.0, 3.2, 62, 45))
    bridge = model.prompts.bridge
    prepared = bridge.prepare_video(video)
    parts = [{"type": "text", "text": "what do you see?"}, {"type": "video"}]
    rendered = model.checkpoint.template.render([{"role": "user", "content": parts}])
    prompt = PreparedPrompt(bridge.read(rendered, [prepared]), flat([prepared]))
    spans = model.prompts.encode(prompt).spans
    with torchvision_here():
        videos = import_module(PROCESSOR).InstructBlipVideoVideoProcessor(
            **json.loads((oracle.folder / "preprocessor_config.json").read_text())
        )
        pixels = videos([np.stack(shown.frames)], return_tensors="pt")["pixel_values"]
    assert model.encoder is not None
    tiles = [model.encoder.pixels(one.plan.tiles[0]) for one in prepared.groups]
    np.testing.assert_array_equal(np.stack(tiles), pixels[0].numpy())
    inputs = oracle.put_together("what do you see?", [PICTURE] * 4)
    assert list(prompt.tokens) == oracle.prompt_ids(inputs)
    reference = oracle.model
    if not of_videos:
        config = oracle.model.config.to_dict() | {"model_type": "instructblipvideo"}
        reference = Reference(Reference.config_class(**config))
        reference.load_state_dict(oracle.model.state_dict())
    read = {key: value[:1] for key, value in inputs.items() if key.startswith("qformer")}
    with torch.no_grad():
        features = reference.eval().get_video_features(pixels, **read).pooler_output
    rows = torch.cat([span.embeddings for span in spans if not span.is_text])
    assert nmse(rows, features[0]) <= 1e-8
    assert model.encoder.family.video is not None
    facts = VideoFacts(100, 10.0, 10.0, 62, 45)
    taken = model.encoder.family.video.rule.choose(facts)
    assert (
        list(taken) == np.arange(0, 100, 100 / 4).astype(int).tolist()
    )  # as its model card has it
