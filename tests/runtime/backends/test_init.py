"""The registry of backends."""

from __future__ import annotations

import pytest

from phloem.runtime.backends import BACKENDS, create_backend
from phloem.runtime.backends.cuda.device import find_gpu
from phloem.runtime.errors import ConfigError


def test_each_call_makes_a_new_backend() -> None:
    one, other = create_backend("reference"), create_backend("reference", threads=2)
    assert one is not other and one.name == "reference"


@pytest.mark.parametrize("name", ["tpu", ""])
def test_a_device_that_is_not_there_is_named(name: str) -> None:
    with pytest.raises(ConfigError, match=f"device is '{name}'.*'reference'") as caught:
        create_backend(name)
    assert caught.value.param == "device"


@pytest.mark.skipif(find_gpu() is not None, reason="this machine has a GPU")
def test_cuda_without_a_gpu_says_so_and_what_to_do() -> None:
    assert "cuda" in BACKENDS
    with pytest.raises(ConfigError, match=r"device is 'cuda', but torch .* sees no GPU\. Check `nvidia-smi`") as caught:
        create_backend("cuda")
    assert caught.value.param == "device"
