"""The cache of encoded pictures: what goes first, and that threads can share it."""

from __future__ import annotations

import threading
from dataclasses import replace

import numpy as np
import torch

from mtmd.clip.resolution.resolution import ImagePlan
from mtmd.clip.token_budget import DEFAULT_BUDGET, Budget
from mtmd.prompt.embedding_cache import EmbeddingCache, Key

PLAN = ImagePlan((np.zeros((3, 2, 2), np.float32),), ((2, 2),), 8)
BYTES = 32  # of torch.zeros(8)


def key(name: int) -> Key:
    return f"{name}", DEFAULT_BUDGET


def test_the_least_recently_used_go_first() -> None:
    cache = EmbeddingCache(lambda: 2 * BYTES)
    for name in (1, 2):
        cache.put(key(name), PLAN, torch.zeros(8))
    assert cache.get(key(1)) is not None  # and is now the newest
    cache.put(key(3), PLAN, torch.zeros(8))
    assert [cache.get(key(name)) is not None for name in (1, 2, 3)] == [True, False, True]


def test_the_last_stays_however_large_it_is() -> None:
    cache = EmbeddingCache(lambda: 0)
    for name in (1, 2):
        cache.put(key(name), PLAN, torch.zeros(8))
    assert cache.get(key(1)) is None and cache.get(key(2)) is not None


def test_so_many_stay_at_most_however_small_they_are() -> None:
    cache = EmbeddingCache(lambda: 20 * BYTES, maximum=2)
    for name in (1, 2, 3):
        cache.put(key(name), PLAN, torch.zeros(8))
    assert [cache.get(key(name)) is not None for name in (1, 2, 3)] == [False, True, True]
    assert cache.stored == 2 * BYTES


def test_a_plan_is_kept_without_its_tiles() -> None:
    cache, embeddings = EmbeddingCache(lambda: BYTES), torch.zeros(8)
    mixed = {"order": np.zeros((8, 4), np.int64), "weights": np.ones((8, 4), np.float32)}
    cache.put(key(1), replace(PLAN, **mixed), embeddings)
    entry = cache.get(key(1))
    assert entry is not None
    assert entry[0].order is None and entry[0].weights is None
    assert entry[0].tiles == () and entry[0].tokens == 8 and entry[1] is embeddings
    assert cache.get(("1", Budget(detail="low"))) is None, "another budget is another encoding"


def test_threads_share_it() -> None:
    cache = EmbeddingCache(lambda: 20 * BYTES)
    failures: list[Exception] = []

    def work(seed: int) -> None:
        try:
            for name in np.random.default_rng(seed).integers(0, 50, 2000):
                cache.put(key(name), PLAN, torch.zeros(8))
                cache.get(key(0))
        except Exception as error:  # RuntimeError: mutated during iteration
            failures.append(error)

    workers = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not failures


def test_what_it_holds_is_counted_as_it_comes_and_goes() -> None:
    cache, chance = EmbeddingCache(lambda: 20 * BYTES), np.random.default_rng(0)
    for name in chance.integers(0, 12, 300):
        cache.put(key(name), PLAN, torch.zeros(int(chance.integers(1, 60))))
        stored = sum(embeddings.nbytes for _, embeddings in cache._entries.values())
        assert cache.stored == stored and (stored <= 20 * BYTES or len(cache._entries) == 1)
