"""Turns: a conversation that is a list of ids and only grows. Nothing is tokenised twice; each turn prefills what is new (rl T1-T3).

    open        generate          tool(messages)                                    generate
    [prompt ids][drawn … EOS]     [what the template puts behind it, tool text, …]  [drawn …]
     mask 0      1 1 1 1 1         0 0 0 0 0 0 0 0                                   1 1 1

Markup is the chat template's, written by increments (text/markup.py): after a drawn EOS its closing is there already and only the
separator follows; after "length" the closing is written too. While a tool runs, the cached prefix is held.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from phloem.runtime.errors import InvalidRequestError
from phloem.runtime.request import GrammarSpec, Request, SamplingParams, Support
from phloem.runtime.rl.collect import SampleSink
from phloem.runtime.rl.requests import as_sampling
from phloem.runtime.rl.sample import Sample, Span
from phloem.runtime.text.markup import Drawn, Markup, Message
from phloem.runtime.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from phloem.runtime.rl.engine import RolloutEngine

__all__ = ["Session"]

_NAMES = itertools.count()
_TURNS = 1_000_003  # turns of one seed draw from seeds that far apart


class Session:
    """Open one with `engine.open_session`. Not thread-safe; two sessions may be.

    ids: everything so far.   rewrites: the template would have rewritten earlier turns (dropped reasoning, say); here they stay.
    """

    def __init__(
        self, engine: RolloutEngine, ids: list[int], seed: int | None, ttl: float, markup: Markup | None, tools: Any
    ) -> None:
        self._engine, self._seed, self._ttl, self._markup, self._tools = engine, seed, ttl, markup, tools
        self._name = f"session {next(_NAMES)} of {id(engine)}"
        self.ids = ids
        self._num_prompt = len(ids)
        self._messages: list[Message] = []
        self._turn: Sample | None = None  # the last one drawn, whose message is not over
        self._columns: dict[str, list[Any]] = {
            n: [] for n in ("logprobs_sampled", "logprobs_model", "support", "support_logmass", "forced", "loss_mask")
        }
        self._spans: list[Span] = []
        self._last: Sample | None = None
        self._index = self._turns = 0
        self._mixed = False
        self._version = engine.version
        self.rewrites = False
        self._held = False

    @classmethod
    def open(
        cls, engine: RolloutEngine, prompt_ids: Sequence[int] | None, messages: Sequence[Mapping[str, Any]] | None, tools: Any,
        template: str | None, seed: int | None, ttl: float,
    ) -> Session:  # fmt: skip
        if (prompt_ids is None) == (messages is None):
            raise InvalidRequestError("open_session takes prompt_ids or messages=, one of them.", param="prompt_ids")
        if prompt_ids is not None:
            return cls(engine, [int(t) for t in prompt_ids], seed, ttl, None, tools)
        if not isinstance(engine.tokenizer, Tokenizer):
            raise InvalidRequestError("messages need a tokenizer: pass tokenizer= to attach.", param="messages")
        markup = Markup(engine.tokenizer, template=template)
        if not markup.has_template:
            raise InvalidRequestError(
                "this model has no chat template; open the session with prompt_ids, or name a template.", param="messages"
            )
        self = cls(engine, [], seed, ttl, markup, tools)
        self._messages = [_message(m) for m in messages or ()]
        self.ids = self._whole(opened=True)
        self._num_prompt = len(self.ids)
        self.rewrites = self._probe()
        return self

    # ---- growing -------------------------------------------------------------------------------------------------------

    def generate(
        self,
        sampling: SamplingParams | Mapping[str, Any] | None = None,
        *,
        grammar: GrammarSpec | str | None = None,
        off_policy: bool = False,
    ) -> Sample:
        """Draw a turn; its ids join the session. The Sample of this turn alone, with the session so far as its prompt."""
        from phloem.runtime.rl.engine import _spec

        engine = self._engine
        engine._ensure_readable()
        params = as_sampling(sampling, off_policy)
        if self._seed is not None:
            params = msgspec.structs.replace(params, seed=(self._seed + self._turns * _TURNS) % 2**63)
        request = Request(
            id=engine._name(),
            token_ids=tuple(self.ids),
            sampling=params,
            grammar=_spec({"grammar": grammar}),
            sample=self._index,
        )
        collector = engine._text.collector(request) if params.stop else None
        sink = SampleSink(request, 0, engine.version, collector=collector)
        try:
            engine._client.submit([(request, sink)], atomic=True)
            engine._client.run(lambda: sink.over)
        finally:
            if not sink.over:
                engine._client.abandon([request.id])
        turn = sink.sample
        assert turn is not None
        if turn.error is not None:
            raise turn.error
        self._take(turn)
        return turn

    def append(self, ids: Sequence[int], trainable: bool = False) -> None:
        """Ids that nobody drew here. trainable=True counts them in the loss mask, with the logprobs that the engine gives them."""
        new = [int(t) for t in ids]
        if not new:
            return
        if trainable:
            start = len(self.ids)
            (found,) = self._engine.score([[*self.ids, *new]], from_position=start)
            self._put(new, [t.sampled or 0.0 for t in found], [t.logprob for t in found], [t.logmass or 0.0 for t in found], 1)
            self._spans.append(Span(start - self._num_prompt, len(self.ids) - self._num_prompt, self._engine.version))
        else:
            self._put(new, [0.0] * len(new), [0.0] * len(new), [0.0] * len(new), 0)

    def tool(self, messages: Sequence[Mapping[str, Any]] | Mapping[str, Any]) -> None:
        """Close the drawn turn, add these messages as the template writes them, and open the assistant's next turn."""
        if self._markup is None:
            raise InvalidRequestError("this session was opened with ids; append() ids to it.", param="messages")
        given = [messages] if isinstance(messages, Mapping) else list(messages)
        drawn = self._close_turn()
        before = self._markup.render([*self._messages, *drawn], tools=self._tools)
        self._messages += [*drawn, *(_message(m) for m in given)]
        whole = self._whole(opened=True)
        if whole[: len(self.ids)] == self.ids:
            self.append(whole[len(self.ids) :])
            return
        # The template writes what came before otherwise now (H3: or drawn ids are not its own encoding): add the increment alone.
        after = self._markup.render(self._messages, opened=Message("assistant", ()), tools=self._tools)
        if not after.text.startswith(before.text):
            self.rewrites = True
            before = self._markup.render(self._messages[: -len(given)] if given else self._messages, tools=self._tools)
            if not after.text.startswith(before.text):
                raise InvalidRequestError(
                    "the chat template writes earlier turns differently once these messages follow, so they cannot be appended; "
                    "append() their ids yourself.", param="messages", code="chat_template_error",
                )  # fmt: skip
        closing = self._missing_closing(before.text)
        text = closing + after.text[len(before.text) :]
        pieces = self._markup.pieces(text, after)
        self.append([t for _, ids in self._markup.encode(pieces, "drawn") for t in ids])

    def fork(self, n: int) -> list[Session]:
        """n sessions that go on from here, over one cached prefix; their draws differ."""
        if isinstance(n, bool) or not isinstance(n, int) or n < 1:
            raise InvalidRequestError(f"n is {n!r}; expected a positive integer.", param="n")
        branches = []
        for i in range(n):
            branch = Session(self._engine, list(self.ids), self._seed, self._ttl, self._markup, self._tools)
            branch._num_prompt, branch._messages, branch._turn = self._num_prompt, list(self._messages), self._turn
            branch._columns = {name: list(values) for name, values in self._columns.items()}
            branch._spans, branch._last, branch._mixed = list(self._spans), self._last, self._mixed
            branch._index, branch._turns, branch._version, branch.rewrites = (
                self._index * n + i,
                self._turns,
                self._version,
                self.rewrites,
            )
            branches.append(branch)
        return branches

    def sample(self) -> Sample:
        """The whole session as one Sample: the prompt it was opened with, and all that followed, drawn or not."""
        last = self._last
        columns: dict[str, Any] = {name: list(values) for name, values in self._columns.items()}
        return Sample(
            prompt_ids=self.ids[: self._num_prompt], output_ids=self.ids[self._num_prompt :], finish=last.finish if last is not None else "length",
            spans=tuple(self._spans), version_at_submit=self._version, kv_mixed=self._mixed, sample_index=self._index,
            seed=self._seed if self._seed is not None else last.seed if last is not None else 0,
            temperature=last.temperature if last is not None else 1.0, cached_tokens=last.cached_tokens if last is not None else 0,
            partial=last is not None and last.partial, **columns,
        )  # fmt: skip

    def close(self) -> None:
        """Let go of the held prefix. May be called again."""
        if self._held:
            self._held = False
            self._engine._client.call("release", self._name)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # ---- inside --------------------------------------------------------------------------------------------------------

    def _take(self, turn: Sample) -> None:
        at = len(self.ids) - self._num_prompt
        if self._last is not None and self._last.temperature != turn.temperature:
            raise InvalidRequestError(
                "every turn of a session is drawn at one temperature, which its Sample carries.", param="temperature"
            )
        self._put(
            turn.output_ids, turn.logprobs_sampled, turn.logprobs_model, turn.support_logmass, 1, turn.support, turn.forced
        )
        self._spans += [Span(s.start + at, s.end + at, s.version) for s in turn.spans]
        self._last = self._turn = turn
        self._turns += 1
        self._mixed = self._mixed or turn.kv_mixed
        self._engine._client.call("hold", self._name, list(self.ids), "", self._ttl)
        self._held = True

    def _put(
        self, ids: Sequence[int], sampled: Sequence[float], model: Sequence[float], mass: Sequence[float], mask: int,
        support: Sequence[Support | None] | None = None, forced: Sequence[bool] | None = None,
    ) -> None:  # fmt: skip
        self.ids += ids
        columns, n = self._columns, len(ids)
        columns["logprobs_sampled"] += sampled
        columns["logprobs_model"] += model
        columns["support_logmass"] += mass
        columns["support"] += support if support is not None else [None] * n
        columns["forced"] += forced if forced is not None else [False] * n
        columns["loss_mask"] += [mask] * n

    def _close_turn(self) -> list[Message]:
        turn, self._turn = self._turn, None
        if turn is None:
            return []
        ids = turn.output_ids[:-1] if turn.finish in ("eos", "stop_token") else turn.output_ids
        text = self._engine.tokenizer.decode(ids, skip_special_tokens=False)
        return [Message("assistant", (Drawn(tuple(ids), text),) if ids else ())]

    def _whole(self, opened: bool) -> list[int]:
        assert self._markup is not None
        rendered = self._markup.render(self._messages, opened=Message("assistant", ()) if opened else None, tools=self._tools)
        encoded = self._markup.encode(self._markup.pieces(rendered.text, rendered), "start")
        return [t for _, ids in encoded for t in ids]

    def _missing_closing(self, rendered: str) -> str:
        """The closing of the drawn turn that the session has not: none of it behind a drawn EOS but what follows that token."""
        assert self._markup is not None and self._last is not None
        last_open = self._markup.render(
            self._messages[: self._last_assistant() + 1][:-1], opened=self._messages[self._last_assistant()], tools=self._tools
        )
        closing = rendered[len(last_open.text) :] if rendered.startswith(last_open.text) else ""
        if self._last.finish in ("eos", "stop_token"):
            spelled = self._engine.tokenizer.id_to_token(self._last.output_ids[-1]) or ""
            closing = closing.removeprefix(spelled)
        return closing

    def _last_assistant(self) -> int:
        return max((i for i, m in enumerate(self._messages) if m.role == "assistant"), default=0)

    def _probe(self) -> bool:
        """Whether the template writes a turn otherwise once others follow."""
        assert self._markup is not None
        one = [*self._messages, Message("assistant", ("<think>a</think>\n\nb",))]
        first, later = (
            self._markup.render(one, tools=self._tools),
            self._markup.render([*one, Message("user", ("c",))], tools=self._tools),
        )
        return not later.text.startswith(first.text)


def _message(given: Mapping[str, Any]) -> Message:
    if not isinstance(given, Mapping) or not isinstance(given.get("role"), str):
        raise InvalidRequestError(f"a message is {given!r}; expected a mapping with role and content.", param="messages")
    content = given.get("content") or ""
    if not isinstance(content, str):
        raise InvalidRequestError("a message's content must be a string here.", param="messages")
    return Message(
        given["role"], (content,) if content else (), {k: v for k, v in given.items() if k not in ("role", "content")}
    )
