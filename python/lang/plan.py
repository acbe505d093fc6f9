"""`program.plan(**args)`: what the first stage would send, as a segment tree (Y2, Y5). No forward is run.

judge(essay=…)   prompt 3 086   unique 518   expected hit 83.2 %
[428] 'You judge essays. …'                    416 cached now
 ├[15] 'Judge its clarity.'    gen clarity     ≤ 256
 …
prefill 102 now, 518 cold · forwards 2 + ≤ 255 · KV ≤ 2 054 tokens
then reads `clarity` (judge.py:31)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from phloem.lang.backend import Job
from phloem.lang.compile import Node, segment_tree
from phloem.lang.ir import short
from phloem.lang.path import Path, Slot
from phloem.lang.session import Plan
from phloem.runtime.request import Request, SamplingParams

if TYPE_CHECKING:
    from phloem.lang.run import Program

__all__ = ["StagePlan", "plan_of", "warm_prefix"]

DEFAULT_MAX_TOKENS = 128
MAX_LINES = 40


@dataclass(frozen=True, slots=True)
class StagePlan:
    """prompt: tokens of all requests.   unique: of their trie.   cached: of those, in the engine's tree now.   expected_hit: share of `prompt` that
    need not be computed on an empty cache; with what is cached now, `expected_hit_now`.   forwards: (levels of prefill, draws at most).
    kv: tokens of KV at most.   reads: what the program waits for then, and where.   requests: that would be sent.   text: what `print` shows.
    """

    prompt: int
    unique: int
    cached: int
    forwards: tuple[int, int]
    kv: int
    reads: str
    requests: tuple[Request, ...]
    tree: tuple[Node, ...]
    text: str

    @property
    def expected_hit(self) -> float:
        return 1 - self.unique / self.prompt if self.prompt else 0.0

    @property
    def expected_hit_now(self) -> float:
        return 1 - (self.unique - self.cached) / self.prompt if self.prompt else 0.0

    def __str__(self) -> str:
        return self.text


def plan_of(program: Program[Any, Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> StagePlan:
    run, stop = program.dry_run(args, kwargs)
    session = run._session
    jobs = list(session.live.values())
    tree = segment_tree(jobs)
    known = {id(node): _cached(session.backend, node) for root in tree for node in _nodes(root)}
    prompt = sum(len(job.request.token_ids) for job in jobs)
    unique = sum(node.size for root in tree for node in _nodes(root))
    cached = sum(known.values())
    drawn = [_max_tokens(job) for job in jobs]
    levels = max((_depth(root) for root in tree), default=0)
    forwards = (levels, max((n - 1 for n in drawn if n), default=0))
    kv = unique + sum(drawn)
    reads = _reads(stop)
    given = ", ".join(f"{name}={_brief(value)}" for name, value in _arguments(program, args, kwargs))
    hit = 1 - unique / prompt if prompt else 0.0
    lines = [f"{program.name}({given})   prompt {_n(prompt)}   unique {_n(unique)}   expected hit {hit:.1%}"]
    for root in tree:
        lines += _draw(root, known, session.backend.tokenizer, "", "")
    if len(lines) > MAX_LINES:
        lines = [*lines[: MAX_LINES - 1], f"⋮  {len(lines) - MAX_LINES + 1} more"]
    lines.append(
        f"prefill {_n(unique - cached)} now, {_n(unique)} cold · forwards {forwards[0]} + ≤ {forwards[1]} · KV ≤ {_n(kv)} tokens"
    )
    lines.append(reads)
    requests = tuple(job.request for job in jobs)
    return StagePlan(prompt, unique, cached, forwards, kv, reads, requests, tuple(tree), "\n".join(lines))


def warm_prefix(program: Program[Any, Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """Compute what the first stage shares; how many tokens that is."""
    run, _ = program.dry_run(args, kwargs)
    jobs = list(run._session.live.values())
    if not jobs:
        return 0
    tree = segment_tree(jobs)
    root = max(tree, key=lambda node: node.end)
    ids = root.ids[: root.end]
    backend = run._session.backend
    from phloem.lang.backend import Record

    ended: list[Job] = []
    request = Request(
        id=f"{jobs[0].request.id}.cache",
        token_ids=ids,
        sampling=SamplingParams(max_tokens=0, temperature=0.0),
        namespace=run.namespace,
    )
    record = Record("warm", request, program.at, None, (), 0, 0, 0)
    job = Job(record, backend.tokenizer, lambda job, first: ended.append(job))
    backend.submit([job])
    while job.output is None:
        backend.wait(lambda: job.output is not None, None)
    if job.output.error is not None:
        raise job.output.error
    return len(ids)


def _nodes(root: Node) -> Iterator[Node]:
    yield root
    for child in root.children:
        yield from _nodes(child)


def _depth(node: Node) -> int:
    return 1 + max((_depth(child) for child in node.children), default=0)


def _cached(backend: Any, node: Node) -> int:
    explain = getattr(backend, "explain", None)
    if explain is None:
        return 0
    at = node
    while not at.jobs:
        at = at.children[0]
    # Of a whole prompt one token is always computed (R4); asking for one more tells about the last one too.
    hit: int = explain((*node.ids[: node.end], node.ids[node.end - 1]), at.jobs[0].request.namespace)
    return max(0, min(hit, node.end) - node.start)


def _max_tokens(job: Job) -> int:
    wanted = job.request.sampling.max_tokens
    return DEFAULT_MAX_TOKENS if wanted is None else wanted


def _draw(node: Node, known: Mapping[int, int], tokenizer: Any, before: str, below: str) -> list[str]:
    text = "" if tokenizer is None else tokenizer.decode(node.ids[node.start : node.end])
    label = repr(text if len(text) <= 32 else text[:31] + "…")
    told = "".join(f"   {_asked(job)}" for job in node.jobs[:3]) + (
        f"   and {len(node.jobs) - 3} more" if len(node.jobs) > 3 else ""
    )
    cached = known[id(node)]
    line = f"{before}[{node.size}] {label}{told}" + (f"   {_n(cached)} cached now" if cached else "")
    lines = [line]
    for i, child in enumerate(node.children):
        last = i == len(node.children) - 1
        lines += _draw(child, known, tokenizer, f"{below} {'└' if last else '├'}", f"{below} {' ' if last else '│'}")
    return lines


def _asked(job: Job) -> str:
    record = job.record
    if record.kind == "score":
        return f"scores {record.name or 'select'}"
    return f"gen {record.name or short(record.at)}   ≤ {_max_tokens(job)}"


def _reads(stop: Plan | None) -> str:
    if stop is None:
        return "then ends"
    if isinstance(stop.on, Slot) and stop.on.node is not None:
        return f"then reads `{stop.on.node.name or stop.on.node}` ({short(stop.at)})"
    what = "a branch" if isinstance(stop.on, Path) and stop.on.branch else "its text"
    return f"then waits for {what} ({short(stop.at)})"


def _arguments(program: Program[Any, Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[tuple[str, Any]]:
    named = list(zip(program.arg_names, args))
    return named + [(name, value) for name, value in kwargs.items() if name in program.arg_names]


def _brief(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 16 else "…"


def _n(value: int) -> str:
    return f"{value:,}".replace(",", " ")
