"""How the work for one answer grows with its length, on its whole way from tokens to what a browser
reads: CPU seconds for 1,000 to 64,000 tokens, and the exponent of their growth.

    .venv/bin/python tests/hostile/growth.py

Times say little on a busy machine, so no test depends on them; what decides there is counted.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from fake_service import FakeService
from small_tokenizers import byte_level

from mtmd.display.grounding import find_regions
from mtmd.llm.tokenizer.text_stream import StopChecker
from mtmd.llm.tokenizer.tokenizer import Tokenizer
from mtmd.terminal.line_input import words_of
from mtmd.web.app import create_app
from mtmd.web.page.answers import Answer
from mtmd.web.settings import ServerSettings
from mtmd.web.store.search import around

LENGTHS = (1000, 4000, 16000, 64000)
REPEATS = 3


def tokens_to_text(count: int) -> None:
    tokenizer = Tokenizer(byte_level(), {})
    ids = (tokenizer.encode("a word or two of text, ") * count)[:count]
    stream, checker = tokenizer.stream(), StopChecker(["aaaaaaab", "\n\nUser:", "word or no"])
    for token in ids:
        checker.push(stream.push(token))
    checker.finish()


def sealing(count: int) -> None:
    inner = byte_level()
    inner.add_special_tokens([f"<unused{n}>" for n in range(1000)])
    Tokenizer(inner, {}).seal("<u" * count)


def api_stream(count: int) -> None:
    service = FakeService()
    service.words = "word " * count
    client = create_app(service, ServerSettings()).test_client()
    body = {"messages": [{"role": "user", "content": "go on"}]}
    body |= {"stream": True, "max_tokens": count + 1}
    result = client.post("/v1/chat/completions", json=body)
    assert result.get_data().count(b"data: ") > count


def page_events(count: int) -> None:
    """Read from the beginning, as by a page that was loaded again."""
    answer = Answer("a", "c", None)  # type: ignore[arg-type]
    for _ in range(count):
        answer.add({"type": "text", "text": "word ", "tokens": 1})
    _, events = answer.after(0, 0)
    assert len(events) == 1


WAYS: dict[str, Callable[[int], object]] = {
    "tokens to text, stop strings": tokens_to_text,
    "text sealed": sealing,
    "events to SSE": api_stream,
    "events read again by the page": page_events,
    "regions": lambda n: find_regions('<box>(1,2) {"bbox": [1,2,' * (n // 4)),
    "regions, blanks": lambda n: find_regions("<box>" + " " * 4 * n),
    "search, the words around": lambda n: around("word " * n, ["nowhere", "word"]),
    "words of a line": lambda n: words_of("word " * n),
}


def main() -> None:
    print(f"{'':32}" + "".join(f"{n:>10,}" for n in LENGTHS) + "  exponent")
    for name, way in WAYS.items():
        way(10)  # what is made once
        seconds = []
        for length in LENGTHS:
            spent = []
            for _ in range(REPEATS):
                start = time.process_time()
                way(length)
                spent.append(time.process_time() - start)
            seconds.append(min(spent))
        exponent = math.log(seconds[-1] / seconds[-2]) / math.log(LENGTHS[-1] / LENGTHS[-2])
        print(f"{name:32}" + "".join(f"{s:10.4f}" for s in seconds) + f"{exponent:10.2f}")


if __name__ == "__main__":
    main()
