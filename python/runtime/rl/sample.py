"""What a rollout gives back: Samples, in groups, and the tensors that a loss wants of them. Token ids are the truth; text is a view.

    prompt_ids  [ 5 9 2 ]    output_ids  [ 7 7 8 | 4 4 | 6 EOS ]
                             loss_mask     1 1 1   0 0   1 1       drawn ids alone; markup and tool text of a session are 0
                             spans       [ 0 .. 3 version 4 ][ 5 .. 7 version 5 ]

Knows no engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, overload

import torch
from torch import Tensor

from phloem.runtime.errors import InvalidRequestError
from phloem.runtime.request import FinishReason, Support

__all__ = ["RolloutBatch", "RolloutTensors", "Sample", "Span", "group_advantages"]


@dataclass(frozen=True, slots=True)
class Span:
    """output_ids[start:end] were drawn under this version of the weights."""

    start: int
    end: int
    version: int


@dataclass(slots=True, kw_only=True)
class Sample:
    """One trajectory. Every per-token field has one entry for each of output_ids, the ending token included (rl I1).

    logprobs_sampled: of the distribution drawn from; logprobs_model: log-softmax of the raw logits; both float32 (L2).
    support, support_logmass: what could be drawn (None: everything), and the log of its mass at the temperature (L3, L4).
    forced: the support was one token.   loss_mask: 1 where the id was drawn (T3); elsewhere logprobs are 0 and support None.
    truncated: finish is "length" or "abort".   partial: it was cut, and `rollout` given this Sample goes on with it (L9).
    seed, sample_index: with the position, all the randomness there was (L8).   error: with on_error="return".
    """

    prompt_ids: list[int]
    output_ids: list[int] = field(default_factory=list)
    logprobs_sampled: list[float] = field(default_factory=list)
    logprobs_model: list[float] = field(default_factory=list)
    support: list[Support | None] = field(default_factory=list)
    support_logmass: list[float] = field(default_factory=list)
    forced: list[bool] = field(default_factory=list)
    loss_mask: list[int] = field(default_factory=list)
    finish: FinishReason = "error"
    spans: tuple[Span, ...] = ()
    version_at_submit: int = 0
    kv_mixed: bool = False
    group_id: int | str = 0
    sample_index: int = 0
    seed: int = 0
    temperature: float = 1.0
    cached_tokens: int = 0
    partial: bool = False
    error: Exception | None = None

    @property
    def truncated(self) -> bool:
        return self.finish in ("length", "abort")

    @property
    def token_ids(self) -> list[int]:
        return [*self.prompt_ids, *self.output_ids]

    def check(self) -> None:
        """I1. Raises AssertionError that names the field."""
        for name in ("logprobs_sampled", "logprobs_model", "support", "support_logmass", "forced", "loss_mask"):
            assert len(getattr(self, name)) == len(self.output_ids), f"{name} has {len(getattr(self, name))} entries"


@dataclass(slots=True)
class RolloutTensors:
    """A batch as tensors on the CPU, fresh ones. B samples, padded on the right to L tokens.

    ids, attention_mask: [B, L] int64.
    loss_mask, logprobs_sampled, logprobs_model, support_logmass: [B, L - 1] float32; entry t is about ids[:, t + 1].
    supports: one list a sample, one entry a token of ids[:, 1:] (None: everything); `token_logprobs` reads it.
    temperature: [B] float32.   advantages: put yours here, or keep them apart.
    """

    ids: Tensor
    attention_mask: Tensor
    loss_mask: Tensor
    logprobs_sampled: Tensor
    logprobs_model: Tensor
    support_logmass: Tensor
    temperature: Tensor
    supports: list[list[Support | None]]

    def to(self, device: torch.device | str) -> RolloutTensors:
        """The same on another device."""
        moved = {
            name: getattr(self, name).to(device)
            for name in (
                "ids",
                "attention_mask",
                "loss_mask",
                "logprobs_sampled",
                "logprobs_model",
                "support_logmass",
                "temperature",
            )
        }
        return RolloutTensors(**moved, supports=self.supports)


class RolloutBatch(Sequence[Sample]):
    """The Samples of a rollout: one for each prompt and draw, prompts in order, none missing (rl §1).

    values: of a rollout of programs, what the body of each Sample's run returned; else empty.
    """

    def __init__(self, samples: Sequence[Sample], stats: dict[str, Any] | None = None, values: Sequence[Any] = ()) -> None:
        self.samples = list(samples)
        self.stats = stats or {}
        self.values = list(values)

    def __len__(self) -> int:
        return len(self.samples)

    @overload
    def __getitem__(self, index: int) -> Sample: ...
    @overload
    def __getitem__(self, index: slice) -> list[Sample]: ...
    def __getitem__(self, index: int | slice) -> Sample | list[Sample]:
        return self.samples[index]

    def __iter__(self) -> Iterator[Sample]:
        return iter(self.samples)

    def groups(self) -> list[list[Sample]]:
        """Samples of one prompt together, in order of their first."""
        found: dict[int | str, list[Sample]] = {}
        for sample in self.samples:
            found.setdefault(sample.group_id, []).append(sample)
        return list(found.values())

    def missing(self) -> list[list[int]]:
        """For each group, the sample indices that have no complete Sample (L7)."""
        return [[s.sample_index for s in group if s.error is not None or s.partial] for group in self.groups()]

    def tensors(self, pad_id: int = 0, samples: Sequence[Sample] | None = None) -> RolloutTensors:
        """Padded on the right with pad_id. `samples`: those instead of all, say the complete ones."""
        return tensors_of(self.samples if samples is None else samples, pad_id)

    def to_trl(self) -> dict[str, list[Any]]:
        """What TRL's `rollout_func` returns: TRL recomputes over the full vocabulary, so it gets sampled + logmass (rl §9)."""
        return {
            "prompt_ids": [s.prompt_ids for s in self.samples],
            "completion_ids": [s.output_ids for s in self.samples],
            "logprobs": [[a + b for a, b in zip(s.logprobs_sampled, s.support_logmass)] for s in self.samples],
        }


def tensors_of(samples: Sequence[Sample], pad_id: int = 0) -> RolloutTensors:
    if not samples:
        raise InvalidRequestError("there are no samples to make tensors of.", param="samples")
    longest = max(len(s.prompt_ids) + len(s.output_ids) for s in samples)
    shape = (len(samples), longest)
    ids, attention = torch.full(shape, pad_id, dtype=torch.int64), torch.zeros(shape, dtype=torch.int64)
    per_token = {
        name: torch.zeros(len(samples), longest - 1)
        for name in ("loss_mask", "logprobs_sampled", "logprobs_model", "support_logmass")
    }
    supports: list[list[Support | None]] = []
    for b, s in enumerate(samples):
        end = len(s.prompt_ids) + len(s.output_ids)
        ids[b, :end] = torch.tensor(s.token_ids)
        attention[b, :end] = 1
        first = len(s.prompt_ids) - 1
        for name, values in per_token.items():
            values[b, first : end - 1] = torch.tensor(getattr(s, name), dtype=torch.float32)
        supports.append([*([None] * first), *s.support, *([None] * (longest - end))])
    return RolloutTensors(
        ids, attention, per_token["loss_mask"], per_token["logprobs_sampled"], per_token["logprobs_model"], per_token["support_logmass"],
        torch.tensor([s.temperature for s in samples], dtype=torch.float32), supports,
    )  # fmt: skip


def group_advantages(
    batch: RolloutBatch, rewards: Sequence[float] | Tensor | Callable[[Sample], float], eps: float = 1e-4
) -> Tensor:
    """(reward - mean) / (std + eps) within each group: float32 [len(batch)]. rewards: one a sample, in order, or a function of it."""
    values = [float(rewards(s)) for s in batch] if callable(rewards) else [float(r) for r in rewards]
    if len(values) != len(batch):
        raise InvalidRequestError(f"{len(values)} rewards for {len(batch)} samples; give one a sample.", param="rewards")
    members: dict[int | str, list[int]] = {}
    for i, sample in enumerate(batch):
        members.setdefault(sample.group_id, []).append(i)
    out, given = torch.zeros(len(values)), torch.tensor(values)
    for indices in members.values():
        group = given[indices]
        out[indices] = (group - group.mean()) / (group.std(correction=1 if len(indices) > 1 else 0) + eps)
    return out
