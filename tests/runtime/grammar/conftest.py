"""The toy vocabulary of oracle.py and the embedded model's own."""

from __future__ import annotations

import pytest

from phloem.runtime.errors import ModelLoadError
from phloem.runtime.grammar.vocabulary import Vocabulary
from phloem.runtime.models.embedded import find_embedded
from phloem.runtime.models.gguf import GgufFile
from phloem.runtime.text.tokenizer import Tokenizer
from tests.runtime.grammar.oracle import toy_vocabulary


@pytest.fixture(scope="session")
def toy() -> Vocabulary:
    return toy_vocabulary()


@pytest.fixture(scope="session")
def smollm2_tokenizer() -> Tokenizer:
    try:
        file = find_embedded()
    except ModelLoadError as error:
        pytest.skip(str(error))
    return Tokenizer.from_gguf_metadata(GgufFile(file).metadata)


@pytest.fixture(scope="session")
def smollm2(smollm2_tokenizer: Tokenizer) -> Vocabulary:
    t = smollm2_tokenizer
    assert t.eos_id is not None
    return Vocabulary(
        [t.token_bytes(i) for i in range(t.vocab_size)],
        stop_ids=[t.eos_id, *sorted(set(t.eos_ids) - {t.eos_id})],
        special_ids=t.control_ids,
        width=t.vocab_size,
        encode=t.encode_continuation,
    )
