"""The registry of backends."""

from __future__ import annotations

import pytest

from phloem.runtime.backends import BACKENDS, create_backend
from phloem.runtime.errors import ConfigError


def test_each_call_makes_a_new_backend() -> None:
    one, other = create_backend("reference"), create_backend("reference", threads=2)
    assert one is not other and one.name == "reference"


@pytest.mark.parametrize("name", ["cuda", "tpu", ""])
def test_a_device_that_is_not_there_is_named(name: str) -> None:
    with pytest.raises(ConfigError, match=f"device is '{name}'.*'reference'") as caught:
        create_backend(name)
    assert caught.value.param == "device"


def test_cuda_says_that_it_is_not_in_this_version() -> None:
    assert "cuda" not in BACKENDS
    with pytest.raises(ConfigError, match="not in this version"):
        create_backend("cuda")
