"""The traps of structured generation: what constraints meet in practice, what has to happen, and which tests show it.

Each row of TRAPS names its tests, as files and functions that a test here looks up: a row cannot lose its last test unseen. The
traps that no other file is about have theirs below.
"""

from __future__ import annotations

import ast
import functools
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from phloem.runtime.grammar.base import CompiledGrammar, Limits, backend
from phloem.runtime.grammar.vocabulary import Vocabulary
from phloem.runtime.request import GrammarSpec
from tests.runtime.grammar.oracle import bits_of
from tests.runtime.grammar.schemas import compiled, spec_of, takes

TESTS = Path(__file__).parents[2]
GRAMMAR, ENGINE, SERVE = "runtime/grammar/", "runtime/engine/", "serve/"

TRAPS: dict[str, list[str]] = {
    "several end ids are masked until the text is complete, then legal, all of them; padding never is": [
        GRAMMAR + "test_token_fsm.py::test_all_stop_ids_are_legal_when_complete_and_never_before",
        GRAMMAR + "test_engines.py::test_behind_the_end_nothing_is_legal",
        "runtime/executor/test_sampler.py::test_padded_ids_are_never_drawn_nor_listed",
    ],
    "min_tokens, ignore_eos, penalties and biases do not outrank the grammar; an empty mask is a 500 and our bug": [
        ENGINE + "test_grammars.py::test_m1_the_grammar_outranks",
        "runtime/executor/test_sampler.py::test_M1_a_grammar_at_its_end_outranks_min_tokens",
        "runtime/executor/test_sampler.py::test_an_empty_mask_fails_its_request_alone",
        SERVE + "test_rules.py::test_e2_e3_the_status_is_the_exceptions_own",
    ],
    "characters are split over tokens: cursors work on bytes, no run ends inside one, text comes in whole ones": [
        GRAMMAR + "test_engines.py::test_masks_equal_brute_force",
        GRAMMAR + "test_token_fsm.py::test_masks_equal_brute_force",
        GRAMMAR + "test_forced.py::test_no_run_ends_inside_a_character",
        "runtime/text/test_detokenizer.py::test_a_delta_never_ends_inside_a_character",
    ],
    "escapes: raw UTF-8 is legal, so are escapes of it, never half of a surrogate pair": [
        GRAMMAR + "test_traps.py::test_utf8_is_legal_as_it_is_and_escaped",
        GRAMMAR + "test_traps.py::test_an_escape_is_one_character",
        GRAMMAR + "test_structural_tags.py::test_half_a_surrogate_pair_is_no_text_of_any_tag",
        GRAMMAR + "test_schemas.py::test_no_lone_surrogate",
        GRAMMAR + "test_engines.py::test_bytes_that_spell_a_surrogate_are_no_character",
    ],
    "stop strings act on text, never inside JSON": [
        "contracts/test_constrained.py::test_stop_strings_stay_out_of_json",
        SERVE + "test_cases.py::test_t3_stops_act_on_text_never_inside_json",
    ],
    "thoughts come first: the grammar holds from behind their closing id, within the same commit": [
        GRAMMAR + "test_thoughts.py::test_thoughts_are_free_and_what_follows_is_the_grammar",
        ENGINE + "test_grammars.py::test_j3_behind_thoughts_too",
        SERVE + "test_turns.py::test_a_constraint_holds_from_behind_the_thoughts_on",
    ],
    "logprobs: no masked id is among those under the mask, and none is infinite": [
        ENGINE + "test_grammars.py::test_no_masked_id_is_among_the_top",
    ],
    "samples, forks and preemption: one compiled grammar, a cursor each, which survives or is replayed": [
        ENGINE + "test_grammars.py::test_j3_jump_on_is_jump_off",
        ENGINE + "test_grammars.py::test_g2_eight_beside_each_other_equal_eight_alone",
        "contracts/test_constrained.py::test_j3_in_a_batch_of_eight_samples",
        GRAMMAR + "test_engines.py::Laws",
        GRAMMAR + "test_token_fsm.py::CursorLaws",
    ],
    "drafts: a mask a position, and exactly what is rejected is undone": [
        GRAMMAR + "test_traps.py::test_a_draft_has_a_mask_a_position_and_only_what_is_rejected_is_undone",
    ],
    "tools: required and named calls follow their schema, in auto the text outside a call is free": [
        "runtime/text/tools/test_tool_formats.py::test_t5_tool_choice",
        "runtime/text/tools/test_tools_on_the_engine.py::test_t5_required_and_named_calls_fit_their_schemas",
        SERVE + "test_cases.py::test_t5_tool_choice",
        GRAMMAR + "test_structural_tags.py::test_text_is_free_and_tags_are_not",
    ],
    "a bad schema or regex, a cyclic or remote reference, what nothing can satisfy: 400 before admission, with its place": [
        GRAMMAR + "test_lower.py::test_a4_refusals_name_the_place_and_the_keyword",
        GRAMMAR + "test_regex.py::test_what_is_refused_is_named",
        GRAMMAR + "test_choices.py::test_bad_lists",
        GRAMMAR + "test_traps.py::test_what_nothing_satisfies_is_refused",
        SERVE + "test_cases_struct.py::test_a_keyword_is_enforced_or_the_request_is_refused_with_its_name",
        SERVE + "test_cases_struct.py::test_a_schema_that_is_nothing_but_itself_is_refused",
    ],
    "special tokens are never text": [
        GRAMMAR + "test_schemas.py::test_no_special_token_is_text",
        GRAMMAR + "test_structural_tags.py::test_no_special_token_is_free_text",
    ],
    "a bomb holds no neighbour, and does not outlive its time": [
        GRAMMAR + "test_compile.py::test_bombs_are_served_or_refused_within_their_time",
        GRAMMAR + "test_compile.py::test_too_much_time_kills_the_worker_and_the_next_job_gets_another",
        ENGINE + "test_grammars.py::test_c2_a_bomb_never_holds_a_neighbours_step",
    ],
}  # fmt: skip


@functools.cache
def defined_in(file: Path) -> frozenset[str]:
    return frozenset(
        node.name
        for node in ast.parse(file.read_text()).body
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
    )


@pytest.mark.parametrize("trap", TRAPS)
def test_every_trap_has_its_tests(trap: str) -> None:
    assert TRAPS[trap]
    for place in TRAPS[trap]:
        file, name = place.split("::")
        assert name in defined_in(TESTS / file), place


CLOSED = {
    "type": "object", "properties": {"a": {"type": "integer"}, "ab": {"enum": ["yes", "no"]}}, "required": ["a", "ab"],
    "additionalProperties": False,
}  # fmt: skip


def grammar_of(engine: str, vocabulary: Vocabulary, mode: Any) -> CompiledGrammar:
    if engine == "token_fsm":
        spec = GrammarSpec(kind="regex", source="abab[0-9]{1,3}(yes|no)", jump_forward=mode)
    else:
        spec = spec_of(CLOSED, json_whitespace="spaced", jump_forward=mode)
    return backend(engine).compile(spec, vocabulary, Limits())


@pytest.mark.parametrize("mode", ["canonical", "permissive"])
@pytest.mark.parametrize("engine", ["token_fsm", "xgrammar", "llguidance"])
def test_a_draft_has_a_mask_a_position_and_only_what_is_rejected_is_undone(engine: str, mode: str, toy: Vocabulary) -> None:
    """What a verifying step does: accept and fill along the draft until the grammar ends it, then undo what the model rejects."""
    grammar, rng = grammar_of(engine, toy, mode), random.Random(3)
    ended = rejected = 0
    for _ in range(12):
        cursor, ids = grammar.cursor(), list[int]()
        while not cursor.done:
            draft, masks = list[int](), [bits_of(cursor, toy)]
            for _ in range(4):
                legal = sorted(masks[-1] - set(toy.stop_ids))
                token = rng.choice(legal) if legal and rng.random() < 0.9 else rng.randrange(toy.width)
                if token in toy.stop_ids or not cursor.accept(token):
                    break  # a guess that the grammar refuses changes nothing
                draft.append(token)
                if cursor.done:  # the rest of a draft is never looked at
                    ended += 1
                    break
                masks.append(bits_of(cursor, toy))
            kept = rng.randrange(len(draft) + 1)
            for at, mask in enumerate(masks):
                fresh = grammar.cursor()
                assert all(fresh.accept(token) for token in [*ids, *draft[:at]])
                assert bits_of(fresh, toy) == mask
            cursor.rollback(len(draft) - kept)
            rejected += len(draft) - kept
            if kept < len(draft):
                assert bits_of(cursor, toy) == masks[kept] and not cursor.done
            ids += draft[:kept]
            if len(ids) > 60:
                break
    assert ended and rejected > 20


@pytest.mark.parametrize("text", ["é", "中", "😀", "\u2028", 'a"b\\c/d', "\x7f", "\n\t\b\f\r\x1f"])
@pytest.mark.parametrize("schema", [{"type": "string"}, {"type": "string", "maxLength": 20}, {"type": ["string", "null"]}])
def test_utf8_is_legal_as_it_is_and_escaped(schema: Any, text: str, smollm2: Vocabulary) -> None:
    grammar = compiled(spec_of(schema, jump_forward="permissive"), smollm2)
    if text != "\x7f":  # which llguidance writes as an escape alone
        assert takes(grammar, smollm2, json.dumps(text, ensure_ascii=False))
    assert takes(grammar, smollm2, json.dumps(text))


@pytest.mark.parametrize(
    ("text", "size"), [("\\n\\u00e9", 2), ("a\\ud83d\\ude00\\\\", 3), ('\\"\\"x', 3), ("\\ud83d", None), ("\\q", None)]
)
def test_an_escape_is_one_character(text: str, size: int | None, smollm2: Vocabulary) -> None:
    for least, most in ((0, 2), (3, 3), (2, 9)):
        grammar = compiled(
            spec_of({"type": "string", "minLength": least, "maxLength": most}, jump_forward="permissive"), smollm2
        )
        assert takes(grammar, smollm2, f'"{text}"') == (size is not None and least <= size <= most), (least, most)


@pytest.mark.parametrize(
    "schema",
    [
        False,
        {"enum": []},
        {"not": {}},
        {"type": "integer", "minimum": 3, "maximum": 2},
        {"type": "string", "minLength": 3, "maxLength": 2},
        {"type": "object", "properties": {"a": False}, "required": ["a"], "additionalProperties": False},
        {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 1},
    ],
    ids=json.dumps,
)
def test_what_nothing_satisfies_is_refused(schema: Any, smollm2: Vocabulary) -> None:
    from phloem.runtime.errors import GrammarError

    with pytest.raises(GrammarError) as caught:
        compiled(spec_of(schema), smollm2)
    assert caught.value.status == 400 and (caught.value.param or "").startswith("json_schema")


def test_masks_of_no_grammar_reach_into_the_padding(toy: Vocabulary) -> None:
    padded = [i for i in range(toy.width) if not toy.tokens[i]]
    assert padded and toy.num_words * 32 > toy.width
    for engine in ("token_fsm", "xgrammar", "llguidance"):
        row = np.full(toy.num_words, -1, np.int32)
        cursor = grammar_of(engine, toy, "permissive").cursor()
        cursor.fill(row)
        bits = set(np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist())
        assert bits and not bits & set(padded) and max(bits) < toy.width
