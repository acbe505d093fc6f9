"""Log-probabilities as a trainer recomputes them: over the support that each token was drawn from, with gradients.

    logits [B, L, V] ──/ T──► rows that have a loss ──┬─ support None:  logsumexp over V
                                                      ├─ "ids":         logsumexp over the ids, gathered
                                                      └─ "bits":        logsumexp over the masked row, equal masks together
Trained this way the policy that learns is the one that was sampled (rl L4); over the full vocabulary it is another.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from phloem.runtime.errors import InvalidRequestError
from phloem.runtime.request import Support
from phloem.runtime.rl.sample import RolloutTensors

__all__ = ["support_mask", "token_logprobs"]

ROWS_AT_ONCE = 256  # of masked rows: [256, V] float32 is 50 MB at 49 152 ids


def support_mask(support: Support | None, vocabulary: int) -> Tensor:
    """bool [vocabulary]: what could be drawn. Ids beyond the support's own vocabulary could not."""
    mask = torch.ones(vocabulary, dtype=torch.bool)
    if support is None:
        return mask
    if support.kind == "ids":
        mask[:] = False
        mask[torch.from_numpy(np.frombuffer(support.data, "<i4").astype(np.int64))] = True
        return mask
    bits = np.unpackbits(np.frombuffer(support.data, np.uint8), bitorder="little")[:vocabulary]
    mask[:] = False
    mask[: len(bits)] = torch.from_numpy(bits.astype(np.bool_))
    return mask


def token_logprobs(logits: Tensor, x: RolloutTensors, *, support: bool = True) -> Tensor:
    """Logprob of each token under the distribution that it was drawn from; [B, L - 1] float32, 0 where loss_mask is 0.

    logits: [B, L, V] of the module on x.ids.   support=False: over the full vocabulary, which equals sampled + logmass.
    A temperature of 0 has no such distribution: InvalidRequestError.
    """
    if logits.shape[:2] != x.ids.shape:
        raise InvalidRequestError(
            f"logits are {tuple(logits.shape)} for ids {tuple(x.ids.shape)}; expected [B, L, V].", param="logits"
        )
    if bool((x.temperature == 0).any()):
        raise InvalidRequestError(
            "samples drawn at temperature 0 have no logprobs to train on; draw at one above 0.", param="temperature"
        )
    at = x.loss_mask.nonzero()  # [N, 2]
    b, t = at[:, 0], at[:, 1]
    rows = logits[b, t].float() / x.temperature[b].to(logits.device)[:, None]
    targets = x.ids[b, t + 1].to(rows.device)
    chosen = rows.gather(1, targets[:, None])[:, 0]
    kinds = [x.supports[int(i)][int(j)] if support else None for i, j in at.tolist()]
    normaliser = _normaliser(rows, kinds)
    return torch.zeros_like(x.loss_mask, device=rows.device).index_put((b, t), chosen - normaliser)


def _normaliser(rows: Tensor, supports: list[Support | None]) -> Tensor:
    plain = [i for i, s in enumerate(supports) if s is None]
    listed = [i for i, s in enumerate(supports) if s is not None and s.kind == "ids"]
    masked = [i for i, s in enumerate(supports) if s is not None and s.kind == "bits"]
    parts, order = list[Tensor](), list[int]()
    if plain:
        parts.append(torch.logsumexp(rows[plain] if len(plain) < len(supports) else rows, -1))
        order += plain
    if listed:
        ids = [np.frombuffer(s.data, "<i4") for s in (supports[i] for i in listed) if s is not None]
        widest = max(len(row) for row in ids)
        index, keep = np.zeros((len(ids), widest), np.int64), np.zeros((len(ids), widest), np.bool_)
        for i, row in enumerate(ids):
            index[i, : len(row)], keep[i, : len(row)] = row, True
        values = rows[listed].gather(1, torch.from_numpy(index).to(rows.device))
        parts.append(torch.logsumexp(values.masked_fill(~torch.from_numpy(keep).to(rows.device), -torch.inf), -1))
        order += listed
    unique: dict[bytes, int] = {}
    for start in range(0, len(masked), ROWS_AT_ONCE):
        some = masked[start : start + ROWS_AT_ONCE]
        unique.clear()
        which = [unique.setdefault(supports[i].data, len(unique)) for i in some]  # type: ignore[union-attr]
        table = torch.stack([support_mask(Support("bits", data), rows.shape[1]) for data in unique]).to(rows.device)
        parts.append(torch.logsumexp(rows[some].masked_fill(~table[which], -torch.inf), -1))
        order += some
    if not parts:
        return rows.new_zeros(0)
    inverse = torch.empty(len(order), dtype=torch.int64)
    inverse[order] = torch.arange(len(order))
    return torch.cat(parts)[inverse.to(rows.device)]
