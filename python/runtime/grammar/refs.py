"""Where `$ref` points: pointers, anchors and ids of one document. Never looks outside it, let alone at the network."""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

from phloem.runtime.grammar.limits import refuse_schema

__all__ = ["LISTS", "MAPS", "SINGLES", "References", "escape"]

SINGLES = (
    "additionalProperties", "additionalItems", "items", "contains", "not", "if", "then", "else", "propertyNames",
    "unevaluatedItems", "unevaluatedProperties",
)  # fmt: skip
LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
MAPS = ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions", "dependencies")
"""The keywords that hold a subschema, a list of them, a map of them (A1). Values of another type are no schemas."""


def escape(name: str) -> str:
    """One step of a JSON pointer."""
    return name.replace("~", "~0").replace("/", "~1")


class References:
    """The positions of a document that hold schemas, by address. `resolve` gives (pointer, schema, base)."""

    def __init__(self, document: Any) -> None:
        self.document = document
        self._named: dict[str, tuple[str, Any, str]] = {}
        self._bases: dict[str, str] = {}
        # Before 2019-09 what stands beside `$ref` counts for nothing. It does here (both readings hold), but an `$id` cannot.
        self._old = isinstance(document, dict) and "draft-0" in str(document.get("$schema"))
        self._named_beside: set[str] = set()  # pointers of nodes with a `$ref` and an `$id` at once, in an old document
        self._visit(document)

    def _visit(self, document: Any) -> None:
        todo: list[tuple[str, Any, str]] = [("", document, "")]
        while todo:
            pointer, node, base = todo.pop()
            if not isinstance(node, dict):
                continue
            for key in ("$id", "id"):
                name = node.get(key)
                if isinstance(name, str) and not name.startswith("#"):
                    base = urljoin(base, urldefrag(name)[0])
                    self._named.setdefault(base, (pointer, node, base))
                elif isinstance(name, str):  # draft-04's way to name an anchor
                    self._named.setdefault(base + name, (pointer, node, base))
            if self._old and "$ref" in node and any(isinstance(node.get(key), str) for key in ("$id", "id")):
                self._named_beside.add(pointer)
            anchor = node.get("$anchor")
            if isinstance(anchor, str):
                self._named.setdefault(f"{base}#{anchor}", (pointer, node, base))
            self._bases[pointer] = base
            for key in SINGLES:
                if isinstance(node.get(key), dict):
                    todo.append((f"{pointer}/{key}", node[key], base))
            for key in LISTS:
                if isinstance(node.get(key), list):
                    todo += [(f"{pointer}/{key}/{i}", item, base) for i, item in enumerate(node[key])]
            for key in MAPS:
                if isinstance(node.get(key), dict):
                    todo += [(f"{pointer}/{key}/{escape(name)}", item, base) for name, item in node[key].items()]

    def resolve(self, ref: Any, pointer: str) -> tuple[str, Any]:
        """The pointer and the schema that `ref`, written at `pointer`, means. Raises GrammarError for all that is not here."""
        if not isinstance(ref, str):
            refuse_schema(pointer, f"$ref is {type(ref).__name__}; expected a string.")
        if pointer in self._named_beside and (pointer or not ref.startswith("#")):
            refuse_schema(
                pointer,
                "'$ref' stands beside '$id', which drafts read in two ways. Take the $id away.",
            )
        base = self._bases.get(pointer, "")
        target, fragment = urldefrag(urljoin(base, ref) if base else ref)
        if target and target not in self._named:
            refuse_schema(pointer, "$ref points outside the schema, and nothing is ever fetched. Put the target into $defs.")
        root_pointer, root, _ = self._named[target] if target else ("", self.document, "")
        fragment = unquote(fragment)
        if not fragment:
            return root_pointer, root
        if not fragment.startswith("/"):
            found = self._named.get(f"{target}#{fragment}")
            if found is None:
                refuse_schema(pointer, f"$ref names the anchor {fragment[:80]!r}, which is not in the schema.")
            return found[0], found[1]
        node, at = root, root_pointer
        for step in fragment[1:].split("/"):
            key = step.replace("~1", "/").replace("~0", "~")
            if isinstance(node, dict) and key in node:
                node = node[key]
            elif isinstance(node, list) and key.isdigit() and int(key) < len(node):
                node = node[int(key)]
            else:
                refuse_schema(pointer, f"$ref points to {fragment[:80]!r}, which is not in the schema.")
            at += f"/{escape(key)}"
        if not isinstance(node, (dict, bool)):
            refuse_schema(pointer, f"$ref points to {fragment[:80]!r}, which is no schema.")
        return at, node
