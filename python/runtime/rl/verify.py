"""Does the trainer's forward see the numbers that the rollouts had? Reported, and raised on demand; never corrected (rl §6)."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from phloem.runtime.errors import MismatchError
from phloem.runtime.rl.sample import Sample, tensors_of

__all__ = ["Verification", "verify_module"]

SAMPLES_AT_ONCE = 8  # [8, L, V] float32 logits at a time


@dataclass(frozen=True, slots=True)
class Verification:
    """Over `tokens` drawn ids: |model logprob of the rollout - that of the module's forward|, mean and largest.

    k3: the KL estimate mean(r - 1 - log r) with r = module / rollout.   effective: effective sample size of the ratios, 1 is all.
    flips: positions where the module's argmax is another than the drawn token's under greedy draws.   worst: (sample, output index).
    """

    tokens: int
    mean: float
    max: float
    k3: float
    effective: float
    flips: int
    worst: tuple[int, int]


def verify_module(
    module: nn.Module, samples: Sequence[Sample], *, tol: float | None, autocast: Any = None, pad_id: int = 0
) -> Verification:
    drawn = [(i, s) for i, s in enumerate(samples) if s.output_ids]
    differences, where, flips = list[torch.Tensor](), list[tuple[int, int]](), 0
    device = next(module.parameters()).device
    for start in range(0, len(drawn), SAMPLES_AT_ONCE):
        some = drawn[start : start + SAMPLES_AT_ONCE]
        x = tensors_of([s for _, s in some], pad_id)
        with torch.no_grad(), autocast if autocast is not None else contextlib.nullcontext():
            logits = module(x.ids.to(device), attention_mask=x.attention_mask.to(device)).logits.float().cpu()
        for b, (i, s) in enumerate(some):
            first = len(s.prompt_ids) - 1
            at = [k for k, drawn_here in enumerate(s.loss_mask) if drawn_here]
            rows = logits[b, [first + k for k in at]]
            ids = torch.tensor([s.output_ids[k] for k in at])
            own = torch.log_softmax(rows.double(), -1).gather(1, ids[:, None])[:, 0]
            differences.append(own - torch.tensor([s.logprobs_model[k] for k in at], dtype=torch.float64))
            where += [(i, k) for k in at]
            if s.temperature == 0:
                flips += int((rows.argmax(-1) != ids).sum())
    delta = torch.cat(differences) if differences else torch.zeros(0, dtype=torch.float64)
    if not len(delta):
        return Verification(0, 0.0, 0.0, 0.0, 1.0, 0, (-1, -1))
    ratio, size = delta.exp(), delta.abs()
    worst = int(size.argmax())
    found = Verification(
        tokens=len(delta), mean=float(size.mean()), max=float(size.max()), k3=float((ratio - 1 - delta).mean()),
        effective=float(ratio.sum() ** 2 / (len(ratio) * (ratio**2).sum())), flips=flips, worst=where[worst],
    )  # fmt: skip
    if tol is not None and not found.max <= tol:
        i, k = found.worst
        raise MismatchError(
            f"logprobs of rollout and training forward differ by {found.max:.3g} (mean {found.mean:.3g}), tol is {tol:g}; worst at sample {i}, "
            f"output index {k}, token {samples[i].output_ids[k]}. Check dtype, autocast, dropout and the version of the weights."
        )
    return found
