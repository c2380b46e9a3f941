"""A process that writes conversations, deletes some, and is ended by kill -9 at any moment, again and
again on one data folder: what it acknowledged is there afterwards, and what it acknowledged as
deleted is in no file.

    python tests/hostile/store_kills.py --kills 50 --seed 1
"""

from __future__ import annotations

import argparse
import hashlib
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from mtmd.web.store.check import check
from mtmd.web.store.store import Store

OWNER = "me"
WRITER = """
import sys
from pathlib import Path
from mtmd.web.store.store import Store
store = Store(Path(sys.argv[1]))

def picture(*parts):
    return b"\\x89PNG\\r\\n\\x1a\\n" + f"{' '.join(map(str, parts))} ".encode() * 400

def say(*words):
    print(*words, sep="|", flush=True)

conversation = store.create("me").id
parent = None
for number in range(100_000):
    image = store.put_image(picture(sys.argv[2], number), 1, 1)
    parent = store.add(conversation, parent, "user", f"said {sys.argv[2]} {number}", images=[image]).id
    say("message", conversation, parent, image.sha256)
    answer = store.add(conversation, parent, "assistant", "", state="running").id
    store.save_text(answer, f"partly {number}")
    say("partly", conversation, answer, f"partly {number}")
    store.finish(answer, f"whole {number}", "complete")
    say("whole", conversation, answer, f"whole {number}")
    parent = answer
    if number % 3 == 1:
        sign = f"gone-{sys.argv[2]}-{number};"
        other = store.create("me", sign).id
        store.add(other, None, "user", sign * 20, images=[store.put_image(picture(sign), 1, 1)])
        say("deleting", other, sign)
        store.delete(other)
        say("deleted", other, sign)
"""


def run(folder: Path, kills: int, seed: int) -> Counter[str]:
    """How much was acknowledged, by kind. Raises AssertionError for the first thing that is lost,
    or still there.
    """
    chance, counts = random.Random(seed), Counter[str]()
    messages, answers, deleted = {}, {}, {}
    for turn in range(kills):
        process = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(folder), str(turn)],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout
        requested = chance.randrange(1, 40)
        lines = [process.stdout.readline() for _ in range(requested)]
        time.sleep(chance.random() * 0.01)
        process.kill()
        lines += process.stdout.readlines()  # acknowledged all the same
        process.wait()
        process.stdout.close()
        whole = [line for line in lines if line.endswith("\n")]
        assert len(whole) >= requested, "the writer ended by itself"
        for line in whole:
            kind, conversation, *rest = line.rstrip("\n").split("|")
            if kind == "message":
                messages[rest[0]] = conversation, rest[1]
            elif kind in ("partly", "whole"):
                answers[rest[0]] = rest[1]
            elif kind == "deleted":
                deleted[conversation] = rest[0]
        _look(folder, messages, answers, deleted)
    counts.update(messages=len(messages), answers=len(answers), deleted=len(deleted), kills=kills)
    return counts


def _look(
    folder: Path,
    messages: dict[str, tuple[str, str]],
    answers: dict[str, str],
    deleted: dict[str, str],
) -> None:
    store = Store(folder)
    result = {m.id: m for c in store.conversations(OWNER) for m in store.messages(c.id)}
    for id_, (conversation, sha256) in messages.items():
        assert result[id_].conversation == conversation and result[id_].images[0].sha256 == sha256
        assert hashlib.sha256(store.image_bytes(sha256) or b"").hexdigest() == sha256
    for id_, text in answers.items():
        assert result[id_].text in (text, text.replace("partly", "whole"))
    assert store.search(OWNER, "said")
    assert not {c.id for c in store.conversations(OWNER)} & set(deleted)
    store.close()
    assert (problems := check(folder).problems) == (), problems
    content = b"".join(p.read_bytes() for p in folder.rglob("*") if p.is_file())
    for sign in deleted.values():
        assert sign.encode() not in content, sign


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        print(dict(run(Path(name), options.kills, options.seed)))
