"""A GPU that is as unordered as a GPU may be, and FlashInfer by its definition: what cuda's files run on without a GPU.

FakeDevice       work waits in its stream until something waits for it, or chance runs some: never later than the events allow,
                 never in another order than they force. Pinned memory that the host rewrites too early is read changed.
FakeFlashInfer   float32 torch, one row at a time, of exactly what the docstrings of the installed package say. Every call is bound
                 to the installed package's signature first, and counted by name.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import math
import random
from collections import Counter, deque
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from phloem.runtime.backends.cuda.lanes import Event, Work

__all__ = ["FakeDevice", "FakeFlashInfer", "pretend"]


class FakeStream:
    def __init__(self, name: str) -> None:
        self.name = name
        self.queue: deque[tuple[str, Any]] = deque()


class FakeEvent:
    def __init__(self, device: FakeDevice, stream: FakeStream) -> None:
        self.device, self.stream, self.reached, self.at = device, stream, False, 0

    def wait(self) -> None:
        self.device.host_waits += not self.reached
        self.device.until(lambda: self.reached)

    def done(self) -> bool:
        return self.reached

    def seconds_since(self, earlier: Event) -> float:
        assert isinstance(earlier, FakeEvent) and self.reached and earlier.reached, "a time of an event that has not happened"
        return (self.at - earlier.at) / 1e6


class FakeGraph:
    def __init__(self, work: Work) -> None:
        self.work, self.replays = work, 0

    def replay(self) -> None:
        self.replays += 1
        self.work()


class FakeDevice:
    """seed: of chance.   eagerness: how much of what could run runs while the host goes on; 0 is nothing before it must.
    capture_bytes: what a capture takes from free_bytes(); one that does not fit raises, as torch does."""

    def __init__(self, seed: int = 0, eagerness: float = 0.0, free: int = 1 << 30, capture_bytes: int = 1 << 20) -> None:
        self.torch_device, self.name, self.capability, self.memory_bytes = torch.device("cpu"), "fake", (9, 0), free
        self.rng, self.eagerness = random.Random(seed), eagerness
        self.streams: list[FakeStream] = []
        self.clock = self.host_waits = 0
        self.free, self.capture_bytes, self.graphs = free, capture_bytes, list[FakeGraph]()

    def stream(self, name: str) -> FakeStream:
        self.streams.append(FakeStream(name))
        return self.streams[-1]

    def run(self, stream: Any, work: Work) -> None:
        stream.queue.append(("work", work))
        self._perhaps()

    def record(self, stream: Any, *, timed: bool = False) -> FakeEvent:
        event = FakeEvent(self, stream)
        stream.queue.append(("record", event))
        self._perhaps()
        return event

    def wait(self, stream: Any, event: Event) -> None:
        stream.queue.append(("wait", event))

    def synchronize(self) -> None:
        self.until(lambda: all(not s.queue for s in self.streams))

    def pinned(self, nbytes: int) -> Tensor:
        return torch.full((nbytes,), 0x5A, dtype=torch.uint8)

    def capture(self, work: Work, beside: Any = None) -> FakeGraph:
        assert all(not s.queue for s in self.streams), "something was under way during a capture"
        assert beside is None or beside in self.graphs, "memory of a graph that is not this device's"
        if self.capture_bytes > self.free:
            raise torch.OutOfMemoryError("CUDA out of memory (the fake's)")
        work()
        self.free -= self.capture_bytes
        self.graphs.append(FakeGraph(work))
        return self.graphs[-1]

    def free_bytes(self) -> int:
        return self.free

    def settle(self) -> None:
        pass  # what torch does outside of `run` is done at once

    def release(self) -> None:
        assert all(not s.queue for s in self.streams), "memory was given back that something under way may use"

    def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            runnable = [s for s in self.streams if self._runnable(s)]
            assert runnable, "the host waits for something that cannot happen"
            self._step(self.rng.choice(runnable))

    def _perhaps(self) -> None:
        while self.rng.random() < self.eagerness:
            runnable = [s for s in self.streams if self._runnable(s)]
            if not runnable:
                return
            self._step(self.rng.choice(runnable))

    def _runnable(self, stream: FakeStream) -> bool:
        return bool(stream.queue) and not (stream.queue[0][0] == "wait" and not stream.queue[0][1].reached)

    def _step(self, stream: FakeStream) -> None:
        kind, what = stream.queue.popleft()
        self.clock += 1
        if kind == "work":
            what()
        elif kind == "record":
            what.reached, what.at = True, self.clock


def _state(q: Tensor, kv: tuple[Tensor, Tensor], plan: dict[str, Any], *, causal: bool) -> tuple[Tensor, Tensor]:
    """(out, log-sum-exp) of each token over the keys of its entry, in float32. Base 2 or e does not matter: only merges read it."""
    k_pages, v_pages = kv
    page_size = k_pages.shape[1]
    out, lse = torch.zeros(q.shape), torch.full(q.shape[:2], -math.inf)
    group = q.shape[1] // k_pages.shape[2]
    qo, kp, ki, last = (plan[n].tolist() for n in ("qo_indptr", "kv_indptr", "kv_indices", "last_page_len"))
    assert qo[-1] == len(q) and kp[-1] == len(ki) and len(last) == len(qo) - 1 == len(kp) - 1
    for b in range(len(last)):
        pages = ki[kp[b] : kp[b + 1]]
        assert pages and 1 <= last[b] <= page_size
        kv_len, tokens = (len(pages) - 1) * page_size + last[b], qo[b + 1] - qo[b]
        keys, values = (t[pages].float().flatten(0, 1)[:kv_len].repeat_interleave(group, dim=1) for t in (k_pages, v_pages))
        scores = torch.einsum("thd,jhd->thj", q[qo[b] : qo[b + 1]].float(), keys) * plan["sm_scale"]
        if plan["soft_cap"]:
            scores = plan["soft_cap"] * torch.tanh(scores / plan["soft_cap"])
        at, j = kv_len - tokens + torch.arange(tokens)[:, None], torch.arange(kv_len)[None]
        seen = torch.ones(tokens, kv_len, dtype=torch.bool)
        if causal:
            seen &= j <= at
        if plan["window_left"] >= 0:
            assert causal, "a window without a causal mask has no place"
            seen &= j >= at - plan["window_left"]
        scores = scores.masked_fill(~seen[:, None], -math.inf)
        lse[qo[b] : qo[b + 1]] = scores.logsumexp(-1)
        out[qo[b] : qo[b + 1]] = torch.einsum("thj,jhd->thd", scores.softmax(-1), values)
    return out, lse


def _merge(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    lse = torch.logaddexp(a[1], b[1])
    return a[0] * (a[1] - lse).exp()[..., None] + b[0] * (b[1] - lse).exp()[..., None], lse


class FakeFlashInfer:
    """calls: name -> how often; `Class.method` for the wrappers."""

    def __init__(self) -> None:
        import flashinfer

        self._real = flashinfer
        self.calls: Counter[str] = Counter()
        fake = self

        class Wrapper:
            """What all wrappers share: a constructor, `plan`, `run`, each bound to the real one's signature."""

            real: Any
            causal = True

            def __init__(self, *args: Any, **kwargs: Any) -> None:
                self.options = fake.bound(f"{self.real.__name__}.__init__", self.real.__init__, (self, *args), kwargs)
                self.plans: list[dict[str, Any]] = []

            def plan(self, *args: Any, **kwargs: Any) -> None:
                a = fake.bound(f"{self.real.__name__}.plan", self.real.plan, (self, *args), kwargs)
                self.plans = self.read(a)

            def read(self, a: dict[str, Any]) -> list[dict[str, Any]]:
                raise NotImplementedError

            def run(self, *args: Any, **kwargs: Any) -> Tensor:
                a = fake.bound(f"{self.real.__name__}.run", self.real.run, (self, *args), kwargs)
                q, kv = a["q"], a["paged_kv_cache"]
                assert self.plans, "run before plan"
                # The kernels convert fp8 and read every other 16 bits as the query's kind. float32 is the stand-ins' own.
                assert q.dtype in (kv[0].dtype, torch.float32) or kv[0].dtype.itemsize == 1, (q.dtype, kv[0].dtype)
                assert q.stride(-1) == 1 and kv[0].stride() == kv[1].stride()
                for plan in self.plans:
                    assert (q.dtype, kv[0].dtype) == (plan["q_dtype"], plan["kv_dtype"] or plan["q_dtype"]), (
                        "planned for other dtypes"
                    )
                    assert q.shape[1:] == (plan["heads"], plan["dim"]) and kv[0].shape[1:] == (
                        plan["page_size"],
                        plan["kv_heads"],
                        plan["dim"],
                    )
                *shared, own = self.plans
                state = _state(q, kv, own, causal=self.causal)
                for plan in shared:
                    state = _merge(state, _state(q, kv, plan, causal=False))
                return state[0].to(q.dtype)

        def common(a: dict[str, Any]) -> dict[str, Any]:
            return {
                "heads": a["num_qo_heads"], "kv_heads": a["num_kv_heads"], "dim": a.get("head_dim", a.get("head_dim_qk")), "page_size": a["page_size"],
                "sm_scale": a["sm_scale"], "soft_cap": a["logits_soft_cap"] or 0.0, "window_left": a["window_left"],
                "q_dtype": a["q_data_type"], "kv_dtype": a["kv_data_type"],
            }  # fmt: skip

        def csr(qo: Tensor, kv: Tensor, indices: Tensor, last: Tensor) -> dict[str, Any]:
            assert all(t.dtype == torch.int32 for t in (qo, kv, indices, last))
            # A copy at once: the real plan copies to the device, so what the host does to the arrays later must not matter.
            return {
                "qo_indptr": qo.clone(),
                "kv_indptr": kv.clone(),
                "kv_indices": indices.clone(),
                "last_page_len": last.clone(),
            }

        class Prefill(Wrapper):
            real = flashinfer.BatchPrefillWithPagedKVCacheWrapper

            def read(self, a: dict[str, Any]) -> list[dict[str, Any]]:
                self.causal = a["causal"]
                return [
                    common(a) | csr(a["qo_indptr"], a["paged_kv_indptr"], a["paged_kv_indices"], a["paged_kv_last_page_len"])
                ]

        class Decode(Wrapper):
            real = flashinfer.BatchDecodeWithPagedKVCacheWrapper

            def read(self, a: dict[str, Any]) -> list[dict[str, Any]]:
                rows = len(a["last_page_len"])
                if self.options["use_cuda_graph"]:
                    assert len(self.options["paged_kv_last_page_len_buffer"]) == rows, "a captured batch has one size"
                    assert len(a["indices"]) <= len(self.options["paged_kv_indices_buffer"])
                return [
                    common(a) | csr(torch.arange(rows + 1, dtype=torch.int32), a["indptr"], a["indices"], a["last_page_len"])
                ]

        class Cascade(Wrapper):
            real = flashinfer.MultiLevelCascadeAttentionWrapper

            def read(self, a: dict[str, Any]) -> list[dict[str, Any]]:
                levels = list(
                    zip(
                        a["qo_indptr_arr"],
                        a["paged_kv_indptr_arr"],
                        a["paged_kv_indices_arr"],
                        a["paged_kv_last_page_len"],
                        strict=True,
                    )
                )
                assert len(levels) == self.options["num_levels"] and a["causal"]
                return [common(a) | csr(*level) for level in levels]

        self.BatchPrefillWithPagedKVCacheWrapper = Prefill
        self.BatchDecodeWithPagedKVCacheWrapper = Decode
        self.MultiLevelCascadeAttentionWrapper = Cascade

    def bound(self, name: str, real: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        found = inspect.signature(real).bind(*args, **kwargs)
        found.apply_defaults()
        self.calls[name] += 1
        return dict(found.arguments)

    def rmsnorm(self, *args: Any, **kwargs: Any) -> Tensor:
        a = self.bound("rmsnorm", self._real.rmsnorm, args, kwargs)
        x: Tensor = a["input"].float()
        assert a["input"].dtype == a["weight"].dtype
        scaled = x * (x.pow(2).mean(-1, keepdim=True) + a["eps"]).rsqrt() * a["weight"].float()
        return scaled.to(a["input"].dtype)

    def fused_add_rmsnorm(self, *args: Any, **kwargs: Any) -> None:
        a = self.bound("fused_add_rmsnorm", self._real.fused_add_rmsnorm, args, kwargs)
        assert a["input"].dtype == a["residual"].dtype == a["weight"].dtype
        a["residual"].copy_(a["residual"].float() + a["input"].float())
        x = a["residual"].float()
        a["input"].copy_(x * (x.pow(2).mean(-1, keepdim=True) + a["eps"]).rsqrt() * a["weight"].float())

    def silu_and_mul(self, *args: Any, **kwargs: Any) -> Tensor:
        a = self.bound("silu_and_mul", self._real.silu_and_mul, args, kwargs)
        gate, up = a["input"].float().chunk(2, dim=-1)
        result: Tensor = (torch.nn.functional.silu(gate) * up).to(a["input"].dtype)
        return result

    def apply_rope_with_cos_sin_cache_inplace(self, *args: Any, **kwargs: Any) -> None:
        real = self._real.apply_rope_with_cos_sin_cache_inplace
        a = self.bound("apply_rope_with_cos_sin_cache_inplace", real, args, kwargs)
        assert a["is_neox"] and a["cos_sin_cache"].dtype == torch.float32
        cos, sin = (t[:, None] for t in a["cos_sin_cache"][a["positions"].long()].chunk(2, dim=-1))
        for flat in (a["query"], a["key"]):
            x = flat.view(flat.shape[0], -1, a["head_size"])
            half = cos.shape[-1]
            one, two = x[..., :half].float(), x[..., half : 2 * half].float()
            x[..., : 2 * half] = torch.cat([one * cos - two * sin, two * cos + one * sin], dim=-1).to(x.dtype)

    def append_paged_kv_cache(self, *args: Any, **kwargs: Any) -> None:
        a = self.bound("append_paged_kv_cache", self._real.append_paged_kv_cache, args, kwargs)
        k_pages, v_pages = a["paged_kv_cache"]
        assert a["append_key"].dtype == a["append_value"].dtype == k_pages.dtype
        assert a["positions"].dtype == a["kv_indptr"].dtype == a["kv_indices"].dtype == torch.int32
        page_size = k_pages.shape[1]
        at = a["kv_indptr"][a["batch_indices"].long()].long() * page_size + a["positions"].long()
        page, entry = a["kv_indices"][at // page_size].long(), at % page_size
        for pages, new in ((k_pages, a["append_key"]), (v_pages, a["append_value"])):
            raw = pages.view(torch.uint8).view(*pages.shape[:3], -1)
            raw[page, entry] = new.contiguous().view(torch.uint8).view(*new.shape[:2], -1)


@contextlib.contextmanager
def pretend(**device: Any) -> Iterator[list[FakeDevice]]:
    """`device="cuda"` means a fake: Engine(device="cuda") and everything below it run on FakeDevice(**device). Yields those made."""
    from phloem.runtime.backends import cuda
    from phloem.runtime.backends.cuda import device as real
    from phloem.runtime.backends.cuda.device import Gpu

    made: list[FakeDevice] = []
    fi = FakeFlashInfer()

    def make(index: int = 0) -> FakeDevice:
        made.append(FakeDevice(**device))
        return made[-1]

    def imported(name: str, *rest: Any) -> Any:
        return fi if name == "flashinfer" else importlib.import_module(name, *rest)

    with contextlib.ExitStack() as stack:
        for target, name, value in (
            (real, "find_gpu", lambda index=0: Gpu("fake", 8 << 30, (9, 0))),
            (cuda, "find_gpu", lambda index=0: Gpu("fake", 8 << 30, (9, 0))),
            (cuda, "missing", lambda: None),
            (cuda, "CudaDevice", make),
            (cuda, "importlib", SimpleNamespace(import_module=imported)),
        ):
            stack.enter_context(patch.object(target, name, value))
        yield made
