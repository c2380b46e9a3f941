"""Log probabilities of a prompt's tokens, as transformers has them."""

from __future__ import annotations

from typing import Any

import checkpoints as make
import numpy as np
import pytest
import torch

from mtmd import Answer, Finished, OptionError, RawPrompt, Service, load

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
        first, *found = answer.prompt_logprobs
        assert (first.id, first.logprob, first.top) == (int(ids[0]), None, ())
        assert [token.id for token in found] == ids[1:].tolist()
        own = expected[:-1].gather(1, ids[1:, None])[:, 0].numpy()
        np.testing.assert_allclose([token.logprob for token in found], own, atol=1e-4)
        best = expected[:-1].topk(4).values.numpy()
        tops = [[p for _, p in token.top] for token in found]
        np.testing.assert_allclose(np.reshape(tops, best.shape), best, atol=1e-4)
        assert answer.asdict()["prompt_logprobs"][0]["logprob"] is None


def test_none_are_told_where_none_are_asked_for(both: tuple[Service, object]) -> None:
    assert answered(both[0], "a b", max_tokens=1, logprobs=1).prompt_logprobs == ()


def test_pictures_have_none() -> None:
    with Service(load(threads=1)) as service:
        red = np.zeros((32, 32, 3), np.uint8)
        say = [{"role": "user", "content": [{"type": "image", "image": red}]}]
        with pytest.raises(OptionError, match=r"^prompt_logprobs: found beside 1 pictures"):
            service.submit(say, prompt_logprobs=1)
