"""EngineConfig and resolve: sizes in every spelling, the pool's arithmetic (P3), and what cannot be, refused by its name."""

from __future__ import annotations

from typing import Any

import pytest

from phloem.runtime.config import Hardware, Resolved, make_config, parse_bytes, resolve
from phloem.runtime.errors import ConfigError

GIB = 2**30


def of(memory: int = 8 * GIB, weights: int = GIB, context: int = 2048, **options: Any) -> Resolved:
    """A token takes 1 KiB in float32."""
    return resolve(
        make_config(None, **options), Hardware(4, memory), model_context=context, kv_bytes_per_token_f32=1024, weight_bytes=weights
    )  # fmt: skip


@pytest.mark.parametrize(
    ("value", "size"),
    [
        (1, 1), (5_000, 5_000), ("2GiB", 2 * GIB), ("1.5 gib", 3 * GIB // 2), ("500MB", 500_000_000), ("64k", 64_000), ("10B", 10),
        (0.25, 2 * GIB), (1.0, 8 * GIB), ("25%", 2 * GIB), (" 100 % ", 8 * GIB),
    ],
)  # fmt: skip
def test_sizes(value: Any, size: int) -> None:
    assert parse_bytes(value, 8 * GIB) == size


@pytest.mark.parametrize(
    "value",
    [0, -1, True, 0.0, 1.5, float("nan"), float("inf"), 2**60, 10**400, "", "much", "-1GiB", "0.5", "0%", "101%", "2 GiB 3", "1e3", "9" * 400 + "GiB"],
)  # fmt: skip
def test_what_is_no_size_is_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match="kv_memory is") as caught:
        parse_bytes(value, 8 * GIB)
    assert caught.value.param == "kv_memory"
    with pytest.raises(ConfigError):
        make_config(None, kv_memory=value)


def test_the_pool_comes_from_tokens_bytes_or_a_share_that_includes_the_weights() -> None:
    assert of(kv_tokens=100).num_pages == 7, "rounded up to pages"
    assert of(kv_memory="1MiB").num_pages == 1024 // 16
    assert of(kv_memory=0.5).num_pages == 3 * GIB // (16 * 1024), "half of 8 GiB, less 1 GiB of weights"
    assert of(kv_memory="1MiB", kv_dtype="bf16").num_pages == 2048 // 16
    assert of(max_running=1).num_pages == 2048 // 16, "no more than all that may run can use"
    assert of(max_running=4096).num_pages == 2 * GIB // (16 * 1024), "a quarter of the memory"
    assert "1024 bytes a token" in of().arithmetic[0]


@pytest.mark.parametrize(
    "options", [{"kv_tokens": 2**40}, {"kv_memory": "7.1GiB"}, {"kv_memory": "10TiB"}, {"kv_tokens": 7 * 2**20 + 1}]
)
def test_a_pool_that_the_machine_does_not_have_is_refused_with_what_it_has(options: dict[str, Any]) -> None:
    """Memory that is promised and not there ends the process when it is touched."""
    with pytest.raises(ConfigError, match=r"8\.0 GiB, 7\.0 GiB are left beside the weights, which is 7340032 tokens") as caught:
        of(**options)
    assert caught.value.param == next(iter(options))
    assert of(kv_tokens=7 * 2**20).num_pages == 7 * 2**16, "all that is there may be asked for"


def test_a_pool_without_a_page_is_refused() -> None:
    with pytest.raises(ConfigError, match="no room for one page of 16384 bytes"):
        of(kv_memory=16_383)
    with pytest.raises(ConfigError, match="no room for one page"):
        of(kv_memory=0.1)  # less than the weights


def test_the_context_is_the_models_or_less() -> None:
    assert of().max_context == 2048 and of(max_context=100).max_context == 100
    with pytest.raises(ConfigError, match="max_context is 2049"):
        of(max_context=2049)


def test_device_threads_and_overlap_are_filled_in() -> None:
    r = of()
    assert (r.device, r.threads, r.kv_dtype, r.overlap) == ("cpu", 4, "f32", False)
    r = of(device="reference", threads=1, kv_dtype="bf16", overlap=True)
    assert (r.device, r.threads, r.kv_dtype, r.overlap) == ("reference", 1, "bf16", True)
