"""Bit rows onto logits: torch by its definition, and the Triton kernel (in Triton's interpreter) against it."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest
import torch

from phloem.runtime.backends.cuda.mask import best_mask, masked_logits


def test_masked_logits_by_hand() -> None:
    x = torch.arange(80, dtype=torch.float32).reshape(2, 40)
    words = torch.tensor([[0b101, -(2**31)], [-1, 0]], dtype=torch.int32)
    got = masked_logits(x.clone(), words, torch.tensor([1, 0]))
    assert got[1].isfinite().nonzero().flatten().tolist() == [0, 2]  # bit 63 is beyond the vocabulary
    assert got[0].isfinite().nonzero().flatten().tolist() == list(range(32)) and torch.equal(got[0, :32], x[0, :32])
    assert torch.equal(masked_logits(x.clone(), words[:1], torch.tensor([1]))[0], x[0])


def test_without_a_gpu_the_mask_is_torch() -> None:
    assert best_mask(torch.device("cpu")) is masked_logits


SCRIPT = """
import numpy as np, torch
from phloem.runtime.backends.cuda.mask import masked_logits
from phloem.triton.mask import masked_logits as kernel
rng = np.random.default_rng(0)
for n, vocab in ((1, 7), (3, 96), (4, 1024), (2, 2077)):
    x = torch.from_numpy(rng.normal(size=(n + 1, vocab)).astype(np.float32))
    words = torch.from_numpy(rng.integers(-2**31, 2**31, (n, -(-vocab // 32)), dtype=np.int32))
    rows = torch.from_numpy(rng.permutation(n + 1)[:n].astype(np.int64))
    want, got = masked_logits(x.clone(), words, rows), kernel(x.clone(), words, rows)
    assert torch.equal(want, got), (n, vocab)
print("equal")
"""


COMPILE = """
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from phloem.triton.mask import BLOCK, _mask_kernel
kinds = {"x": "*fp32", "words": "*i32", "rows": "*i64", "vocab_size": "i32", "x_stride": "i32", "words_stride": "i32", "size": "constexpr"}
for arch in (80, 90):
    assert len(compile(ASTSource(_mask_kernel, kinds, {"size": BLOCK}), target=GPUTarget("cuda", arch, 32)).asm["cubin"]) > 1000
print("compiled")
"""
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed: it comes with torch for CUDA"
)


@needs_triton
def test_the_triton_kernel_compiles_for_gpus_that_are_not_here() -> None:
    done = subprocess.run([sys.executable, "-c", COMPILE], capture_output=True, text=True, timeout=200)
    assert done.stdout.strip() == "compiled", done.stderr[-3000:]


@needs_triton
def test_the_triton_kernel_is_the_torch_reference() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, timeout=200
    )
    assert done.stdout.strip() == "equal", done.stderr[-3000:]
