"""What Python's users find beside one question about one picture: many, awaited, held in a
conversation, typed, shown in a notebook.
"""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import io
import json
import pickle
import re
import typing
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import mtmd
from mtmd.base.errors import (
    DeviceError,
    ImageError,
    ModelError,
    MtmdError,
    OptionError,
    PromptError,
)
from mtmd.display import answer_view
from mtmd.display.answer_view import AnswerView, Shown
from mtmd.events import Answer, Box, Finished, TextPiece
from mtmd.model import Model, _of_item
from mtmd.options.answer import AnswerOptions
from mtmd.options.keywords import AnswerKeywords, LoadKeywords
from mtmd.options.load import LoadOptions
from mtmd.prompt import prompts
from mtmd.prompt.load_image import load_image

COUNT = "How many shapes are there?"
COUNTS = ["One.", "Two.", "Three.", "Four."]


@pytest.fixture
def pictures(world: dict[int, Path]) -> list[Path]:
    return [world[n] for n in (1, 2, 3, 4)]


# many


def test_many_are_answered_in_their_order(demo: Model, pictures: list[Path]) -> None:
    before = demo.service.stats().batches
    result = [a.text for a in demo.answers(pictures * 2, COUNT, max_tokens=8)]
    assert result == COUNTS * 2
    assert demo.service.stats().batches - before < 8 * 3, "they share batches"


def test_each_may_have_a_prompt_of_its_own_and_several_pictures(
    demo: Model, pictures: list[Path]
) -> None:
    result = list(demo.answers([pictures[0], None], [COUNT, "hello"], max_tokens=4))
    assert [len(a.receipt.images) for a in result] == [1, 0]
    (both,) = demo.answers([pictures[:2]], COUNT, max_tokens=2)
    assert len(both.receipt.images) == 2


def test_pictures_are_taken_as_they_are_needed(demo: Model, one: Path) -> None:
    taken: list[int] = []

    def endless() -> Iterator[Path]:
        while True:
            taken.append(1)
            yield one

    answers = demo.answers(endless(), COUNT, parallel=2)
    assert next(answers).text == "One."
    answers.close()  # type: ignore[attr-defined]
    assert len(taken) < 100
    assert demo.describe(one, COUNT) == "One.", "what was under way is given up"


def test_what_is_no_list_of_pictures_is_told(demo: Model, one: Path) -> None:
    for wrong in (3, str(one)):
        with pytest.raises(OptionError, match=f"images: found {type(wrong).__name__}, expected a"):
            demo.answers(wrong, COUNT)  # type: ignore[arg-type]
    with pytest.raises(
        OptionError, match=r"found dict, expected a list of .*list\(x\.values\(\)\)"
    ):
        demo.answers({"a": one}, COUNT)


def test_prompts_may_come_from_a_generator(demo: Model, pictures: list[Path]) -> None:
    prompts = [COUNT, "Describe the image."]
    result = [a.text for a in demo.answers(pictures[:2], (p for p in prompts), max_tokens=2)]
    assert result[0] == COUNTS[0] and len(result) == 2
    wrong: list[tuple[Any, str]] = [
        (prompts[:1], "found no more for image 2, expected a text for each"),
        ([*prompts, "more"], "found more than images, 2, expected one for each"),
        ([COUNT, 3], "found int for image 2, expected a text for each"),
    ]
    for given, reported in wrong:
        with pytest.raises(OptionError, match=reported):
            list(demo.answers(iter(pictures[:2]), iter(given), max_tokens=2, on_error="return"))
    with pytest.raises(OptionError, match="prompt: found int, expected a text for all images"):
        demo.answers(pictures, 3)  # type: ignore[call-overload]


def test_as_many_are_answered_at_once_as_the_model_was_loaded_for(one: Path) -> None:
    with mtmd.load(parallel=100) as model:
        assert [a.text for a in model.answers([one], COUNT)] == ["One."]


def test_an_error_ends_it_or_takes_the_answers_place(demo: Model, one: Path) -> None:
    with pytest.raises(ImageError, match=r"no\.png: found no such file"):
        list(demo.answers([one, "no.png"], COUNT))
    kinds = [type(a) for a in demo.answers([one, "no.png", one], COUNT, on_error="return")]
    assert kinds == [Answer, ImageError, Answer]


def test_an_error_that_ends_it_names_the_item(demo: Model, one: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty.png"
    empty.touch()
    long = "word " * 20_000
    cases: list[tuple[Any, str | None, type[MtmdError], str]] = [
        (Image.new("F", (4, 4)), None, ImageError, r"images\[2\]: found float pixels"),
        (np.zeros((4, 4), np.int32), None, ImageError, r"images\[2\]: found an array"),
        (empty, None, ImageError, rf"images\[2\]: {re.escape(str(empty))}: found 0 bytes"),
        ([one, b""], None, ImageError, r"images\[2\]: image 2: found 0 bytes"),
        (one, long, PromptError, rf"images\[2\] \({re.escape(str(one))}\): the prompt"),
        (Image.new("RGB", (4, 4)), long, PromptError, r"images\[2\]: the prompt"),
        ("data:image/png,", None, ImageError, r"images\[2\]: found a data URL that"),
    ]
    for wrong, prompt, kind, reported in cases:
        prompts = [COUNT, COUNT, prompt or COUNT]
        with pytest.raises(kind, match=rf"^{reported}") as error:
            list(demo.answers([one, one, wrong], prompts, max_tokens=2))
        assert error.value.__suppress_context__ and "\n" not in str(error.value)
        assert str(pickle.loads(pickle.dumps(error.value))) == str(error.value)
        *_, returned = demo.answers([one, one, wrong], prompts, max_tokens=2, on_error="return")
        assert isinstance(returned, kind) and "images[" not in str(returned)


def test_a_failed_device_is_no_items_fault() -> None:
    failed = DeviceError("the device hangs")
    assert _of_item(failed, 3, "a.png") is failed


def test_wrong_calls_of_answers_are_told_at_once(demo: Model, one: Path) -> None:
    calls: list[Any] = [
        ({"max_token": 3}, "did you mean 'max_tokens'"),
        ({"parallel": 0}, "parallel: found 0"),
        ({"on_error": "skip"}, "on_error: found 'skip'"),
        ({"prompt": ["a", "b"]}, "prompt: found 2 for 1 images"),
    ]
    for options, reported in calls:
        with pytest.raises(OptionError, match=reported):
            demo.answers([one], **options)
    with pytest.raises(OptionError, match="found str, expected a list of pictures"):
        demo.answers("one.png", COUNT)


def test_a_bar_shows_how_far_it_is(
    demo: Model, pictures: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    list(demo.answers(pictures, COUNT))
    assert capsys.readouterr().err == ""
    list(demo.answers(pictures, COUNT, progress=True))
    assert "4/4" in capsys.readouterr().err


# awaited


def test_any_number_may_be_awaited_together(demo: Model, pictures: list[Path]) -> None:
    async def all_of_them() -> list[Answer]:
        return await asyncio.gather(*(demo.aanswer(p, COUNT) for p in pictures * 25))

    assert [a.text for a in asyncio.run(all_of_them())] == COUNTS * 25


def test_events_come_to_the_loop(demo: Model, one: Path) -> None:
    async def read() -> list[Any]:
        messages = [{"role": "user", "content": [{"type": "image", "image": one}]}]
        return [event async for event in demo.astream(messages, max_tokens=6)]

    events = asyncio.run(read())
    texts = [e.text for e in events if isinstance(e, TextPiece)]
    assert isinstance(events[-1], Finished) and "".join(texts) == events[-1].answer.text


def test_awaiting_raises_what_answering_does(demo: Model) -> None:
    with pytest.raises(ImageError, match="found no such file"):
        asyncio.run(demo.aanswer("no.png"))
    with pytest.raises(OptionError, match="did you mean"):
        demo.astream([], max_token=3)  # type: ignore[call-arg]


def test_who_stops_awaiting_gives_the_request_up(demo: Model, one: Path) -> None:
    endless: dict[str, Any] = {"max_tokens": 1500, "ignore_eos": True}
    messages = [{"role": "user", "content": [{"type": "image", "image": one}]}]

    async def stop_early() -> None:
        async with aclosing(demo.astream(messages, **endless)) as events:
            async for event in events:
                if isinstance(event, TextPiece):
                    break

    async def cancel() -> None:
        tasks = [asyncio.create_task(demo.aanswer(one, **endless)) for _ in range(20)]
        await asyncio.sleep(0.05)
        for task in tasks:
            task.cancel()
        done = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(d, asyncio.CancelledError) for d in done)

    for stop in (stop_early, cancel, cancel):
        asyncio.run(stop())
        assert asyncio.run(demo.aanswer(one, COUNT)).text == "One.", "its place is free again"


# word by word


def test_what_is_answered_may_be_streamed(demo: Model, one: Path) -> None:
    """By the same arguments: a question, or a conversation."""
    messages = [
        {
            "role": "user",
            "content": [{"type": "image", "image": one}, {"type": "text", "text": COUNT}],
        }
    ]
    calls: list[dict[str, Any]] = [
        {"image": one, "prompt": COUNT},
        {"image": messages},
        {"messages": messages},
    ]
    for call in calls:
        *_, last = demo.stream(**call, max_tokens=8)
        assert isinstance(last, Finished)
        assert last.answer.text == demo.describe(**call, max_tokens=8) == "One."
        assert "<img" in last.answer._repr_html_()
    *_, last = demo.stream(np.asarray(Image.open(one)), COUNT)
    assert isinstance(last, Finished) and "<img" in last.answer._repr_html_()
    *_, last = demo.stream(prompt="hello", max_tokens=2)
    assert isinstance(last, Finished) and last.answer.receipt.images == ()


def test_what_is_awaited_may_be_streamed(demo: Model, one: Path) -> None:
    async def read() -> list[Any]:
        return [event async for event in demo.astream(one, COUNT)]

    assert asyncio.run(read())[-1].answer.text == "One."


@pytest.mark.parametrize(
    ("call", "reported"),
    [
        (
            {"messages": [{"role": "user", "content": "x"}], "prompt": "y"},
            "prompt: found with messages",
        ),
        (
            {"image": [{"role": "user", "content": "x"}], "prompt": "y"},
            "prompt: found with messages",
        ),
        ({"messages": "hello"}, "messages: found str, expected a list"),
        ({"messages": []}, "messages: found an empty list, expected a list of at least one"),
        ({}, "found neither picture nor prompt"),
    ],
    ids=["a prompt", "a prompt, by place", "a text", "no message", "nothing"],
)
def test_a_question_and_a_conversation_at_once(
    demo: Model, call: dict[str, Any], reported: str
) -> None:
    for ask in (demo.stream, demo.answer):
        with pytest.raises(PromptError, match=reported):
            ask(**call)


# text alone, system, leaving


def test_text_alone(demo: Model) -> None:
    answer = demo.answer(prompt="hello", max_tokens=3)
    assert answer.receipt.images == () and answer.receipt.output_tokens <= 3
    with pytest.raises(PromptError, match="found neither picture nor prompt"):
        demo.answer()


def test_a_picture_alone_is_described(demo: Model, one: Path) -> None:
    assert demo.describe(one) == demo.describe(one, "Describe the image.")


def test_what_the_model_is_told_before_all_else(demo: Model, one: Path) -> None:
    plain, reported = demo.answer(one, COUNT), demo.answer(one, COUNT, system="Be brief.")
    assert len(reported.prompt_token_ids) > len(plain.prompt_token_ids)
    messages = [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]
    with pytest.raises(PromptError, match="system: found with a message of role 'system'"):
        list(demo.stream(messages, system="c"))
    with pytest.raises(PromptError, match="system: found int"):
        demo.answer(one, system=3)  # type: ignore[arg-type]


def test_leaving_a_model_closes_it(one: Path) -> None:
    with mtmd.load(parallel=1) as model:
        service = model.service
        assert model.describe(one, COUNT) == "One."
    with pytest.raises(MtmdError, match="closed"):
        service.submit([{"role": "user", "content": "x"}])


def test_a_model_tells_what_it_is(demo: Model) -> None:
    assert repr(demo) == (
        f"<mtmd.Model 'demo model' on {demo.backends[0].name}, fp32, encoder: flash attention, "
        "decoder: flash attention, context 2048>"
    )


# pictures of every kind


def test_floats_and_tensors_are_the_same_picture(one: Path) -> None:
    with Image.open(one) as image:
        pixels = np.asarray(image.convert("RGB"))
    floats = pixels.astype(np.float32) / 255
    first = torch.from_numpy(pixels.copy()).permute(2, 0, 1)
    kinds: dict[str, Any] = {
        "fp32": floats,
        "fp64": pixels / 255,
        "fp16": floats.astype(np.float16),
        "tensor [C, H, W]": first,
        "tensor [H, W, C]": first.permute(1, 2, 0),
        "float tensor": first.float() / 255,
        "with a gradient": (first.float() / 255).requires_grad_(),
        "bf16": (first.float() / 255).bfloat16(),
    }
    exact = load_image(pixels).sha256
    for name, source in kinds.items():
        picture = load_image(source)
        off = int(np.abs(picture.pixels.astype(int) - pixels).max())
        assert off <= (1 if name == "bf16" else 0), name
        assert (picture.sha256 == exact) == (off == 0)
    grey = load_image(first[0].float() / 255).pixels
    assert np.array_equal(grey, np.repeat(pixels[:, :, :1], 3, axis=2))


@pytest.mark.parametrize(
    ("shape", "reported"),
    [
        ((2, 3, 4, 5), r"found a tensor of shape \[2, 3, 4, 5\].*those of a batch as a list"),
        ((2, 4, 5), r"found a tensor of shape \[2, 4, 5\], expected one picture \[C, H, W\]"),
        ((7,), r"found a tensor of shape \[7\]"),
    ],
)
def test_tensors_that_are_no_picture(shape: tuple[int, ...], reported: str) -> None:
    with pytest.raises(ImageError, match=reported):
        load_image(torch.zeros(shape))


# conversations


def test_a_conversation_goes_on(demo: Model, one: Path) -> None:
    chat = demo.chat(system="Be brief.", max_tokens=8)
    first = chat.ask(COUNT, image=one)
    assert first.text == "One."
    second = chat.ask("What colour is the shape?")
    assert second.receipt.reused_tokens > 0 and len(second.receipt.images) == 1
    assert [m["role"] for m in chat.messages] == ["system", *("user", "assistant") * 2]
    assert repr(chat) == "<mtmd.Chat with 'demo model', 2 questions>"
    chat.undo()
    assert chat.messages[-1]["content"] == "One."
    chat.clear()
    assert [m["role"] for m in chat.messages] == ["system"]
    with pytest.raises(PromptError, match="there is no question yet"):
        chat.undo()


def test_a_question_that_fails_leaves_no_trace(demo: Model, one: Path) -> None:
    chat = demo.chat()
    with pytest.raises(ImageError):
        chat.ask("?", image="no.png")
    events = chat.stream("Describe the image.", one)
    for event in events:
        if isinstance(event, TextPiece):
            break
    events.close()
    assert chat.messages == []
    with pytest.raises(OptionError, match="did you mean 'max_tokens'"):
        demo.chat(max_token=3)  # type: ignore[call-arg]


def test_a_conversation_may_be_awaited(demo: Model, one: Path) -> None:
    async def talk() -> tuple[str, list[str]]:
        chat = demo.chat()
        first = await chat.aask(COUNT, one)
        return first.text, [type(e).__name__ async for e in chat.astream("And now?")]

    text, kinds = asyncio.run(talk())
    assert text == "One." and kinds[-1] == "Finished"


def test_tools_are_answered_in_a_conversation(demo: Model, monkeypatch: Any, one: Path) -> None:
    receipt = demo.answer(one, COUNT).receipt
    call = mtmd.ToolCall("call-1", "weather", '{"city": "Oslo"}')
    answers = iter([Answer("", (), (), receipt, (call,)), Answer("Cold.", (), (), receipt)])
    seen: list[Any] = []
    monkeypatch.setattr(
        Model, "stream", lambda _, m, **__: seen.append(m) or iter([Finished(next(answers))])
    )
    chat = demo.chat()
    assert chat.ask("How is the weather?").tool_calls == (call,)
    with pytest.raises(PromptError, match=r"found 'other', expected one for each .*'call-1'"):
        chat.give({"other": "x"})
    assert chat.give({"call-1": "-3 degrees"}).text == "Cold."
    assert seen[-1][-1] == {"role": "tool", "tool_call_id": "call-1", "content": "-3 degrees"}
    assert seen[-1][-2]["tool_calls"][0]["function"]["name"] == "weather"


def test_a_conversation_is_saved_as_json_and_goes_on_from_it(
    demo: Model, pictures: list[Path], tmp_path: Path
) -> None:
    pixels = load_image(pictures[1]).pixels
    given: list[Any] = [
        pictures[0],
        str(pictures[1]),
        pictures[2].read_bytes(),
        Image.fromarray(pixels),
        pixels,
    ]
    chat = demo.chat(system="Be brief.", max_tokens=8)
    for image, count in zip(given, ["One.", "Two.", "Three.", "Two.", "Two."], strict=True):
        assert chat.ask(COUNT, image).text == count
        file = tmp_path / "chat.json"
        file.write_text(json.dumps(chat.messages))
        chat.undo()
        chat = demo.chat(messages=json.loads(file.read_text()), max_tokens=8)
        assert str(chat.ask(COUNT)) == str(demo.answer(messages=chat.messages[:-1], max_tokens=8))
        assert len(chat.messages) == 5
        shown = chat.messages[1]["content"][0]["image"]
        assert load_image(shown).sha256 == load_image(image).sha256
        is_file = isinstance(image, (str, Path, bytes))
        assert not is_file or base64.b64decode(shown.partition(",")[2]) == (
            image if isinstance(image, bytes) else Path(image).read_bytes()
        )
        chat.clear()


def test_messages_that_were_read_are_those_that_follow(demo: Model, pictures: list[Path]) -> None:
    chat = demo.chat(max_tokens=2)
    stored = chat.messages
    with Image.open(pictures[1]) as image:
        assert chat.ask(COUNT, image).text == "Two."
    assert stored is chat.messages and json.loads(json.dumps(stored)) == stored and len(stored) == 2
    assert stored[0]["content"][0]["image"].startswith("data:image/png;base64,")
    stored.append({"role": "user", "content": [{"type": "image", "image": pictures[0]}]})
    stored.append({"role": "assistant", "content": "One."})
    assert len(chat.ask("And now?").receipt.images) == 2
    json.dumps(chat.messages)
    chat.messages = stored[:2]
    assert len(chat.ask("And now?").receipt.images) == 1


def test_pictures_of_a_conversation_are_decoded_once(
    demo: Model, pictures: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    chat = demo.chat(max_tokens=2)
    for image in (pictures[0], Image.open(pictures[1]), pictures[2].read_bytes()):
        chat.ask(COUNT, image)
    saved = json.dumps(chat.messages)
    monkeypatch.setattr(prompts, "load_image", lambda *_, **__: pytest.fail("once more"))
    chat.ask(COUNT)
    assert 'src="data:image/jpeg;base64,' in chat._repr_html_()
    monkeypatch.undo()
    again = demo.chat(messages=json.loads(saved), max_tokens=2)
    again.ask(COUNT)
    monkeypatch.setattr(prompts, "load_image", lambda *_, **__: pytest.fail("once more"))
    again.ask(COUNT)
    again.clear()
    again.ask("hello")
    assert not again._pictures, "those of questions taken back are let go"


@pytest.mark.parametrize("wrong", [{"format": "mtmd chat"}, "hello"], ids=["a mapping", "a text"])
def test_what_is_no_conversation_does_not_go_on(demo: Model, wrong: Any) -> None:
    with pytest.raises(PromptError, match=f"messages: found {type(wrong).__name__}, expected a"):
        demo.chat(messages=wrong)
    for part in ({"content": "hello"}, "hello"):
        with pytest.raises(
            PromptError, match=r"message 2: found .*, expected a mapping with 'role'"
        ):
            demo.chat(messages=[{"role": "user", "content": "hi"}, part])  # type: ignore[list-item]
    with pytest.raises(PromptError, match="found with a message of role 'system'"):
        demo.chat(system="a", messages=[{"role": "system", "content": "b"}])


def test_none_for_a_question_leaves_what_the_chat_has(demo: Model, pictures: list[Path]) -> None:
    schema = {"type": "object"}
    chat = demo.chat(max_tokens=1, json_schema=schema)
    requested = chat._with({"max_tokens": None, "stop": None, "json_schema": None})
    assert requested == {"sampling": "model", "max_tokens": 1, "json_schema": None}
    answer = chat.ask(COUNT, pictures[0], max_tokens=None, temperature=None, json_schema=None)
    assert answer.text == "One" and answer.receipt.output_tokens == 1


# notebooks


def test_an_answer_shows_its_picture_text_and_receipt(demo: Model, one: Path) -> None:
    for source in (one, one.read_bytes(), np.asarray(Image.open(one).convert("RGB"))):
        answer = demo.answer(source, COUNT)
        html = answer._repr_html_()
        data = re.search(r'src="data:image/jpeg;base64,([^"]+)"', html)
        assert data and "One." in html and "demo model on " in html
        with Image.open(io.BytesIO(base64.b64decode(data[1]))) as shown, Image.open(one) as own:
            assert shown.size == own.size
    assert str(answer) == "One." and "view" not in repr(answer)


def test_a_small_picture_is_made_when_an_answer_is_shown(
    demo: Model, one: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []

    def counted(pixels: Any, edge: int) -> bytes:
        made.append(edge)
        return answer_view_preview(pixels, edge)

    answer_view_preview = answer_view.preview
    monkeypatch.setattr(answer_view, "preview", counted)
    with Image.open(one) as image:
        picture = image.convert("RGB")
    answer = demo.answer(picture, COUNT)
    assert not made and "data:image/jpeg" in answer._repr_html_() and len(made) == 1
    (several,) = demo.answers([picture], COUNT)
    assert len(made) == 2, "a list of answers does not keep the pixels of all its pictures"
    assert "data:image/jpeg" in several._repr_html_()
    assert len(made) == 2


def test_boxes_lie_where_the_answer_says(demo: Model, one: Path) -> None:
    receipt = demo.answer(one, COUNT).receipt
    view = AnswerView((Shown(str(one)),))
    text = '[{"bbox_2d": [100, 250, 500, 750], "label": "<b>star</b>"}]'
    html = Answer(text, (), (), receipt, view=view)._repr_html_()
    assert '<rect x="10.00" y="25.00" width="40.00" height="50.00"' in html
    assert "&lt;b&gt;star&lt;/b&gt;" in html and "<b>" not in html


def test_boxes_are_told_in_pixels_of_the_picture(demo: Model, one: Path) -> None:
    with Image.open(one) as image:
        width, height = image.size
    wide = Image.new("RGB", (2 * width, height))
    answer = demo.answer(wide, COUNT)
    text = '{"box_2d": [100, 250, 500, 750], "label": "star"} {"point_2d": [1, 2]}'
    made = dataclasses.replace(answer, text=text)
    assert made.boxes == (Box("star", 0.5 * width, 0.1 * height, 1.5 * width, 0.5 * height),)
    assert answer.boxes == ()
    both = dataclasses.replace(demo.answer([one, wide], COUNT), text=text)
    assert both.boxes == (), "none says of which"


def test_an_answer_in_json_types_has_its_boxes_and_what_stopped_it(demo: Model, one: Path) -> None:
    text = '{"box_2d": [100, 250, 500, 750], "label": "star"}'
    answer = dataclasses.replace(demo.answer(one, COUNT), text=text)
    reported = json.loads(json.dumps(answer.asdict()))
    assert (
        reported["boxes"]
        and reported["boxes"] == [dataclasses.asdict(box) for box in answer.boxes]
        and "stop" not in reported
    )
    reported = demo.answer(one, COUNT, stop=["."]).asdict()
    assert reported["stop"] == "." and "boxes" not in reported


def test_an_answer_is_a_value(demo: Model, one: Path) -> None:
    answer = demo.answer(one, COUNT)
    assert f"{answer:>6}" == "  One." and "logprobs" not in answer.asdict()
    made = pickle.loads(pickle.dumps(answer))
    assert made == answer and made._repr_html_() == answer._repr_html_()
    for holder in (demo, demo.chat()):
        with pytest.raises(TypeError, match=r"cannot be pickled or copied, .* in each process"):
            pickle.dumps(holder)


def test_what_holds_pixels_and_requests_says_so_in_few_words(demo: Model, one: Path) -> None:
    assert len(repr(demo.load_picture(one))) < 200
    with mtmd.Service(demo) as service:
        assert repr(service) == "<mtmd.Service of 'demo model': 0 running, 0 waiting>"
    with pytest.raises(MtmdError, match="the service is closed"):
        service.submit([{"role": "user", "content": COUNT}])
    with pytest.raises(ModelError, match="the demo model writes answers"):
        mtmd.load_embedder("demo")


def test_probabilities_are_in_the_answer(demo: Model, one: Path) -> None:
    alone = demo.answer(one, COUNT, logprobs=True)
    assert len(alone.logprobs) == len(alone.output_token_ids)
    assert {len(token.top) for token in alone.logprobs} == {0}
    assert not demo.answer(one, COUNT, logprobs=False).logprobs
    answer = demo.answer(one, COUNT, logprobs=2)
    assert tuple(token.id for token in answer.logprobs) == answer.output_token_ids
    assert "".join(token.text for token in answer.logprobs) == "One."
    first = answer.logprobs[0]
    assert first.top[0] == (first.text, first.logprob) and len(first.top) == 2
    reported = json.loads(json.dumps(answer.asdict()))["logprobs"][0]
    assert reported["logprob"] == first.logprob and reported["top"][1]["text"] == first.top[1][0]


def test_a_picture_that_is_gone_is_said_to_be(demo: Model, tmp_path: Path, one: Path) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(one.read_bytes())
    answer = demo.answer(path, COUNT)
    Image.new("RGB", (4, 4)).save(path)
    assert "not what was asked about any more" in answer._repr_html_()
    path.unlink()
    assert "found no such file" in answer._repr_html_()


def test_a_conversation_is_shown(demo: Model, one: Path) -> None:
    chat = demo.chat(max_tokens=4)
    chat.ask("<i>?", image=one)
    html = chat._repr_html_()
    assert "&lt;i&gt;?" in html and "<i>" not in html and html.count("<img") == 1


# types


@pytest.mark.parametrize(
    ("keywords", "options"), [(LoadKeywords, LoadOptions), (AnswerKeywords, AnswerOptions)]
)
def test_the_types_name_every_option(keywords: Any, options: Any) -> None:
    assert set(typing.get_type_hints(keywords)) == {f.name for f in dataclasses.fields(options)}


def test_settings_that_are_none_are_passed_through(pictures: list[Path]) -> None:
    load = dict.fromkeys(typing.get_type_hints(LoadKeywords))
    none = dict.fromkeys(typing.get_type_hints(AnswerKeywords))
    with mtmd.load(**load) as model:  # type: ignore[arg-type]
        assert model.options == LoadOptions()
        assert model.describe(pictures[0], COUNT, **none) == "One."  # type: ignore[arg-type]
        assert mtmd.describe(pictures[0], COUNT, model=model, **load, **none) == "One."  # type: ignore[arg-type]
        result = model.answers(pictures[:1], COUNT, prepare_ahead=None, parallel=None, **none)  # type: ignore[call-overload]
        assert [str(answer) for answer in result] == ["One."]


def test_the_calls_take_them_by_name() -> None:
    """tests/typing/script.py, which `make lint` reads, shows what mypy makes of it."""
    for call in ("describe", "answer", "answers", "stream", "aanswer", "astream", "chat"):
        assert getattr(Model, call).__annotations__["chosen"] == "Unpack[AnswerKeywords]"
    assert mtmd.load.__annotations__["chosen"] == "Unpack[LoadKeywords]"
    assert mtmd.describe.__annotations__["chosen"] == "Unpack[DescribeKeywords]"
    assert (Path(mtmd.__file__).parent / "py.typed").exists()


def test_a_closed_model_says_so(one: Path) -> None:
    with mtmd.load() as model:
        assert model.answer(one, COUNT).finish_reason == "stop"
    for ask in (model.answer, model.describe):
        with pytest.raises(ModelError, match="demo model was closed; load it again"):
            ask(one, COUNT)


def test_the_text_alone_as_it_comes(demo: Model, one: Path) -> None:
    pieces = list(demo.stream_text(one, COUNT))
    assert len(pieces) > 1 and "".join(pieces) == "One."
    assert "".join(demo.stream_text([{"role": "user", "content": "hi"}])) == demo.describe(
        messages=[{"role": "user", "content": "hi"}]
    )
    with pytest.raises(OptionError, match="did you mean 'max_tokens'"):
        demo.stream_text(one, COUNT, max_new_tokens=3)  # type: ignore[call-arg]


def test_a_text_is_continued_as_it_is(demo: Model) -> None:
    tokens = demo.checkpoint.tokenizer.encode_prompt("a red circle")
    by_text = demo.complete("a red circle", max_tokens=6)
    assert list(by_text.prompt_token_ids) == tokens and by_text.output_token_ids
    assert demo.complete(tokens, max_tokens=6).output_token_ids == by_text.output_token_ids
    for wrong, reported in (
        ("", "the prompt is empty"),
        (["a"], "a text or a list of ids"),
        ([-1], "-1"),
    ):
        with pytest.raises(PromptError, match=reported):
            demo.complete(wrong, max_tokens=6)  # type: ignore[arg-type]
