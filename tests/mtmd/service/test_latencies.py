from __future__ import annotations

from mtmd.service.latencies import Histogram
from mtmd.service.service import Service


def test_a_value_on_a_bound_is_within_it():
    histogram = Histogram((0.1, 1.0))
    for seconds in (0.05, 0.1, 0.5, 2.0):
        histogram.add(seconds)
    histogram.add(0.25, 2)
    assert histogram.counts == [2, 5, 6] and round(histogram.total_s, 9) == 3.15


def test_each_answer_is_counted_once_and_each_token_after_its_first(demo):
    service = Service(demo)
    try:
        numbers = []
        for prompt in ("What colour?", "How many?"):
            ticket = service.submit([{"role": "user", "content": prompt}], max_tokens=12)
            *_, end = ticket
            numbers.append(len(end.answer.output_token_ids))
        result = service.latencies
        assert result.first_token.counts[-1] == result.queue.counts[-1] == 2
        assert result.between_tokens.counts[-1] == sum(numbers) - 2 > 0
        assert result.whole.total_s > result.first_token.total_s
        assert result.first_token.total_s > result.queue.total_s >= 0
        more = {"ignore_eos": True, "max_tokens": 1500}
        given_up = service.submit([{"role": "user", "content": "How many?"}], **more)
        given_up.cancel()
        assert [*given_up][-1].answer.receipt.finish == "cancelled"
        assert result.whole.counts[-1] == 2
    finally:
        service.close()
