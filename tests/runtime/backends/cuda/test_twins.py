"""The cases that a GPU is checked with run, and would notice a wrong kernel."""

from __future__ import annotations

from typing import Any

import torch

from tests.fake_device import FakeDevice, FakeFlashInfer
from tests.twins import cases, compare


def test_every_case_runs() -> None:
    every = list(cases())
    assert len({case.name for case in every}) == len(every) and any(case.first for case in every)
    for case in every:
        out = case.run(FakeFlashInfer(), FakeDevice())
        assert torch.isfinite(out.float()).all() and out.float().abs().max() > 0, case.name
        assert out.dtype == case.dtype or case.name.startswith("append"), case.name


def test_a_case_agrees_with_itself() -> None:
    for case in list(cases())[2:5]:
        assert compare(case, FakeFlashInfer(), FakeDevice()) == 0.0, case.name


class Wrong(FakeFlashInfer):
    """Off by a hundredth."""

    def rmsnorm(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return super().rmsnorm(*args, **kwargs) * 1.01


def test_a_kernel_that_is_off_by_a_hundredth_is_noticed() -> None:
    case = next(c for c in cases() if c.name.startswith("rmsnorm"))
    assert compare(case, Wrong(), FakeDevice()) > 2
