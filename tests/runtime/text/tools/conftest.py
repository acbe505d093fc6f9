"""The embedded model's tokenizer with other templates and tokens, and its vocabulary as grammars see it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from tokenizers import AddedToken

from phloem.runtime.grammar.vocabulary import Vocabulary
from phloem.runtime.models.embedded import find_embedded
from phloem.runtime.models.gguf import GgufFile
from phloem.runtime.text.gguf_tokenizer import parts_from_gguf
from phloem.runtime.text.tokenizer import Tokenizer

QWEN = (
    "{%- if tools %}<|im_start|>system\n# Tools\n<tools>{% for t in tools %}\n{{ t | tojson }}{% endfor %}\n</tools>\n"
    "For each function call return <tool_call></tool_call><|im_end|>\n{% endif -%}"
    "{%- for m in messages %}{% if m.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ m.content }}\n</tool_response><|im_end|>\n"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}{% if not loop.first %}{{ '\n' }}{% endif %}"
    '<tool_call>\n{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}<|im_end|>\n'
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA = (
    "{%- for t in tools or [] %}{{ t | tojson }}{% endfor %}"
    "{%- for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{% if m.tool_calls %}"
    "{% if m.tool_calls | length != 1 %}{{ raise_exception('This model only supports single tool-calls at once!') }}{% endif %}"
    '{"name": "{{ m.tool_calls[0].function.name }}", "parameters": {{ m.tool_calls[0].function.arguments | tojson }}}'
    "{% else %}{{ m.content }}{% endif %}<|eot_id|>{% endfor %}"
)
PYTHONIC = (
    "{% if tools %}If you call functions, write [func_name1(params_name1=params_value1), func_name2(params)].\n"
    "{% for t in tools %}{{ t | tojson }}{% endfor %}{% endif %}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
)
TEXT_ARGUMENTS = (
    "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in messages %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name + c.function.arguments }}{% endfor %}{% endfor %}"
)
TEMPLATES = {"hermes": QWEN, "llama3": LLAMA, "pythonic": PYTHONIC}

MakeTokenizer = Callable[..., Tokenizer]


@pytest.fixture(scope="session")
def make_tokenizer() -> MakeTokenizer:
    """A tokenizer of the embedded model's vocabulary, with another template, further tokens, and such marked special."""
    metadata = GgufFile(find_embedded()).metadata

    def make(template: str | None = None, tokens: Sequence[str] = (), special: Sequence[str] = ()) -> Tokenizer:
        parts = parts_from_gguf(metadata)
        parts.backend.add_tokens([AddedToken(t, special=False, normalized=False) for t in tokens])
        parts.backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
        if template is not None:
            parts = replace(parts, templates={"default": template})
        return Tokenizer(replace(parts, tokens=None))

    return make


@pytest.fixture(scope="session")
def plain(make_tokenizer: MakeTokenizer) -> Tokenizer:
    return make_tokenizer()


def vocabulary_of(t: Tokenizer) -> Vocabulary:
    assert t.eos_id is not None
    return Vocabulary(
        [t.token_bytes(i) for i in range(t.vocab_size)],
        stop_ids=[t.eos_id, *sorted(set(t.eos_ids) - {t.eos_id})],
        special_ids=t.control_ids,
        width=t.vocab_size,
        encode=t.encode_continuation,
    )


@pytest.fixture(scope="session")
def vocabulary(plain: Tokenizer) -> Vocabulary:
    return vocabulary_of(plain)
