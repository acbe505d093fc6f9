"""DeviceSampler: draws and scores where the logits are. The host packs what it knows into one copy, the device answers with one.

    SampleSpec ──prepare──► DeviceDraw      arrays in pinned memory                        host
        upload ─ compute(logits) ─► tokens (for FUTURE), results                           compute stream
        fetch ─► pinned memory                                                             copies stream, behind an event
    outcomes() ──► Sampled | RowFailure                                                    host, after the copy

sampler.py says what is computed, device_draw.py how. FlashInfer's own sampling kernels are not used: they seed Philox with the row's
place in the batch, so the same seed would draw another token in another batch, which M2 forbids.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from phloem.runtime.backends.cuda.lanes import Device, Stream
from phloem.runtime.backends.cuda.mask import Mask, masked_logits, unpack_bits
from phloem.runtime.backends.cuda.staging import Bundle, Staging
from phloem.runtime.executor import device_draw as dd
from phloem.runtime.executor.penalties import CountsCache
from phloem.runtime.executor.philox import MASK32, MASK64, MULTIPLIERS, ROUNDS, WEYL
from phloem.runtime.executor.sampler import (
    MIN_LOGPROB,
    ScoreRow,
    dead_end,
    has_penalties,
    legal_ids,
    mask_bits,
    not_finite,
    rounded,
)
from phloem.runtime.executor.support import Supports, cuts
from phloem.runtime.request import TokenLogprob
from phloem.runtime.step import NO_SLOT, RowFailure, Sampled, SampleRow, SampleSpec

__all__ = ["DeviceDraw", "DeviceSampler", "DeviceScore", "uniforms"]

DRAWN, NOT_FINITE, DEAD_END = 0, 1, 2


def uniforms(seeds: Sequence[int], samples: Sequence[int], positions: Sequence[int]) -> NDArray[np.float64]:
    """philox.uniform of each triple, all at once."""
    keys = np.array([s & MASK64 for s in seeds], np.uint64)
    p, i = (np.array([v & MASK64 for v in values], np.uint64) for values in (positions, samples))
    low, w32 = np.uint64(MASK32), np.uint64(32)
    c0, c1, c2, c3 = p & low, p >> w32, i & low, i >> w32
    k0, k1 = keys & low, keys >> w32
    for _ in range(ROUNDS):
        p0, p1 = c0 * np.uint64(MULTIPLIERS[0]), c2 * np.uint64(MULTIPLIERS[1])  # 32 x 32 bits: no overflow
        c0, c1, c2, c3 = (p1 >> w32) ^ c1 ^ k0, p1 & low, (p0 >> w32) ^ c3 ^ k1, p0 & low
        k0, k1 = (k0 + np.uint64(WEYL[0])) & low, (k1 + np.uint64(WEYL[1])) & low
    words: NDArray[np.float64] = ((c1 << w32 | c0) >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return words


class _Answer:
    """What comes back: int64 [n, i] and float64 [n, f], and bit rows for some. Copied on another stream, read after its event."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.on_device: dict[str, Tensor] = {}
        self.host: dict[str, Tensor] = {}

    def fetch(self) -> None:
        """Within Device.run, on the copies stream."""
        for name, tensor in self.on_device.items():
            pinned = self._device.pinned(tensor.numel() * tensor.element_size())
            self.host[name] = pinned.view(tensor.dtype).view(tensor.shape)
            self.host[name].copy_(tensor, non_blocking=True)


class DeviceDraw(_Answer):
    """One step's draws. tokens: int32 [rows] on the device once computed, 0 for a row that failed."""

    def __init__(self, sampler: DeviceSampler, spec: SampleSpec, logit_rows: Sequence[int]) -> None:
        super().__init__(sampler.device)
        self._s, self.rows = sampler, list(spec.rows)
        rows, vocab = self.rows, sampler.vocab_size
        self._hot = [i for i, r in enumerate(rows) if r.sampling.temperature != 0.0]
        self._top = max((r.sampling.top_logprobs for r in rows if r.sampling.logprobs is not None), default=0)
        self._said = [i for i, r in enumerate(rows) if r.sampling.logprobs is not None]
        self._both = [i for i in self._said if rows[i].sampling.logprobs == "both"]
        hot = [rows[i] for i in self._hot]
        arrays: dict[str, NDArray[Any]] = {
            "at": np.array(logit_rows, np.int64),
            "hot": np.array(self._hot, np.int64),
            "temperature": np.array([r.sampling.temperature for r in hot], np.float64),
            "u": uniforms([r.seed for r in hot], [r.sample for r in hot], [r.position for r in hot]),
            "said": np.array(self._said, np.int64),
            "both": np.array(self._both, np.int64),
            "both_cut": np.array([cuts(rows[i].sampling, vocab) for i in self._both], np.bool_),
            "cold": np.array([rows[i].sampling.temperature == 0.0 for i in self._said], np.bool_),
            "of_drawn": np.array([rows[i].sampling.logprobs == "sampled" for i in self._said], np.bool_),
        }
        place = {i: j for j, i in enumerate(self._hot)}
        pairs = [(k, place[i]) for k, i in enumerate(self._said) if i in place]
        arrays["said_hot"], arrays["hot_said"] = (np.array(v, np.int64) for v in (zip(*pairs) if pairs else ((), ())))
        keep = [i for i, r in enumerate(rows) if r.slot != NO_SLOT]
        arrays["kept"], arrays["slots"] = np.array(keep, np.int64), np.array([rows[i].slot for i in keep], np.int64)
        self._constrain(arrays, spec)
        cut = [(j, r.sampling) for j, r in enumerate(hot) if cuts(r.sampling, vocab)]
        if cut:
            arrays["cut"] = np.array([j for j, _ in cut], np.int64)
            arrays["top_k"] = np.array([max(s.top_k, 0) for _, s in cut], np.int64)
            arrays["top_p"] = np.array([s.top_p for _, s in cut], np.float64)
            with np.errstate(divide="ignore"):
                arrays["log_min_p"] = np.log(np.array([s.min_p for _, s in cut], np.float64))
        self._edit(arrays)
        self.bundle: Bundle = sampler.staging.put(arrays)
        self.tokens: Tensor | None = None

    def compute(self, logits: Tensor) -> None:
        """Within Device.run, after `bundle.upload`."""
        d, s, vocab = self.bundle.device, self._s, self._s.vocab_size
        raw = logits.index_select(0, d["at"])
        good = dd.finite(raw, vocab)
        # A bad row must not spoil sums of others, nor index out of range: it is computed as zeros and answered as failed.
        x = torch.where(good[:, None], raw[:, :vocab], 0.0)
        penalties = (
            tuple(d[f"penalty_{n}"] for n in ("row", "id", "times", "repetition", "frequency", "presence"))
            if "penalty_row" in d
            else None
        )
        bias = tuple(d[f"bias_{n}"] for n in ("row", "id", "value")) if "bias_row" in d else None
        if penalties is not None or bias is not None:
            dd.edit(x, penalties, bias)
        if "words" in d:
            x = s.mask(x, d["words"], d["masked"])
        top, first = dd.first_best(x)
        alive = top > -torch.inf
        x = torch.where(alive[:, None], x, 0.0)
        top = torch.where(alive, top, 0.0)
        tokens = torch.where(alive, first, 0)
        hot = d["hot"]
        cut = dd.Cut(d["cut"], d["top_k"], d["top_p"], d["log_min_p"]) if "cut" in d else None
        weighed = None
        if self._hot:
            weighed = dd.weigh(x[hot], top[hot], d["temperature"], s.shift, cut)
            tokens = tokens.index_copy(0, hot, dd.draw(weighed, d["u"]))
        status = torch.where(good, torch.where(alive, DRAWN, DEAD_END), NOT_FINITE)
        tokens = torch.where(status == DRAWN, tokens, 0)
        self.tokens = tokens.int()
        self.on_device["draws"] = torch.stack([status, tokens], dim=1)
        if self._said:
            self._say(torch.where(good[:, None], raw, 0.0), x, tokens, weighed)

    def keep_tokens(self, last_token: Tensor) -> None:
        """Within Device.run: where FUTURE tokens are read."""
        assert self.tokens is not None
        last_token.index_copy_(0, self.bundle.device["slots"], self.tokens.index_select(0, self.bundle.device["kept"]))

    def outcomes(self) -> list[Sampled | RowFailure]:
        """After the copy."""
        status, tokens = self.host["draws"].t().tolist()
        said = dict(zip(self._said, range(len(self._said))))
        found: list[Sampled | RowFailure] = []
        for i, row in enumerate(self.rows):
            if status[i] == NOT_FINITE:
                found.append(not_finite(row.request_id, f"for output position {row.position}"))
            elif status[i] == DEAD_END:
                found.append(dead_end(row))
            else:
                found.append(
                    Sampled(row.request_id, tokens[i], self._logprob(row, tokens[i], said[i], i) if i in said else None)
                )
        return found

    # ---------------------------------------------------------------------------------------------------------- inside

    def _constrain(self, arrays: dict[str, NDArray[Any]], spec: SampleSpec) -> None:
        """Packed hard masks of the rows that have any: int32 words, and which rows."""
        words, which, s = list[NDArray[np.int32]](), list[int](), self._s
        for i, row in enumerate(self.rows):
            if row.mask is None and row.sampling.allowed_token_ids is None and not row.block:
                continue
            bits = None
            if row.mask is not None:
                assert spec.masks is not None, "a row names a mask, the spec has none"
                if row.sampling.allowed_token_ids is None and not row.block:  # as it stands: no unpacking for the common case
                    plain = np.zeros(s.num_words, np.int32)
                    given = spec.masks[row.mask][: s.num_words]
                    plain[: len(given)] = given
                    words.append(plain)
                    which.append(i)
                    continue
                bits = mask_bits(spec.masks[row.mask], s.vocab_size)
            legal = legal_ids(bits, row.sampling.allowed_token_ids, row.block, s.vocab_size)
            padded = np.zeros(32 * s.num_words, np.bool_)
            padded[: s.vocab_size] = legal
            words.append(np.packbits(padded, bitorder="little").view(np.int32))
            which.append(i)
        if words:
            arrays["words"], arrays["masked"] = np.stack(words), np.array(which, np.int64)

    def _edit(self, arrays: dict[str, NDArray[Any]]) -> None:
        row, ids, times, params = list[int](), list[NDArray[Any]](), list[NDArray[Any]](), list[tuple[float, float, float]]()
        bias = [
            (i, t, b) for i, r in enumerate(self.rows) for t, b in r.sampling.logit_bias.items() if 0 <= t < self._s.vocab_size
        ]
        for i, r in enumerate(self.rows):
            if has_penalties(r.sampling):
                found, count = self._s.counts.get(r.request_id, r.history, r.num_prompt)
                ids.append(found)
                times.append(count)
                row += [i] * len(found)
                params += [(r.sampling.repetition_penalty, r.sampling.frequency_penalty, r.sampling.presence_penalty)] * len(
                    found
                )
        if row:
            values = np.array(params, np.float64)
            arrays |= {
                "penalty_row": np.array(row, np.int64), "penalty_id": np.concatenate(ids).astype(np.int64),
                "penalty_times": np.concatenate(times).astype(np.float64), "penalty_repetition": values[:, 0].astype(np.float32),
                "penalty_frequency": values[:, 1].copy(), "penalty_presence": values[:, 2].copy(),
            }  # fmt: skip
        if bias:
            arrays |= {
                "bias_row": np.array([i for i, _, _ in bias], np.int64), "bias_id": np.array([t for _, t, _ in bias], np.int64),
                "bias_value": np.array([b for _, _, b in bias], np.float64),
            }  # fmt: skip

    def _say(self, raw: Tensor, x: Tensor, tokens: Tensor, weighed: dd.Weighed | None) -> None:
        """float64 [n, 3 + top]: model, sampled, mass, alternatives; their ids int64 [n, top]. One layout for all kinds."""
        d, s = self.bundle.device, self._s
        rows = d["said"]
        chosen, wide = tokens[rows][:, None], raw[rows]
        top, total = dd.logsumexp(wide, None, s.shift)
        model = wide.double().gather(1, chosen)[:, 0] - top - total
        sampled, mass = torch.zeros_like(model), torch.zeros_like(model)
        values, ids = dd.best(wide[:, : s.vocab_size], self._top)
        alternatives = values.double() - (top + total)[:, None]
        kept = torch.zeros((len(self.rows), s.vocab_size), dtype=torch.bool, device=raw.device) if self._both else None
        if kept is not None:
            kept.scatter_(1, tokens[:, None], True)  # temperature 0: the argmax alone
        drawn_alternatives, drawn_ids = self._only_the_token(chosen, d["cold"])
        k, j = d["said_hot"], d["hot_said"]
        if weighed is not None and len(k):
            z, norm = weighed.z[j], dd.log_total(weighed.total[j], s.shift)
            own = z.gather(1, chosen[k])[:, 0] - norm
            sampled[k] = own
            t = d["temperature"][j]
            hot_top, hot_total = dd.logsumexp(wide[k], t, s.shift)
            scaled = wide[k].double().gather(1, chosen[k])[:, 0] / t.clamp(min=dd.MIN_TEMPERATURE) - hot_top - hot_total
            mass[k] = scaled - own
            v, w = dd.best(torch.where(weighed.weights[j] > 0, x[rows[k]], -torch.inf), self._top)
            drawn_ids[k] = w
            drawn_alternatives[k] = torch.where(v > -torch.inf, z.gather(1, w) - norm[:, None], -torch.inf)
            if kept is not None:
                kept[rows[k]] = weighed.weights[j] > 0
        of_drawn = d["of_drawn"][:, None]
        self.on_device["logprobs"] = torch.cat(
            [torch.stack([model, sampled, mass], dim=1), torch.where(of_drawn, drawn_alternatives, alternatives)], dim=1
        )
        self.on_device["alternatives"] = torch.where(of_drawn, drawn_ids, ids)
        if kept is not None:
            self.on_device["support"] = dd.pack_bits(self._support(kept, x))

    def _support(self, kept: Tensor, x: Tensor) -> Tensor:
        """bool [both, vocab]: what a filter left, or all that is legal where none is on."""
        legal = x > -torch.inf
        both = self.bundle.device["both"]
        return torch.where(self.bundle.device["both_cut"][:, None], kept[both], legal[both])

    def _only_the_token(self, chosen: Tensor, cold: Tensor) -> tuple[Tensor, Tensor]:
        values = torch.full((len(chosen), self._top), -torch.inf, dtype=torch.float64, device=chosen.device)
        ids = torch.zeros((len(chosen), self._top), dtype=torch.int64, device=chosen.device)
        if self._top:
            values[:, 0] = torch.where(cold, 0.0, -torch.inf)
            ids[:, 0] = chosen[:, 0]
        return values, ids

    def _logprob(self, row: SampleRow, token: int, k: int, i: int) -> TokenLogprob:
        kind, count = row.sampling.logprobs, row.sampling.top_logprobs
        model, sampled, mass, *values = self.host["logprobs"][k].tolist()
        ids = self.host["alternatives"][k].tolist()
        top = tuple((t, rounded(v)) for t, v in list(zip(ids, values))[:count] if v > -np.inf)
        if kind == "sampled":
            return TokenLogprob(token, rounded(sampled), top)
        if kind == "model":
            return TokenLogprob(token, rounded(model), top)
        words = self.host["support"][self._both.index(i)].numpy().view(np.uint32)
        return TokenLogprob(token, rounded(model), top, rounded(sampled), _mass(mass), self._s.supports.of_words(words))


class DeviceScore(_Answer):
    """Logprobs of given tokens."""

    def __init__(self, sampler: DeviceSampler, rows: Sequence[ScoreRow]) -> None:
        super().__init__(sampler.device)
        self._s, self.rows = sampler, list(rows)
        self._top = max((r.top for r in rows), default=0)
        under = [(i, r.under) for i, r in enumerate(rows) if r.under is not None and r.under.temperature != 0.0]
        arrays: dict[str, NDArray[Any]] = {
            "at": np.array([r.row for r in rows], np.int64),
            "target": np.array([r.target for r in rows], np.int64),
            "under": np.array([i for i, _ in under], np.int64),
            "temperature": np.array([u.temperature for _, u in under], np.float64),
        }
        if under:
            arrays["words"] = np.stack([sampler.supports.words(u.support).view(np.int32) for _, u in under])
        self.bundle = sampler.staging.put(arrays)

    def compute(self, logits: Tensor) -> None:
        d, s = self.bundle.device, self._s
        raw = logits.index_select(0, d["at"])
        good = dd.finite(raw, s.vocab_size)
        raw = torch.where(good[:, None], raw, 0.0)
        target = d["target"][:, None]
        top, total = dd.logsumexp(raw, None, s.shift)
        model = raw.double().gather(1, target)[:, 0] - top - total
        values, ids = dd.best(raw[:, : s.vocab_size], self._top)
        sampled, mass = torch.zeros_like(model), torch.zeros_like(model)
        if "words" in d:
            rows, t = d["under"], d["temperature"]
            within = raw[rows]
            legal = unpack_bits(d["words"], s.vocab_size)
            x = torch.where(legal, within[:, : s.vocab_size], -torch.inf)
            best = x.amax(1)
            some = best > -torch.inf
            best = torch.where(some, best, 0.0)
            weighed = dd.weigh(torch.where(some[:, None], x, 0.0), best, t, s.shift, None)
            inside = target[rows].clamp(max=s.vocab_size - 1)
            ok = legal.gather(1, inside)[:, 0] & (target[rows][:, 0] < s.vocab_size)
            own = weighed.z.gather(1, inside)[:, 0] - dd.log_total(weighed.total, s.shift)
            hot_top, hot_total = dd.logsumexp(within, t, s.shift)
            scaled = within.double().gather(1, target[rows])[:, 0] / t.clamp(min=dd.MIN_TEMPERATURE) - hot_top - hot_total
            sampled = sampled.index_copy(0, rows, torch.where(ok, own, MIN_LOGPROB))
            mass = mass.index_copy(0, rows, torch.where(ok, scaled - own, 0.0))
        self.on_device["logprobs"] = torch.cat(
            [torch.stack([good.double(), model, sampled, mass], dim=1), values.double() - (top + total)[:, None]], dim=1
        )
        self.on_device["alternatives"] = ids

    def outcomes(self) -> list[TokenLogprob | None]:
        found: list[TokenLogprob | None] = []
        for row, (good, model, sampled, mass, *values), ids in zip(
            self.rows, self.host["logprobs"].tolist(), self.host["alternatives"].tolist(), strict=True
        ):
            top = tuple((t, rounded(v)) for t, v in list(zip(ids, values))[: row.top])
            if not good:
                found.append(None)
            elif row.under is None:
                found.append(TokenLogprob(row.target, rounded(model), top))
            else:
                found.append(TokenLogprob(row.target, rounded(model), top, rounded(sampled), _mass(mass), row.under.support))
        return found


class DeviceSampler:
    """vocab_size: ids that may be drawn; width >= vocab_size: logits a row. max_requests: whose counts are remembered."""

    def __init__(
        self, device: Device, *, vocab_size: int, width: int, max_requests: int = 1024, mask: Mask | None = None
    ) -> None:
        self.device, self.vocab_size, self.width = device, vocab_size, width
        self.num_words, self.shift = -(-vocab_size // 32), dd.shift_of(width)
        self.counts, self.supports = CountsCache(vocab_size, max_requests), Supports(vocab_size, width)
        self.staging = Staging(device, depth=4)  # a step may score and draw, and two steps are in flight
        self.mask = mask or masked_logits

    def prepare(self, spec: SampleSpec, logit_rows: Sequence[int]) -> DeviceDraw:
        return DeviceDraw(self, spec, logit_rows)

    def prepare_score(self, rows: Sequence[ScoreRow]) -> DeviceScore:
        return DeviceScore(self, rows)

    def sent(self, work: DeviceDraw | DeviceScore, stream: Stream) -> None:
        """Its upload is enqueued on `stream`."""
        self.staging.used(work.bundle, stream)


def _mass(value: float) -> float:
    return float(np.float32(value)) if abs(value) > 1e-12 else 0.0  # what float64 rounds is nothing that was cut
