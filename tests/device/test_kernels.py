"""Every kernel call of the cuda backend on a GPU, against FlashInfer's definition in float32 on the CPU."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch

from phloem.runtime.backends.cuda import missing
from phloem.runtime.backends.cuda.device import CudaDevice
from phloem.runtime.backends.cuda.mask import best_mask, masked_logits
from tests.runtime.executor.test_device_sampler import assert_draws_like_the_reference
from tests.twins import Case, cases, compare

pytestmark = pytest.mark.skipif(missing() is not None, reason=f"no GPU to test on: {missing()}")


@pytest.fixture(scope="module")
def device() -> CudaDevice:
    return CudaDevice()


@pytest.mark.parametrize("case", list(cases()), ids=lambda case: case.name)
def test_kernels(case: Case, device: CudaDevice) -> None:
    assert compare(case, importlib.import_module("flashinfer"), device) < 8


@pytest.mark.parametrize("seed", range(6))
def test_draws(seed: int, device: CudaDevice) -> None:
    """M1-M5 on the device are those of the reference sampler."""
    assert_draws_like_the_reference(seed, device)


def test_masks(device: CudaDevice) -> None:
    words = torch.randint(-(2**31), 2**31, (5, 4008), dtype=torch.int32)
    x, rows = torch.randn(9, 128_256), torch.tensor([8, 0, 3, 4, 7])
    want = masked_logits(x.clone(), words, rows)
    where: Any = device.torch_device
    got = best_mask(where)(x.to(where), words.to(where), rows.to(where))
    assert torch.equal(got.cpu(), want)
