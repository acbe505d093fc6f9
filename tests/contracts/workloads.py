"""Random workloads for the engine, and the reference: each request generated alone, token by token, without a cache.

A workload draws an engine (page size, pool, budget, overlap, policy), requests over a few shared stems, and a life for them:
bursts, aborts, failed forwards, changes of weights, holds. What must come out is what each request gives alone.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

from phloem.runtime.engine.core import CoreSettings, EngineCore
from phloem.runtime.request import GrammarSpec, OutputDelta, Request, SamplingParams, TokenLogprob
from phloem.runtime.scheduler.sequence import Sequence
from phloem.runtime.step import Row, SampleRow
from tests.fakes import (
    History,
    PatternCursor,
    PatternGrammars,
    ScriptedExecutor,
    draw_token,
    hashed_logits,
    model_logprob,
    random_pattern,
    token_logprob,
)

EOS, VOCAB = 0, 7  # a tiny vocabulary makes prefixes collide in the middle of pages


@dataclass
class Alone:
    """What a request gives without an engine. forced: how many of the tokens were forced."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    finish: str = ""
    forced: int = 0


def alone(
    request: Request, seed: int, versions: list[int], patterns: dict[str, list[int | frozenset[int]]], max_tokens: int
) -> Alone:
    """The request by itself. Token i is drawn under versions[i], the spans that the engine reported."""
    device, out, s = ScriptedExecutor(1, 1, VOCAB), Alone(), request.sampling
    cursor = PatternCursor(patterns[request.grammar.source]) if request.grammar else None
    if s.prompt_logprobs is not None:
        history = device.root((request.namespace, versions[0] if versions else 0))
        for p, t in enumerate(request.token_ids):
            if p >= max(1, s.prompt_logprobs):
                out.prompt_logprobs.append(model_logprob(hashed_logits(history, VOCAB), t, s.top_logprobs))
            history = history.then(t)
    while not out.finish:
        i = len(out.tokens)
        if i == max_tokens:
            out.finish = "length"
            return out
        history = device.root((request.namespace, versions[min(i, len(versions) - 1)] if versions else 0))
        for t in [*request.token_ids, *out.tokens]:
            history = history.then(t)
        logits = hashed_logits(history, VOCAB)
        block = [*([] if s.ignore_eos else [EOS]), *s.stop_token_ids] if i < s.min_tokens and cursor is None else []
        legal = set(range(VOCAB)) - set(block)
        if cursor is not None and cursor.done:  # J8
            legal = {EOS}
            out.forced += 1
        elif cursor is not None:
            out.forced += bool(cursor.forced())
            legal = {t for t in range(VOCAB) if t in cursor._legal()}
        token = draw_token(logits, SampleRow(0, "", 0, i, seed, request.sample, s, (), 0), legal.__contains__)
        assert token is not None
        out.tokens.append(token)
        logprob = token_logprob(logits, token, s, legal.__contains__)
        out.logprobs += [logprob] if logprob is not None else []
        if cursor is not None:
            if cursor.done:
                out.finish = "grammar"
            else:
                assert cursor.accept(token)
                if cursor.done and (len(out.tokens) == max_tokens or token == EOS):
                    out.finish = "grammar"
        elif token == EOS and not s.ignore_eos:
            out.finish = "eos"
        elif token in s.stop_token_ids:
            out.finish = "stop_token"
    return out


@dataclass
class Result:
    """What the deltas said of one request."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    last: OutputDelta | None = None


@dataclass
class Shape:
    """The engine and the life of one workload."""

    settings: CoreSettings
    calm: bool
    holding: bool
    sequential: bool
    jump: bool
    size: str


def random_requests(
    rng: random.Random, count: int, patterns: dict[str, list[int | frozenset[int]]], jump: bool
) -> list[Request]:
    """Bursts over a few shared stems, cut anywhere: hits end in the middle of pages, on boundaries, and at whole prompts."""
    stems = [tuple(rng.randrange(1, VOCAB) for _ in range(rng.choice((8, 16, 33)))) for _ in range(rng.randrange(1, 4))]
    requests = list[Request]()
    while len(requests) < count:
        stem = rng.choice(stems)
        prompt = stem[: rng.choice((len(stem), len(stem), rng.randrange(1, len(stem) + 1)))]
        prompt += tuple(rng.randrange(1, VOCAB) for _ in range(rng.choice((0, 0, 1, 2, 5, 9))))
        name = f"p{len(requests)}"
        grammar = None
        if rng.random() < 0.35:
            patterns[name] = random_pattern(rng, VOCAB)
            grammar = GrammarSpec(kind="regex", source=name, jump_forward="canonical" if jump else "off")
        n = rng.choice((1, 1, 1, 2, 4))
        max_tokens = rng.randrange(1, 24) if rng.random() < 0.95 else 0
        logprobs = rng.choice(("model", "sampled", "both")) if rng.random() < 0.25 else None
        sampling = SamplingParams(
            max_tokens=max_tokens,
            temperature=rng.choice((0.0, 1.0, 1.0)),
            seed=rng.randrange(4) if rng.random() < 0.8 else None,
            min_tokens=rng.choice((0, 0, 0, min(3, max_tokens))),
            ignore_eos=rng.random() < 0.1,
            stop_token_ids=(rng.randrange(1, VOCAB),) if rng.random() < 0.1 and grammar is None else (),
            logprobs=logprobs,
            top_logprobs=rng.choice((0, 2)) if logprobs else 0,
            prompt_logprobs=rng.choice((0, rng.randrange(len(prompt)))) if rng.random() < 0.15 else None,
        )
        priority, hold = rng.randrange(3), rng.random() < 0.05
        namespace, group = ("other" if rng.random() < 0.1 else ""), (f"g{len(requests)}" if n > 1 else None)
        for sample in range(n):
            requests.append(
                Request(
                    id=f"r{len(requests)}",
                    token_ids=prompt,
                    sampling=sampling,
                    grammar=grammar,
                    namespace=namespace,
                    group=group,
                    sample=sample,
                    priority=priority,
                    hold=hold,
                )
            )
    return requests


def random_shape(rng: random.Random, requests: list[Request], jump: bool) -> Shape:
    page_size = rng.choice((1, 2, 4, 16))
    max_running = rng.choice((1, 2, 4, 8))
    needs = [-(-(len(r.token_ids) + (r.sampling.max_tokens or 0) - 1) // page_size) for r in requests]
    size = rng.choice(("tiny", "tight", "large", "large"))
    num_pages = {
        "tiny": max(1, max(needs) - rng.choice((0, 0, 1))),
        "tight": max(needs) + rng.randrange(1, 6),
        "large": 4 * sum(needs) + 64,
    }[size]
    settings = CoreSettings(
        page_size=page_size,
        num_pages=num_pages,
        max_context=10_000,
        vocab_size=VOCAB,
        width=VOCAB,
        max_running=max_running,
        max_step_tokens=rng.choice((1, 3, max_running, max_running + 11, 48)),
        policy=rng.choice(("prefix", "prefix", "prefix", "fcfs", "priority")),
        max_wait=rng.choice((0, 50, 10**9)),
        overlap=rng.random() < 0.6,
        cache_enabled=rng.random() < 0.9,
        eos_ids=frozenset((EOS,)),
        seed=1,
        hold_share=1.0,
    )
    calm = rng.random() < 0.4  # no aborts, commits or failures: computed tokens can be counted
    return Shape(settings, calm, not calm and rng.random() < 0.3, calm and rng.random() < 0.3, jump, size)


class Workload:
    """One random workload. `run` raises AssertionError on any difference from the reference; `counts` tell what it exercised."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.patterns: dict[str, list[int | frozenset[int]]] = {}
        jump = rng.random() < 0.5
        self.requests = random_requests(rng, rng.randrange(1, 14), self.patterns, jump)
        self.shape = random_shape(rng, self.requests, jump)
        s = self.shape.settings
        self.by_id = {r.id: r for r in self.requests}
        self.executor = ScriptedExecutor(s.page_size, s.num_pages, VOCAB, salt=self._salt, on_write=self._wrote)
        self.writes: Counter[History] = Counter()  # full pages of prompts
        self.core = EngineCore(
            s,
            self.executor,
            grammar=PatternGrammars(self.patterns, EOS, delay=0 if self.shape.sequential else rng.choice((0, 0, 2))),
        )
        self.results: dict[str, Result] = {}
        self.refused: set[str] = set()
        self.sequences: dict[str, Sequence] = {}
        self.counts: Counter[str] = Counter()
        self.expected = 0  # sequential: prompt tokens that must be computed
        self.seen: list[tuple[str, tuple[int, ...]]] = []

    def _salt(self, request_id: str) -> tuple[str, int]:
        return self.by_id[request_id].namespace, self.core.weights_version

    def _wrote(self, row: Row, position: int, history: History) -> None:
        if (position + 1) % self.executor.page_size == 0 and position < len(self.by_id[row.request_id].token_ids):
            self.writes[history] += 1

    def run(self) -> None:
        rng, core, shape, pending, steps = self.rng, self.core, self.shape, list(self.requests), 0
        while pending or core.has_work:
            if pending and (not core.has_work if shape.sequential else rng.random() < (0.7 if steps % 7 else 1)):
                burst = 1 if shape.sequential else rng.choice((1, 2, len(pending)))
                for r in pending[:burst]:
                    self._add(r)
                pending = pending[burst:]
            if not shape.calm:
                self._disturb()
            version = core.weights_version
            self._read(core.step(float(steps)), version)
            core.check()
            assert not core.stats().violations, repr(core.last_violation)
            steps += 1
            assert steps < 20_000, "no progress"
        self._verify()

    def _add(self, r: Request) -> None:
        self.core.add(r)
        q = self.core._live.get(r.id)
        if q is None:
            self.refused.add(r.id)
            return
        self.sequences[r.id] = q
        if self.shape.sequential and q.state != "done":
            known = [common(r.token_ids, tokens) for namespace, tokens in self.seen if namespace == r.namespace]
            cached = min(max(known, default=0), q.cache_limit(), len(r.token_ids))
            self.expected += max(0, min(q.goal(), len(r.token_ids)) - cached)

    def _disturb(self) -> None:
        rng, core = self.rng, self.core
        if rng.random() < 0.03 and self.sequences:
            core.abort(rng.choice(list(self.sequences)))
            self.counts["aborts"] += 1
        if rng.random() < 0.03:
            delivered = [(name, len(r.tokens)) for name, r in self.results.items() if r.last is None and r.tokens]
            if delivered:
                name, n = rng.choice(delivered)
                core.stop(name, rng.randrange(1, n + 1))
                self.counts["stops"] += 1
        if rng.random() < 0.02:
            core.commit_weights(rng.choice(("finish", "abort", "recompute")))
        if self.shape.holding and self.shape.settings.cache_enabled and core.scheduler.running and rng.random() < 0.1:
            q = rng.choice(core.scheduler.running)
            core.hold(q.request.id, q.tokens, q.request.namespace, ttl=rng.choice((5.0, 1e9)))
        if rng.random() < 0.02:
            self.executor.fail_next = RuntimeError(f"forward {self.executor.launches} failed")

    def _read(self, deltas: list[OutputDelta], version: int) -> None:
        for delta in deltas:
            result = self.results.setdefault(delta.request_id, Result())
            assert result.last is None, "S6: a delta after the last one"
            result.tokens += delta.token_ids
            result.logprobs += delta.logprobs
            result.prompt_logprobs += delta.prompt_logprobs
            result.versions += [delta.weights_version] * len(delta.token_ids)
            if delta.finish_reason is not None:
                result.last = delta
                q = self.sequences.get(delta.request_id)
                if q is not None and self.shape.sequential:
                    fed = len(q.tokens) - self._not_fed(q)
                    self.seen.append((q.request.namespace, tuple(q.tokens[:fed])))

    @staticmethod
    def _not_fed(q: Sequence) -> int:
        """Tokens at its end whose K and V were never computed: `high` divides them."""
        return max(0, len(q.tokens) - q.high)

    def _verify(self) -> None:
        stats, executor = self.core.stats(), self.executor
        assert not executor.faults, executor.faults
        for r in self.requests:
            last = self.results[r.id].last
            assert last is not None, f"S6: {r.id} has no final delta"
            if r.id in self.refused:
                assert last.finish_reason == "error" and last.error is not None and last.error.name == "CapacityError"
                continue
            self._verify_one(r, self.results[r.id], last)
        undisturbed = (
            self.shape.calm and not stats.preemptions and not stats.evicted_pages and self.shape.settings.cache_enabled
        )
        if undisturbed:
            self.counts["counted workloads"] += 1
            assert all(n == 1 for n in self.writes.values()), "R5: a page of a prompt was computed twice"
            if self.shape.sequential:
                self.counts["token-exact workloads"] += 1
                assert stats.prefill_tokens == self.expected, f"R2: {stats.prefill_tokens} computed, optimum {self.expected}"
        assert stats.prefill_tokens + stats.decode_tokens + stats.recomputed_tokens >= executor.computed
        self.core.scheduler.cache.holds.drop()
        self.core.flush()
        assert self.core.stats().pages_free == self.shape.settings.num_pages, "a leak: after a flush every page is free"
        assert not self.core.scheduler.cache.tree.roots, "a leak: an empty root"
        for name in (
            "preemptions",
            "failed_steps",
            "evicted_pages",
            "copied_pages",
            "adopted_pages",
            "duplicate_pages",
            "surplus_rows",
        ):
            self.counts[name] += getattr(stats, name)
        self.counts["requests"] += len(self.requests)
        self.counts["refused"] += len(self.refused)
        self.counts["broken holds"] += stats.broken_holds
        self.counts["fallbacks"] += stats.fallbacks
        self.counts["tokens"] += sum(len(result.tokens) for result in self.results.values())

    def _verify_one(self, r: Request, result: Result, last: OutputDelta) -> None:
        q = self.sequences[r.id]
        want = alone(r, q.seed, q.versions, self.patterns, q.max_tokens)
        usage = last.usage
        assert usage is not None and usage.prompt_tokens == len(r.token_ids)
        if last.finish_reason == "stop_string":
            assert 0 < usage.completion_tokens <= len(result.tokens), "what the Collector keeps had been delivered"
        else:
            assert usage.completion_tokens == len(result.tokens)
        # a sample that draws from its leader's row (S4) computed nothing of the prompt
        most = len(r.token_ids) - (r.sample == 0)
        assert 0 <= usage.cached_tokens <= most or not usage.cached_tokens
        assert result.versions == q.versions[: len(result.tokens)]
        n = len(result.logprobs)
        assert n == (len(result.tokens) if r.sampling.logprobs else 0), "logprobs: one a token, or none"
        assert result.logprobs == want.logprobs[:n], f"{r.id}: logprobs {result.logprobs}, alone {want.logprobs}"
        scored = result.prompt_logprobs  # of several versions, if the weights changed in the middle of the prompt
        if self.core.weights_version == 0:
            assert scored == want.prompt_logprobs[: len(scored)], f"{r.id}: prompt logprobs differ"
        if last.finish_reason in ("abort", "stop_string"):
            assert result.tokens == want.tokens[: len(result.tokens)], f"{r.id}, aborted: {result.tokens}, alone {want.tokens}"
        else:
            got = (result.tokens, last.finish_reason, usage.forced_tokens)
            assert got == (want.tokens, want.finish, want.forced), f"{r.id}: {got}, alone {want}"
            assert len(scored) == len(want.prompt_logprobs), f"{r.id}: {len(scored)} prompt logprobs"


def common(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    n = 0
    while n < len(a) and n < len(b) and a[n] == b[n]:
        n += 1
    return n
