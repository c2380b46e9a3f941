"""Log probabilities of a prompt's tokens, as transformers has them."""

from __future__ import annotations

import json
import pickle
import threading
from collections import Counter
from typing import Any

import checkpoints as make
import numpy as np
import pytest
import torch

from mtmd import Answer, Finished, OptionError, RawPrompt, Service, gather, load
from mtmd.engine_process.codec import decode, encode
from mtmd.llm.engine import engine
from mtmd.prompt_logprobs import PROMPT_LOGPROBS_MAX

TEXT = "What is on the table? a red apple and two green pears " * 8


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[Service, object]:
    folder = tmp_path_factory.mktemp("gemma3")
    reference = make.gemma3_text(folder)
    return Service(load(folder, threads=1, dtype="fp32")), reference


def answered(service: Service, text: str, **chosen: Any) -> Answer:
    *_, end = service.submit(RawPrompt(text), **chosen)
    assert isinstance(end, Finished)
    return end.answer


def test_they_are_transformers(both: tuple[Service, object]) -> None:
    service, reference = both
    for text in (TEXT, TEXT[:40], "a"):
        answer = answered(service, text, max_tokens=0, prompt_logprobs=4)
        ids = torch.tensor(answer.prompt_token_ids)
        with torch.inference_mode():
            expected = reference(ids[None]).logits[0].float().log_softmax(1)  # type: ignore[operator]
        first, *actual = answer.prompt_logprobs
        assert (first.id, first.logprob, first.top) == (int(ids[0]), None, ())
        assert [token.id for token in actual] == ids[1:].tolist()
        own = expected[:-1].gather(1, ids[1:, None])[:, 0].numpy()
        np.testing.assert_allclose([token.logprob for token in actual], own, atol=1e-4)
        ranks = (expected[:-1] > expected[:-1].gather(1, ids[1:, None])).sum(1) + 1
        assert [token.rank for token in actual] == ranks.tolist()
        best = expected[:-1].topk(4).values.numpy()
        tops = [[p for _, p in token.top] for token in actual]
        np.testing.assert_allclose(np.reshape(tops, best.shape), best, atol=1e-4)
        for token, row in zip(actual, expected, strict=False):
            near = row[list(token.top_ids)].numpy()
            np.testing.assert_allclose([p for _, p in token.top], near, atol=1e-4)
            assert [service.spelling_of([i]) for i in token.top_ids] == [t for t, _ in token.top]
        assert answer.asdict()["prompt_logprobs"][0]["logprob"] is None
        assert pickle.loads(pickle.dumps(answer)) == answer


def test_none_are_told_where_none_are_asked_for(both: tuple[Service, object]) -> None:
    assert answered(both[0], "a b", max_tokens=1, logprobs=1).prompt_logprobs == ()


def test_pictures_have_none() -> None:
    with Service(load(threads=1)) as service:
        red = np.zeros((32, 32, 3), np.uint8)
        say = [{"role": "user", "content": [{"type": "image", "image": red}]}]
        with pytest.raises(OptionError, match=r"^prompt_logprobs: found with 1 pictures"):
            service.submit(say, prompt_logprobs=1)


def several(service: Service, number: int, **chosen: Any) -> list[Answer]:
    tickets = service.submit_several(RawPrompt(TEXT), number, **chosen)
    result = {i: event.answer for i, event in gather(tickets) if isinstance(event, Finished)}
    return [result[i] for i in range(number)]


@pytest.mark.parametrize("max_tokens", [0, 1, 3])
def test_answers_to_one_prompt_share_them(
    both: tuple[Service, object], monkeypatch: pytest.MonkeyPatch, max_tokens: int
) -> None:
    """It is scored once, the other answers take what was read, and each id is spelled once, on a
    thread that is not the device's.
    """
    service, _ = both
    scored, spelled = list[int](), Counter[int]()
    score, tokenizer = engine.score, service._loaded.checkpoint.tokenizer
    decode, device = tokenizer.decode, service._device.thread

    def count(sequence: Any, prompt: Any, logits: torch.Tensor) -> None:
        scored.append(len(logits))
        score(sequence, prompt, logits)

    def spell(ids: list[int], skip_special: bool = True) -> str:
        assert threading.current_thread().name == "mtmd spelling", device
        spelled.update(ids)
        return decode(ids, skip_special)

    monkeypatch.setattr(engine, "score", count)
    monkeypatch.setattr(tokenizer, "decode", spell)
    answers = several(service, 6, max_tokens=max_tokens, prompt_logprobs=3)
    first, *others = answers
    assert sum(scored) <= len(first.prompt_token_ids)
    assert not first.receipt.reused_tokens and all(a.receipt.reused_tokens for a in others)
    assert all(a.prompt_logprobs is first.prompt_logprobs for a in others)
    assert len(first.prompt_logprobs) == len(first.prompt_token_ids)
    assert spelled and set(spelled.values()) == {1}


def test_the_next_answer_scores_a_prompt_whose_first_is_given_up(
    both: tuple[Service, object],
) -> None:
    service, _ = both
    expected = several(service, 1, max_tokens=1, prompt_logprobs=2)[0].prompt_logprobs
    tickets = service.submit_several(RawPrompt(TEXT), 4, max_tokens=1, prompt_logprobs=2)
    tickets[0].cancel()
    for ticket in tickets[1:]:
        *_, end = ticket
        assert isinstance(end, Finished)
        actual = end.answer.prompt_logprobs
        assert [t.id for t in actual] == [t.id for t in expected]
        np.testing.assert_allclose(
            [t.logprob for t in actual[1:]], [t.logprob for t in expected[1:]], atol=1e-4
        )


def test_too_many_are_refused_before_anything_is_read(both: tuple[Service, object]) -> None:
    service, _ = both
    tokens, before = len(service.tokens_of(TEXT, around=True)), service.stats().requests
    number = PROMPT_LOGPROBS_MAX // (21 * tokens) + 1
    with pytest.raises(OptionError, match=rf"^prompt_logprobs: found {tokens} prompt tokens x 21"):
        service.submit_several(RawPrompt(TEXT), number, prompt_logprobs=20)
    assert service.stats().requests == before


def test_they_go_to_another_process(both: tuple[Service, object]) -> None:
    answer = answered(both[0], TEXT, max_tokens=1, prompt_logprobs=2)
    parts: list[memoryview] = []
    written = json.loads(json.dumps(encode(answer, parts)))
    result = decode(written, [bytearray(part) for part in parts])
    assert result.prompt_logprobs == answer.prompt_logprobs and len(result.prompt_logprobs) > 1
    assert len(json.dumps(written)) < 40 * len(answer.prompt_token_ids) + 10_000
