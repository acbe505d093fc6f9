"""JSON-Schema-Test-Suite: every group of it is right, or refused, or too strict in a way that is listed here. Nothing invalid is taken.

The suite is in the source distribution of jsonschema (MIT), which this fetches; out of reach, it is skipped and says so.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from phloem.runtime.errors import GrammarError
from phloem.runtime.grammar.vocabulary import Vocabulary
from tests.runtime.grammar.schemas import compiled, judge, spec_of

SDIST = "jsonschema==4.26.0"
LEAST = {
    "draft2020-12": {"right": 206, "refused": 133, "over": 27},
    "draft2020-12/optional/format": {"right": 5, "refused": 12, "over": 5},
    "draft7": {"right": 178, "refused": 59, "over": 17},
}
"""Groups by outcome: as many right ones at least, as many of the others at most."""
STRICT = {
    "const": "a key order, or 1.0 for an integer", "enum": "a key order, or 1.0 for an integer", "format": "formats are assertions here",
    "oneOf": "2.5 where the other option is an integer", "ref": "an enum of objects, in compact spelling; siblings of $ref assert",
    "type": "1.0 for an integer", "vocabulary": "a metaschema of its own", "date-time": "no leap second", "time": "no leap second",
    "email": "no quoted local part", "hostname": "no label that punycode claims", "ipv6": "no dotted quad inside",
}  # fmt: skip
"""Files whose groups may refuse something valid, and what that is."""


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("suite")
    pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", ":all:", "-d", str(folder), SDIST]
    if subprocess.run(pip, capture_output=True, timeout=120).returncode:
        pytest.skip(f"the source of {SDIST}, which holds JSON-Schema-Test-Suite, is out of reach")
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as file:
        file.extractall(folder, filter="data")
    return next(folder.glob("*/json/tests"))


def dialect(draft: str, schema: Any) -> Any:
    old = draft.startswith("draft7") and isinstance(schema, dict) and "$schema" not in schema
    return {"$schema": "http://json-schema.org/draft-07/schema#", **schema} if old else schema


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # jsonschema's, of remote references
@pytest.mark.parametrize("draft", LEAST)
def test_the_suite(draft: str, suite: Path, smollm2: Vocabulary) -> None:
    found = Counter[str]()
    for file in sorted((suite / draft).glob("*.json")):
        for group in json.loads(file.read_text()):
            row = {"schema": dialect(draft, group["schema"]), "tests": group["tests"]}
            verdict = judge(row, smollm2, lambda schema: compiled(spec_of(schema, json_whitespace="spaced"), smollm2), "spaced")
            name = f"{file.stem}: {group['description']}"
            assert not verdict.invalid[0], f"{name} lets an invalid instance through"
            outcome = "right" if verdict.is_right else "over" if verdict.engine else "refused"
            assert outcome != "over" or file.stem in STRICT, f"{name} refuses a valid instance"
            found[outcome] += 1
    for outcome, count in LEAST[draft].items():
        assert found[outcome] >= count if outcome == "right" else found[outcome] <= count, found


@pytest.mark.slow
def test_refusals_name_a_keyword_or_a_place(suite: Path, smollm2: Vocabulary) -> None:
    for file in sorted((suite / "draft2020-12").glob("*.json")):
        for group in json.loads(file.read_text()):
            try:
                compiled(spec_of(group["schema"]), smollm2)
            except GrammarError as error:
                assert error.code == "invalid_json_schema" and (error.param or "").startswith("json_schema"), error.message
