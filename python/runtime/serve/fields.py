"""Every field of a request, as data: who takes it, and what becomes of it (W2). Tests, the documentation and the guard walk it.

    honoured          it does what it says           -> a field of a struct in wire.py
    without effect    legal, and changes nothing     -> named in x-phloem-ignored-params
    refused           would change the answer, and we cannot  -> 400 unsupported_parameter, unless its value is neutral
    (not here)        unknown                        -> named in x-phloem-ignored-params; 400 under --strict-params

Routes: c chat, t completions, s sampling_params of /generate, g the body of /generate, k /tokenize, d /detokenize.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

__all__ = ["FIELDS", "SPELLINGS", "Field", "How", "classify", "is_neutral"]

How = Literal["honoured", "without_effect", "refused"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """name: `x*` and `*_x` stand for all such names.   good, bad: JSON texts, for tests: a legal value and an illegal one; bad is
    "" where every value of JSON is legal.   beside: further members that a legal value needs.   neutral: values that ask for nothing,
    beside null, false and what is empty; of honoured fields, the default.   equals: another field; the same value asks for nothing.
    """

    name: str
    routes: str
    how: How
    type: str = ""
    default: str = "–"
    note: str = ""
    good: str = ""
    bad: str = ""
    beside: str = ""
    neutral: tuple[Any, ...] = ()
    equals: str = ""


def _h(
    name: str,
    routes: str,
    type: str,
    default: str,
    note: str,
    good: str,
    bad: str,
    beside: str = "",
    neutral: tuple[Any, ...] = (),
) -> Field:
    return Field(
        name=name, routes=routes, how="honoured", type=type, default=default, note=note, good=good, bad=bad, beside=beside, neutral=neutral
    )  # fmt: skip


CALL, SAMPLING, ALL = "ct", "cts", "ctg"
LONG = f'"{"x" * 1025}"'

HONOURED = (
    # ---- generation ----
    _h("model", "ctgkd", "string", "the served model", "a served name or `default`; another is 404", '"default"', "5"),
    _h("max_completion_tokens", "cts", "integer ≥ 0", "the room left", "wins over `max_tokens`; above the room: clipped, and said so", "3", "-1"),
    _h("max_tokens", "cts", "integer ≥ 0", "chat: the room left; completions: 16; /generate: 128", "0 computes the prompt only", "3", '"5"'),
    _h("max_new_tokens", "cts", "integer ≥ 0", "as `max_tokens`", "the same, by SGLang's name", "3", "5.5"),
    _h("min_tokens", "cts", "integer ≥ 0", "0", "no end before so many; above max_tokens: 400", "1", "-1", neutral=(0,)),
    _h("min_new_tokens", "cts", "integer ≥ 0", "0", "the same, by SGLang's name", "1", "true", neutral=(0,)),
    _h("temperature", SAMPLING, "0 … 100", "the model's, else 1", "0 takes the likeliest token", "0.5", "-0.1", neutral=(1.0,)),
    _h("top_p", SAMPLING, "(0, 1]", "the model's, else 1", "", "0.9", "0", neutral=(1.0,)),
    _h("top_k", SAMPLING, "integer ≥ -1", "the model's, else off", "0 and -1 are off", "5", "-2", neutral=(-1, 0)),
    _h("min_p", SAMPLING, "0 … 1", "0", "", "0.1", "1.5", neutral=(0.0,)),
    _h("frequency_penalty", SAMPLING, "-2 … 2", "0", "over the output", "0.5", "3", neutral=(0.0,)),
    _h("presence_penalty", SAMPLING, "-2 … 2", "0", "over the output", "0.5", "-3", neutral=(0.0,)),
    _h("repetition_penalty", SAMPLING, "(0, 10]", "the model's, else 1", "over prompt and output", "1.1", "0", neutral=(1.0,)),
    _h("seed", SAMPLING, "64-bit integer", "drawn", "told in `x-phloem-seed`", "7", '"7"'),
    _h("sampling_seed", SAMPLING, "64-bit integer", "drawn", "the same, by SGLang's name", "7", "1.0"),
    _h("n", SAMPLING, "1 … 128", "1", "samples of each prompt", "2", "0", neutral=(1,)),
    _h("stop", SAMPLING, "string, or up to 32 of 1 … 16384 characters", "none", "ends the output, and is not part of it", '["\\n\\n\\n"]', '[""]', neutral=([],)),
    _h("stop_token_ids", SAMPLING, "up to 64 token ids", "none", "join the model's own end tokens", "[5]", "[1000000]", neutral=([],)),
    _h("include_stop_str_in_output", SAMPLING, "boolean", "false", "", "true", "1", neutral=(False,)),
    _h("no_stop_trim", SAMPLING, "boolean", "false", "the same, by SGLang's name", "true", '"x"', neutral=(False,)),
    _h("ignore_eos", SAMPLING, "boolean", "false", "a grammar outranks it", "true", "0", neutral=(False,)),
    _h("skip_special_tokens", SAMPLING, "boolean", "true", "", "false", "0", neutral=(True,)),
    _h("logit_bias", SAMPLING, 'object of "id": -100 … 100, up to 1024', "none", "", '{"5": 1}', '{"5": 1000}', neutral=({},)),
    _h("allowed_token_ids", SAMPLING, "token ids", "all", "only these are drawn", "[5, 6]", "[-1]"),
    _h("logprobs_mode", SAMPLING, "`model`, `sampled`", "model", "of the raw distribution, or of the one drawn from", '"sampled"', '"both"', neutral=("model",)),
    # ---- constraints ----
    _h("response_format", SAMPLING, "object", "text", "`text`, `json_object`, `json_schema`, `regex`, `ebnf`", '{"type": "json_object"}', '{"type": "xml"}', neutral=({"type": "text"},)),
    _h("structured_outputs", SAMPLING, "object", "none", "one of `json`, `regex`, `choice`, `grammar`, `json_object`", '{"choice": ["a", "b"]}', '{"choice": []}'),
    _h("regex", SAMPLING, "string", "none", "the whole text matches", '"[ab]{3}"', '"(?=a)b"'),
    _h("ebnf", SAMPLING, "string", "none", "a grammar whose first rule is `root`; Lark if it opens with `%llguidance`", '"root ::= \\"a\\" | \\"b\\""', '"root ::= "'),
    _h("json_schema", SAMPLING, "string, or object", "none", "a JSON Schema", '"{\\"type\\": \\"boolean\\"}"', '"{"'),
    _h("guided_json", SAMPLING, "string, or object", "none", "an older name of `structured_outputs.json`", '{"type": "boolean"}', "5"),
    _h("guided_regex", SAMPLING, "string", "none", "an older name of `regex`", '"[ab]{3}"', "[]"),
    _h("guided_choice", SAMPLING, "strings", "none", "an older name of `structured_outputs.choice`", '["a", "b"]', "[1]"),
    _h("guided_grammar", SAMPLING, "string", "none", "an older name of `ebnf`", '"root ::= \\"a\\""', "7"),
    _h("json_whitespace", SAMPLING, "`flexible`, `spaced`, `compact`", "flexible", "blanks that JSON may hold; needs a JSON constraint", '"compact"', '"none"', '"response_format": {"type": "json_object"}'),
    _h("jump_forward", SAMPLING, "`canonical`, `permissive`, `off`", "canonical", "how forced tokens come about; needs a constraint", '"off"', '"on"', '"regex": "abc"'),
    # ---- the call ----
    _h("stream", ALL, "boolean", "false", "", "true", '"yes"', neutral=(False,)),
    _h("stream_options", CALL, "object", "none", "`include_usage`, `continuous_usage_stats`; needs `stream`", '{"include_usage": true}', '{"include_usage": 1}', '"stream": true'),
    _h("return_token_ids", CALL, "boolean", "false", "`prompt_token_ids` and `token_ids` in the reply", "true", "1", neutral=(False,)),
    _h("return_tokens_as_token_ids", CALL, "boolean", "false", "tokens in logprobs are written `token_id:123`", "true", "1", neutral=(False,)),
    _h("cache_salt", ALL, "string of 1 … 1024 characters", "none", "shares no cache with other salts", '"tenant"', LONG),
    _h("extra_key", ALL, "string of 1 … 1024 characters", "none", "likewise, beside `cache_salt`", '"tenant"', '""'),
    _h("priority", ALL, "-1000 … 1000", "0", "higher is sooner, under `--policy priority`; else without effect", "3", "1001", neutral=(0,)),
    _h("request_id", CALL, "1 … 128 of `A-Za-z0-9._:-`", "none", "a handle for `/abort_request`; live already: 409", '"handle-1"', '"a b"'),
    _h("rid", ALL, "1 … 128 of `A-Za-z0-9._:-`", "none", "the same, by SGLang's name; /generate takes a list for a batch", '"handle-2"', '"a\\nb"'),
    # ---- chat ----
    _h("messages", "ck", "1 … 8192 messages", "required", "roles system, developer, user, assistant, tool; content is text or text parts", '[{"role": "user", "content": "hi"}]', '[{"role": "banana", "content": "hi"}]'),
    _h("logprobs", "c", "boolean", "false", "", "true", "1", neutral=(False,)),
    _h("top_logprobs", "c", "0 … 20", "0", "needs `logprobs`", "2", "21", '"logprobs": true', neutral=(0,)),
    _h("add_generation_prompt", "ck", "boolean", "true", "", "false", "1"),
    _h("continue_final_message", "ck", "boolean", "false", "the model goes on with the last turn, an assistant's", "true", "1", '"add_generation_prompt": false, "messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "I"}]', neutral=(False,)),
    _h("chat_template_kwargs", "ck", "object of up to 64 names", "none", "further names for the template", '{"x": 1}', '{"messages": []}', neutral=({},)),
    _h("separate_reasoning", "c", "boolean", "true", "thoughts go to `reasoning_content`", "false", "1", neutral=(True,)),
    _h("include_reasoning", "c", "boolean", "true", "the same, by vLLM's name", "false", "1", neutral=(True,)),
    # ---- completions ----
    _h("prompt", "t", "string, token ids, or a list of those", "required", "", '"hi"', "[1000000]"),
    _h("logprobs", "t", "0 … 20", "off", "", "2", "true"),
    _h("echo", "t", "boolean", "false", "the prompt comes first", "true", "1", neutral=(False,)),
    _h("add_special_tokens", "t", "boolean", "true", "text prompts begin as the tokenizer begins them", "false", "1", neutral=(True,)),
    # ---- /generate ----
    _h("text", "g", "string, or strings", "–", "this or `input_ids`", '"hi"', "5"),
    _h("input_ids", "g", "token ids, or a list of those", "–", "this or `text`", "[5, 6]", "[-1]"),
    _h("sampling_params", "g", "object, or one a prompt", "none", "the generation fields", '{"temperature": 0}', "5"),
    _h("return_logprob", "g", "boolean", "false", "", "true", "1", neutral=(False,)),
    _h("logprob_start_len", "g", "-1 … the prompt's length", "-1", "logprobs of the prompt from this position; -1: of the output only", "0", "-2", '"return_logprob": true', neutral=(-1,)),
    _h("top_logprobs_num", "g", "0 … 20", "0", "", "2", "21", '"return_logprob": true', neutral=(0,)),
    _h("return_text_in_logprobs", "g", "boolean", "false", "", "true", "1", neutral=(False,)),
    _h("open_end", "g", "boolean", "false", "a value may be followed by what cannot continue it, which ends it; needs a constraint", "true", "1", '"sampling_params": {"regex": "[0-9]+"}', neutral=(False,)),
    # ---- /tokenize, /detokenize ----
    _h("prompt", "k", "string, or strings", "–", "this or `messages`", '"hi"', "5"),
    _h("add_special_tokens", "k", "boolean", "true", "", "false", "1", neutral=(True,)),
    _h("return_token_strs", "k", "boolean", "false", "", "true", "1", neutral=(False,)),
    _h("tokens", "d", "token ids", "required", "", "[5, 6]", "[-1]"),
    _h("skip_special_tokens", "d", "boolean", "false", "", "true", "1", neutral=(False,)),
)  # fmt: skip

TOOLS = (
    _h("tools", "ck", "up to 128 functions", "none", "", '[{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]', '[{"type": "function"}]', neutral=([],)),
    _h("tool_choice", "c", "`none`, `auto`, `required`, or a function", "auto", "", '"none"', '"some"', '"tools": [{"type": "function", "function": {"name": "f"}}]'),
    _h("parallel_tool_calls", "c", "boolean", "true", "false: one call ends the turn", "false", "1", '"tools": [{"type": "function", "function": {"name": "f"}}]', neutral=(True,)),
)  # fmt: skip

CONDITIONAL = (
    _h("chat_template", "ck", "string", "the model's", "a template of the request's own; 400 unless `--request-templates`", "", '"{{ messages }}"'),
    _h("documents", "ck", "list of objects", "none", "400 unless the template reads them", "", '[{"text": "x"}]', neutral=([],)),
    _h("reasoning_effort", "ck", "`none` … `max`", "–", "given to templates that read it (or `enable_thinking`); else without effect", '"low"', '"huge"'),
    _h("add_special_tokens", "c", "boolean", "false", "put the tokenizer's BOS before the rendered prompt", "false", "1", neutral=(False,)),
)  # fmt: skip

WITHOUT_EFFECT = tuple(
    Field(name=name, routes=routes, how="without_effect", type="any", note=note, good=good)
    for name, routes, good, note in (
        ("user", ALL, '"u"', ""), ("metadata", ALL, '{"a": "b"}', ""), ("store", CALL, "true", ""), ("service_tier", CALL, '"auto"', ""),
        ("safety_identifier", CALL, '"u"', ""), ("prompt_cache_key", CALL, '"k"', ""), ("prompt_cache_retention", CALL, '"24h"', ""),
        ("prompt_cache_options", CALL, '{"a": 1}', ""), ("verbosity", CALL, '"low"', ""), ("prediction", CALL, '{"type": "content", "content": "x"}', ""),
        ("moderation", CALL, '"auto"', ""), ("include_obfuscation", CALL, "true", ""), ("spaces_between_special_tokens", SAMPLING, "true", ""),
        ("session_id", ALL, '"s"', ""), ("guided_decoding_backend", SAMPLING, '"xgrammar"', ""), ("log_metrics", ALL, "true", ""),
        ("stream_options.include_obfuscation", CALL, "true", ""),
    )
)  # fmt: skip

REFUSED = tuple(
    Field(name=name, routes=routes, how="refused", type="any", bad=bad, neutral=neutral, note=note, equals="n" if name == "best_of" else "")
    for name, routes, bad, neutral, note in (
        ("functions", CALL, '[{"name": "f"}]', (), "use `tools`"), ("function_call", CALL, '{"name": "f"}', ("none", "auto"), "use `tool_choice`"),
        ("audio", CALL, '{"voice": "x"}', (), ""), ("modalities", CALL, '["audio"]', (["text"],), ""), ("web_search_options", CALL, '{"search_context_size": "low"}', (), ""),
        ("suffix", CALL, '"x"', (), ""), ("best_of", SAMPLING, "5", (1,), "allowed if equal to `n`"),
        ("use_beam_search", SAMPLING, "true", (), ""), ("beam_width", SAMPLING, "4", (1,), ""), ("length_penalty", SAMPLING, "0.5", (1.0,), ""),
        ("bad_words", SAMPLING, '["x"]', (), ""), ("logprob_token_ids", SAMPLING, "[5]", (), ""),
        ("prompt_logprobs", SAMPLING, "1", (), "use `echo` with `logprobs`, or /generate"), ("truncate_prompt_tokens", SAMPLING, "5", (), ""),
        ("thinking_budget", SAMPLING, "5", (), ""), ("thinking_token_budget", SAMPLING, "5", (), ""), ("thinking", SAMPLING, '{"budget_tokens": 5}', (), ""),
        ("repetition_detection", SAMPLING, '{"a": 1}', (), ""), ("watermark*", SAMPLING, "true", (), ""), ("stop_regex", SAMPLING, '"a"', (), ""),
        ("custom_logit_processor", ALL + "s", '"x"', (), ""), ("custom_params", ALL + "s", '{"a": 1}', (), ""), ("*_embeds", ALL, "[1.0]", (), ""),
        ("image_data", ALL, '"x"', (), ""), ("audio_data", ALL, '"x"', (), ""), ("video_data", ALL, '"x"', (), ""), ("lora_path", ALL, '"x"', (), ""),
        ("session_params", ALL, '{"id": "x"}', (), ""), ("return_hidden_states", ALL, "true", (), ""), ("return_routed_experts", ALL, "true", (), ""),
        ("return_sampling_mask", ALL, "true", (), ""), ("token_ids_logprob", "g", "[5]", (), ""),
        ("whitespace_pattern", SAMPLING, '"[ ]?"', (), "use `json_whitespace`"), ("guided_whitespace_pattern", SAMPLING, '"[ ]?"', (), "use `json_whitespace`"),
        ("disable_additional_properties", SAMPLING, "true", (), "say it in the schema"), ("structural_tag", SAMPLING, '"x"', (), "use `tools`"),
    )
)  # fmt: skip

FIELDS: tuple[Field, ...] = (*HONOURED, *TOOLS, *CONDITIONAL, *WITHOUT_EFFECT, *REFUSED)

SPELLINGS: dict[str, tuple[str, ...]] = {
    "max_tokens": ("max_tokens", "max_new_tokens"),
    "min_tokens": ("min_tokens", "min_new_tokens"),
    "seed": ("seed", "sampling_seed"),
    "include_stop_str_in_output": ("include_stop_str_in_output", "no_stop_trim"),
    "request_id": ("request_id", "rid"),
    "separate_reasoning": ("separate_reasoning", "include_reasoning"),
}
"""One meaning, several names (W7). `max_completion_tokens` is none of them: it wins."""


@lru_cache(maxsize=32)
def _by_name(route: str) -> dict[str, Field]:
    return {f.name: f for f in FIELDS if route in f.routes and "*" not in f.name}


@lru_cache(maxsize=32)
def _patterns(route: str) -> tuple[Field, ...]:
    return tuple(f for f in FIELDS if route in f.routes and "*" in f.name)


def classify(route: str, names: Iterable[str]) -> list[tuple[str, Field | None]]:
    """Those of a body's names that are not honoured, each with its row; None: unknown."""
    known, found = _by_name(route), []
    for name in names:
        row = known.get(name)
        if row is None:
            row = next((p for p in _patterns(route) if _matches(p.name, name)), None)
        if row is None or row.how != "honoured":
            found.append((name, row))
    return found


def _matches(pattern: str, name: str) -> bool:
    return name.startswith(pattern[:-1]) if pattern.endswith("*") else name.endswith(pattern[1:])


def is_neutral(field: Field, value: Any) -> bool:
    """Whether this value of a refused field asks for nothing: null, false, empty, or the documented default."""
    if value is None or value is False or (isinstance(value, (str, list, dict)) and not value):
        return True
    return any(value == n and isinstance(value, bool) == isinstance(n, bool) for n in field.neutral)
