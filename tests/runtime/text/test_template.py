"""The sandbox: what transformers' templates rely on, and what none may do."""

from __future__ import annotations

import re
from datetime import datetime
from typing import Any

import pytest

from phloem.runtime.errors import InvalidRequestError
from phloem.runtime.text.template import ChatTemplate, literal_text


def render(source: str, **variables: Any) -> str:
    return ChatTemplate(source).render(variables)


def test_blocks_leave_no_lines_behind() -> None:
    assert render("{% if true %}\n    {% set x = 1 %}\nyes\n{% endif %}\n") == "yes\n"


def test_tojson_escapes_nothing_for_html() -> None:
    assert render("{{ x | tojson }}", x={"a": "<é> & 'q'"}) == '{"a": "<é> & \'q\'"}'
    assert render("{{ x | tojson(indent=2) }}", x={"a": 1}) == '{\n  "a": 1\n}'


def test_loop_controls_and_generation_blocks() -> None:
    source = (
        "{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{% generation %}{{ i }}{% endgeneration %}{% endfor %}"
    )
    assert render(source) == "01"


def test_strftime_now_is_today() -> None:
    assert render("{{ strftime_now('%Y') }}") == str(datetime.now().year)


def test_namespace_and_dict() -> None:
    assert render("{% set ns = namespace(n=1) %}{% set ns.n = 2 %}{{ ns.n }}{{ dict(a=3).a }}") == "23"


@pytest.mark.case("C-LOAD-11")
def test_a_template_that_refuses_is_an_invalid_request_with_its_words() -> None:
    with pytest.raises(InvalidRequestError, match="roles must alternate") as caught:
        render("{{ raise_exception('roles must alternate') }}")
    assert (caught.value.status, caught.value.code, caught.value.param) == (400, "chat_template_error", "messages")


@pytest.mark.case("C-LOAD-11")
@pytest.mark.parametrize(
    "source",
    [
        "{{ 1 + 'a' }}",
        "{{ 1 // 0 }}",
        "{{ x.y.z }}",
        "{{ range(10 ** 9) | list | length }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ x | nofilter }}",
        "{% if %}",
        "{{ raise_exception(5) }}",
    ],
)
def test_whatever_goes_wrong_in_a_template_is_an_invalid_request(source: str) -> None:
    with pytest.raises(InvalidRequestError, match="chat template"):
        render(source)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ dict.__init__.__globals__ }}",
        "{{ namespace(__class__=1) }}",
        "{% set ns = namespace() %}{% set ns.__x = 1 %}",
        "{{ raise_exception.__globals__['json'] }}",
        "{% include 'x' %}",
    ],
)
def test_a_template_reaches_nothing_outside(source: str) -> None:
    messages = [{"role": "user"}]
    with pytest.raises(InvalidRequestError):
        render(source, messages=messages)
    assert messages == [{"role": "user"}]


def test_a_syntax_error_names_its_line() -> None:
    with pytest.raises(InvalidRequestError, match="in line 3"):
        ChatTemplate("a\nb\n{% endfor %}")


def test_literal_text_is_what_a_template_can_write() -> None:
    found = literal_text("{# <c> #}<a>{% if message.b %}{{ '<d>' + x }}{% endif %}")
    assert re.search("<a>", found) and re.search("<d>", found)
    assert "<c>" not in found and "message" not in found
    assert literal_text("{% if <x>") == "{% if <x>", "a broken one is all literal"
