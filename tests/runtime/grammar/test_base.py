"""The compile cache: one compile a key, bounded in bytes, refusals remembered for a while. The keys: all that matters."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from typing import Any

import pytest

from phloem.runtime.errors import GrammarError
from phloem.runtime.grammar.base import AuditReport, CompileCache, Cursor, backend, cache_key, mask_mode
from phloem.runtime.grammar.vocabulary import Vocabulary
from phloem.runtime.request import GrammarSpec
from tests.runtime.grammar.oracle import toy_vocabulary


class Compiled:
    report = AuditReport(backend="x", version="1", mask_mode="canonical")

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes

    def cursor(self, tail: Sequence[int] = ()) -> Cursor:
        raise NotImplementedError


def put(cache: CompileCache, key: str, nbytes: int) -> Compiled:
    future, mine = cache.claim(key)
    assert mine
    made = Compiled(nbytes)
    cache.resolve(key, made)
    assert future.result(0) is made
    return made


def test_one_compile_a_key_however_many_wait() -> None:
    """C5."""
    cache, compiles, got = CompileCache(), [], []
    barrier = threading.Barrier(8)

    def ask() -> None:
        barrier.wait()
        future, mine = cache.claim("k")
        if mine:
            compiles.append(1)
            cache.resolve("k", Compiled(10))
        got.append(future.result(5))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(compiles) == 1 and len(set(map(id, got))) == 1
    assert (cache.hits, cache.misses, cache.nbytes) == (7, 1, 10)


def test_a_waiting_future_cannot_be_cancelled_by_one_of_those_who_wait() -> None:
    cache = CompileCache()
    future, _ = cache.claim("k")
    assert not future.cancel()
    cache.resolve("k", Compiled(1))
    assert future.result(0).nbytes == 1


def test_the_least_recently_used_go_first() -> None:
    cache = CompileCache(max_bytes=30)
    first = put(cache, "a", 10)
    put(cache, "b", 10)
    put(cache, "c", 10)
    assert cache.claim("a")[0].result(0) is first
    put(cache, "d", 10)
    assert not cache.claim("a")[1] and not cache.claim("c")[1] and not cache.claim("d")[1]
    assert cache.claim("b")[1]
    assert cache.nbytes == 30 and cache.evictions == 1


def test_a_grammar_larger_than_the_cache_is_handed_out_and_not_kept() -> None:
    cache = CompileCache(max_bytes=30)
    put(cache, "a", 31)
    assert cache.nbytes == 0 and len(cache) == 0


def test_a_compile_under_way_is_never_evicted() -> None:
    cache = CompileCache(max_bytes=10)
    waiting, mine = cache.claim("slow")
    put(cache, "a", 10)
    put(cache, "b", 10)
    assert mine and not cache.claim("slow")[1]
    cache.resolve("slow", Compiled(5))
    assert waiting.result(0).nbytes == 5


def test_refusals_are_kept_for_a_minute_and_other_failures_are_not() -> None:
    now = 0.0
    cache = CompileCache(clock=lambda: now)
    for error, kept in ((GrammarError("no"), True), (RuntimeError("a worker was killed"), False)):
        future, _ = cache.claim("k")
        cache.reject("k", error)
        with pytest.raises(type(error)):
            future.result(0)
        again, mine = cache.claim("k")
        assert mine is not kept
        if kept:
            with pytest.raises(GrammarError):
                again.result(0)
            now = 60.0
    assert cache.nbytes == 0


def test_bytes_add_up_through_random_use() -> None:
    rng, cache, sizes = random.Random(3), CompileCache(max_bytes=100), {}
    for _ in range(2000):
        key = str(rng.randrange(40))
        future, mine = cache.claim(key)
        if mine and rng.random() < 0.2:
            cache.reject(key, RuntimeError())
            assert isinstance(future.exception(0), RuntimeError)
        elif mine:
            sizes[key] = rng.randrange(1, 40)
            cache.resolve(key, Compiled(sizes[key]))
        assert cache.nbytes == sum(sizes[k] for k in cache._entries) <= 100


def spec(**changes: Any) -> GrammarSpec:
    given: dict[str, Any] = {"kind": "json_schema", "source": '{"a": 1, "b": 2}', **changes}
    return GrammarSpec(**given)


def test_keys_tell_apart_all_that_a_compiled_grammar_depends_on(toy: Vocabulary) -> None:
    """C5, in order: {"a", "b"} is not {"b", "a"}."""
    engines = ("xgrammar 0.2.9", "audit 1")
    keys = [cache_key(spec(), toy, engines)]
    for changes in (
        {"kind": "regex"}, {"source": '{"b": 2, "a": 1}'}, {"strict": False}, {"json_whitespace": "compact"}, {"jump_forward": "permissive"},
        {"open_end": True},
    ):  # fmt: skip
        keys.append(cache_key(spec(**changes), toy, engines))
    keys.append(cache_key(spec(), toy_vocabulary(width=400), engines))
    keys.append(cache_key(spec(), toy_vocabulary(missing=b"q"), engines))
    keys.append(cache_key(spec(), toy, ("xgrammar 0.2.10", "audit 1")))
    assert len(set(keys)) == len(keys)
    assert cache_key(spec(jump_forward="off", trusted=True), toy, engines) == keys[0]  # the same masks, the same grammar


def test_off_and_canonical_share_their_masks() -> None:
    """J3."""
    modes = [mask_mode(spec(jump_forward=j)) for j in ("canonical", "off", "permissive")]
    assert modes == ["canonical", "canonical", "permissive"]


def test_the_registry_makes_backends() -> None:
    made = backend("token_fsm")
    assert (made.name, made.version) == ("token_fsm", "1")
    with pytest.raises(KeyError):
        backend("outlines")
