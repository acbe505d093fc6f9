"""A model's chat template, in jinja2's immutable sandbox with the helpers that transformers gives it. No I/O.

    ChatTemplate(source).render({"messages": [...], "add_generation_prompt": True, ...}) -> str

Knows jinja; what a message may be is chat.py's. jinja2 is imported at first use: most of what loads a tokenizer never chats.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NoReturn

from phloem.runtime.errors import InvalidRequestError

if TYPE_CHECKING:
    import jinja2

__all__ = ["ChatTemplate", "literal_text", "names_read"]


class ChatTemplate:
    """A compiled template. Raises InvalidRequestError (code chat_template_error) if `source` is not one."""

    def __init__(self, source: str) -> None:
        import jinja2

        self.source = source
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as e:
            where = f" in line {e.lineno}" if isinstance(e, jinja2.TemplateSyntaxError) else ""
            raise _error(f"the chat template cannot be read{where}: {e.message}") from e

    def render(self, variables: Mapping[str, Any]) -> str:
        """The text. Raises InvalidRequestError with the template's own words where it refuses the conversation."""
        import jinja2

        try:
            return self._template.render(variables)
        except jinja2.TemplateError as e:
            raise _error(f"the chat template refuses this conversation: {e.message or e}") from e
        except RecursionError as e:
            raise _error("the chat template nests too deeply for this conversation.") from e
        # A template is a program: what it does to a value it did not expect may raise anything, and none of it is ours.
        except Exception as e:
            raise _error(f"the chat template cannot render this conversation: {e}") from e


def literal_text(source: str) -> str:
    """What a template can write by itself: its text and its string constants, NUL between. All of it if it is broken."""
    import jinja2

    try:
        tree = _environment().parse(source)
    except jinja2.TemplateError:
        return source
    parts = [node.data for node in tree.find_all(jinja2.nodes.TemplateData)]
    parts += [node.value for node in tree.find_all(jinja2.nodes.Const) if isinstance(node.value, str)]
    return "\0".join(parts)


def names_read(source: str) -> frozenset[str]:
    """The variables that a template reads from its caller, such as `tools`. None of a broken one."""
    import jinja2
    import jinja2.meta

    try:
        tree = _environment().parse(source)
    except jinja2.TemplateError:
        return frozenset()
    return frozenset(jinja2.meta.find_undeclared_variables(tree))


def _error(message: str) -> InvalidRequestError:
    return InvalidRequestError(message, param="messages", code="chat_template_error")


@lru_cache(maxsize=1)
def _environment() -> jinja2.Environment:
    import jinja2
    import jinja2.ext
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(jinja2.ext.Extension):
        """{% generation %} … {% endgeneration %} marks what a trainer learns from; for us it is its content."""

        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.Scope(body).set_lineno(line)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )

    class Namespace(jinja2.utils.Namespace):
        """Refuses underscored names: a template has no business with the insides of Python."""

        def __init__(*args: Any, **kwargs: Any) -> None:
            self, args = args[0], args[1:]
            attributes = dict(*args, **kwargs)
            for name in attributes:
                _check_attribute(name)
            jinja2.utils.Namespace.__init__(self, attributes)

        def __setitem__(self, name: str, value: Any) -> None:
            _check_attribute(name)
            super().__setitem__(name, value)

    environment.globals["namespace"] = Namespace
    environment.globals["dict"] = _make_dict
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _check_attribute(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        _raise_exception(f"a namespace cannot hold the underscored name {name!r}")


def _make_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)


def _raise_exception(message: str) -> NoReturn:
    import jinja2

    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    # jinja2's own escapes <, >, & and ' for HTML, which no model was trained on.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
