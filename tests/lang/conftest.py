"""Fixtures of the language's tests."""

from __future__ import annotations

import pytest

from phloem.runtime.models.embedded import find_embedded
from phloem.runtime.models.gguf import GgufFile
from phloem.runtime.text.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def smollm2_tokenizer() -> Tokenizer:
    return Tokenizer.from_gguf_metadata(GgufFile(find_embedded()).metadata)
