"""The tree that a run left behind, for people: which tokens stood where, who drew them, what was read from the cache (U8).

    prompt 1 204 = cached 1 080 + computed 124   hit 89.7 %   …
    [40] "…You file tickets.…"                   read 3×
     ├[9] "The lid broke."
     │ └[12] gen ticket  triage.py:14  "high"    forced 3  eos
     └[11] "It arrived late."
       └[8] select grade  triage.py:19           A 71.0 %  B 29.0 %

Reads records alone: what `phloem run --show` and a notebook print is what a saved trace can print too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import TYPE_CHECKING, Any

from phloem.lang.backend import Record
from phloem.lang.ir import short
from phloem.runtime.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from phloem.lang.run import Run
    from phloem.lang.usage import RunUsage

__all__ = ["ShownNode", "html", "show", "tree_of", "usage_table"]

MAX_LINES = 200
WIDTH = 48


@dataclass(eq=False)
class ShownNode:
    """ids: a stretch of tokens that nothing branches off.   drawn: who drew them, None for a prompt's.   reads: requests that found them
    in the cache.   notes: requests that end here: score paths and gens that drew nothing.
    """

    ids: list[int]
    drawn: Record | None = None
    reads: int = 0
    children: list[ShownNode] = field(default_factory=list)
    notes: list[Record] = field(default_factory=list)


class _Token:
    """One token of the trie."""

    __slots__ = ("children", "drawn", "notes", "reads", "token")

    def __init__(self, token: int) -> None:
        self.token, self.reads = token, 0
        self.drawn: Record | None = None
        self.children: dict[int, _Token] = {}
        self.notes: list[Record] = []


def tree_of(records: Iterable[Record]) -> list[ShownNode]:
    """The trie of all prompts and outputs, one root a namespace, cut where it branches or where somebody else drew."""
    spaces: dict[str, _Token] = {}
    for record in records:
        request, output = record.request, record.output
        at = spaces.setdefault(request.namespace, _Token(-1))
        cached = output.usage.cached_tokens if output is not None else 0
        for n, token in enumerate(request.token_ids):
            at = at.children.setdefault(token, _Token(token))
            at.reads += n < cached
        drawn = () if output is None else output.token_ids
        if record.kind != "gen" or not drawn:
            at.notes.append(record)
            continue
        for n, token in enumerate(drawn):
            fresh = token not in at.children
            at = at.children.setdefault(token, _Token(token))
            if (fresh or n == 0) and at.drawn is None:
                at.drawn = record
            elif at.drawn is not record and n == 0:
                at.notes.append(record)  # somebody else drew the same
    roots: list[ShownNode] = []
    for space in spaces.values():
        roots += [_compressed(child) for child in space.children.values()]
    return roots


def _compressed(token: _Token) -> ShownNode:
    top = ShownNode([token.token], token.drawn, token.reads, notes=list(token.notes))
    work = [(token, top)]
    while work:
        at, node = work.pop()
        while len(at.children) == 1 and not node.notes:
            (below,) = at.children.values()
            if below.drawn is not node.drawn or below.reads != node.reads:
                break
            node.ids.append(below.token)
            node.notes += below.notes
            at = below
        for below in at.children.values():
            child = ShownNode([below.token], below.drawn, below.reads, notes=list(below.notes))
            node.children.append(child)
            work.append((below, child))
    return top


def usage_table(usage: RunUsage) -> str:
    """The reuse table: every figure is the engine's own (U8)."""
    u = usage
    return (
        f"prompt {_n(u.prompt)} = cached {_n(u.cached)} + computed {_n(u.computed)}   hit {u.hit:.1%}   unique {_n(u.unique)}\n"
        f"completion {_n(u.completion)} (forced {_n(u.forced)}, dropped {_n(u.dropped)}, fed back {_n(u.fed)})   "
        f"recomputed {_n(u.recomputed)}"
        + (f" (siblings {_n(u.siblings)})" if u.siblings else "")
        + f"   requests {u.requests}"
        + ("" if u.forwards is None else f"   forwards {_n(u.forwards)}")
    )


def show(run: Run[Any]) -> str:
    """The usage of a run and its tree, as text of at most MAX_LINES lines."""
    title = f"{run.program.name} on {run._session.backend.name}, seed {run.seed}"
    tokenizer = run._session.backend.tokenizer
    lines = [title, usage_table(run.usage)]
    if tokenizer is None:
        lines += [f"{_what(record)}  {_said(record)}" for record in run.records]
    else:
        tree = list(_lines(tree_of(run.records), tokenizer, ""))
        lines += tree[:MAX_LINES]
        if len(tree) > MAX_LINES:
            lines.append(f"⋮ {len(tree) - MAX_LINES} more lines")
    return "\n".join(lines)


def _lines(nodes: Sequence[ShownNode], tokenizer: Tokenizer, lead: str, top: bool = True) -> Iterator[str]:
    for i, node in enumerate(nodes):
        last = i == len(nodes) - 1
        branch, below = ("", "") if top else (" └" if last else " ├", "  " if last else " │")
        head = f"{lead}{branch}[{len(node.ids)}] {_label(node, tokenizer)}"
        notes = _notes(node)
        yield f"{head:<{WIDTH + 24}}  {notes}".rstrip()
        inner = lead + below
        for record in node.notes:
            if record.kind != "warm":
                yield f"{inner} · {_what(record)}  {_said(record)}".rstrip()
        yield from _lines(node.children, tokenizer, inner, top=False)


def _label(node: ShownNode, tokenizer: Tokenizer) -> str:
    text = tokenizer.decode(node.ids, skip_special_tokens=False)
    return (f"{_what(node.drawn)}  " if node.drawn is not None else "") + _cut(text)


def _notes(node: ShownNode) -> str:
    parts = [f"read {node.reads}×"] if node.reads else []
    if node.drawn is not None and node.drawn.output is not None:
        output = node.drawn.output
        parts += [f"forced {output.usage.forced_tokens}"] if output.usage.forced_tokens else []
        parts.append(output.finish_reason)
        parts += [f"emulated: {node.drawn.emulated}"] if node.drawn.emulated else []
    return "  ".join(parts)


def _what(record: Record | None) -> str:
    if record is None:
        return ""
    verb = {"gen": "gen", "score": "select", "warm": "warm"}[record.kind]
    branch = f" of branch {'.'.join(map(str, record.branch))}" if record.branch else ""
    attempt = f", attempt {record.attempt + 1}" if record.attempt else ""
    return (
        f"{verb} {record.name or ''}  {short(record.at)}{branch}{attempt}".replace("  ", " ", 1)
        if record.name is None
        else f"{verb} {record.name}  {short(record.at)}{branch}{attempt}"
    )


def _said(record: Record) -> str:
    if record.kind == "score":
        chosen = record.selection
        if chosen is None:
            return ""
        shown = sorted(chosen.per_choice, key=lambda c: -c.probability)[:6]
        return "  ".join(f"{_cut(c.text, 16)} {c.probability:.1%}" for c in shown)
    output = record.output
    return "under way" if output is None else f"{_cut(output.text)}  {output.finish_reason}"


def _cut(text: str, width: int = WIDTH) -> str:
    shown = text.replace("\n", "⏎").replace("\t", "⇥")
    if len(shown) > width:
        half = (width - 1) // 2
        shown = f"{shown[:half]}…{shown[-half:]}"
    return f'"{shown}"'


def _n(value: int) -> str:
    return f"{value:,}".replace(",", " ")


# -------------------------------------------------------------------------------------------------------------------------- HTML

_STYLE = (
    "<style>.phloem{font:12px/1.5 monospace;white-space:pre-wrap}.phloem .read{background:#dcefdc}.phloem .drawn{background:#dbe7f8}"
    ".phloem .forced{background:#f6e7c8}.phloem .at{color:#888}.phloem ul{list-style:none;margin:0;padding-left:1.2em;border-left:1px solid #ddd}</style>"
)


def html(run: Run[Any]) -> str:
    """The same for a notebook: tokens read from the cache, drawn and forced are shaded. Everything that a model or a user wrote is escaped."""
    head = f"<b>{escape(run.program.name)}</b> <span class=at>{escape(usage_table(run.usage))}</span>"
    tokenizer = run._session.backend.tokenizer
    if tokenizer is None:
        body = "".join(f"<li>{escape(_what(r))} {escape(_said(r))}</li>" for r in run.records)
    else:
        body = "".join(_items(tree_of(run.records), tokenizer))
    return f"{_STYLE}<div class=phloem>{head}<ul>{body}</ul></div>"


def _items(nodes: Sequence[ShownNode], tokenizer: Tokenizer) -> Iterator[str]:
    for node in nodes:
        text = escape(tokenizer.decode(node.ids, skip_special_tokens=False))
        forced = node.drawn is not None and node.drawn.output is not None and node.drawn.output.usage.forced_tokens
        kind = ("forced" if forced else "drawn") if node.drawn is not None else ("read" if node.reads else "new")
        at = f" <span class=at>{escape(' '.join(filter(None, (_what(node.drawn), _notes(node)))))}</span>"
        yield f"<li>[{len(node.ids)}] <span class={kind}>{text}</span>{at}"
        below = [f"<li class=at>{escape(_what(r))} {escape(_said(r))}</li>" for r in node.notes if r.kind != "warm"]
        below += list(_items(node.children, tokenizer))
        yield f"<ul>{''.join(below)}</ul></li>" if below else "</li>"
