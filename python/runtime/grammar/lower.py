"""Rewrites a JSON Schema into an equivalent one of fewer keywords (A2). What cannot be, and nobody enforces, is named.

    draft-04 … 2020-12  --walk, $ref targets once-->  2020-12 without annotations, ids, drafts' forms; $defs: d0, d1, …

Never weaker than the source: where dialects disagree, both readings hold (siblings of $ref, `dependencies`, `const` in draft-04).
With strict=False what only narrows may go instead, and is listed. Knows keywords; which engine takes the result is audit.py's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from phloem.runtime.errors import GrammarError
from phloem.runtime.grammar.base import Limits
from phloem.runtime.grammar.complement import complement, most_of_complement
from phloem.runtime.grammar.dates import DATE, DATE_TIME, TIME
from phloem.runtime.grammar.disjoint import TYPES, Known, are_disjoint, type_of
from phloem.runtime.grammar.limits import refuse_schema
from phloem.runtime.grammar.refs import References, escape
from phloem.runtime.grammar.regex_syntax import parse_regex

__all__ = ["ENGINE_FORMATS", "FORMAT_PATTERNS", "NARROWING", "Lowered", "lower_schema"]

Schema = Any

_OCTET = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_AN, _ANH = "[A-Za-z0-9]", "[A-Za-z0-9-]"
# RFC 1123, without the labels that punycode claims ("--" third and fourth): only a decoder can tell those that are sound.
_LABEL = f"{_AN}(?:{_AN}|{_ANH}{_AN}|{_ANH}{{2}}{_AN}|{_ANH}(?:{_AN}{_ANH}|-{_AN}){_ANH}{{0,58}}{_AN})?"
FORMAT_PATTERNS: dict[str, tuple[str, int | None]] = {
    "date": (f"^{DATE}$", None),
    "time": (f"^{TIME}$", None),
    "date-time": (f"^{DATE_TIME}$", None),
    "ipv4": (rf"^(?:{_OCTET}\.){{3}}{_OCTET}$", None),
    "hostname": (rf"^{_LABEL}(?:\.{_LABEL})*$", 253),
}
"""format -> its exact pattern, and the length that goes with it. The engines' own take 1990-02-30 or 22:59:60Z."""
ENGINE_FORMATS = frozenset({"email", "uuid", "ipv6", "duration", "uri"})

NARROWING = frozenset({
    "not", "if", "contains", "uniqueItems", "propertyNames", "dependentRequired", "dependentSchemas", "dependencies",
    "unevaluatedProperties", "unevaluatedItems", "format", "pattern", "multipleOf", "oneOf",
})  # fmt: skip
"""What strict=False may leave out: assertions that only narrow, never those that give a value its shape (A5)."""

_OF_TYPE = {
    "minimum": "number", "maximum": "number", "exclusiveMinimum": "number", "exclusiveMaximum": "number", "multipleOf": "number",
    "minLength": "string", "maxLength": "string", "pattern": "string", "format": "string",
    "items": "array", "prefixItems": "array", "additionalItems": "array", "minItems": "array", "maxItems": "array",
    "uniqueItems": "array", "contains": "array", "minContains": "array", "maxContains": "array", "unevaluatedItems": "array",
    "properties": "object", "patternProperties": "object", "additionalProperties": "object", "required": "object",
    "minProperties": "object", "maxProperties": "object", "propertyNames": "object", "dependentRequired": "object",
    "dependentSchemas": "object", "dependencies": "object", "unevaluatedProperties": "object",
}  # fmt: skip
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties", "minContains", "maxContains")
_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_BOUNDS = (
    ("minimum", "maximum"), ("exclusiveMinimum", "maximum"), ("minimum", "exclusiveMaximum"), ("minLength", "maxLength"),
    ("minItems", "maxItems"), ("minProperties", "maxProperties"),
)  # fmt: skip
_IN_PLACE = ("$ref", "allOf", "anyOf", "oneOf", "not", "if", "dependentSchemas", "dependencies")


@dataclass
class Lowered:
    """schema: the equivalent one.   lowered, dropped: (pointer, keyword).   unproved: `oneOf`s that are left to an engine."""

    schema: Schema
    lowered: list[tuple[str, str]] = field(default_factory=list)
    dropped: list[tuple[str, str]] = field(default_factory=list)
    unproved: list[tuple[str, str]] = field(default_factory=list)


def lower_schema(schema: Schema, limits: Limits, *, strict: bool = True, loose_one_of: bool = False) -> Lowered:
    """loose_one_of: with strict=False, drop the exclusion of every `oneOf` that is not proved disjoint.

    Raises GrammarError for what is invalid, out of reach of every engine, or (strict) enforced by none.
    """
    return _Lowering(schema, limits, strict, loose_one_of).run()


class _Lowering:
    def __init__(self, document: Schema, limits: Limits, strict: bool, loose_one_of: bool) -> None:
        self.refs, self.limits, self.strict, self.loose = References(document), limits, strict, loose_one_of
        self.out = Lowered(document)
        self.defs: dict[str, Schema] = {}
        self.known = Known(self.defs)
        self.names: dict[str, str] = {}  # pointer of a $ref's target -> its name
        self.queue: list[tuple[str, Schema, str]] = []
        self.one_ofs: list[tuple[dict[str, Any], str]] = []  # lowered schemas with a oneOf: settled at the end, in place

    def run(self) -> Lowered:
        root = self.lower(self.refs.document, "")
        while self.queue:
            name, node, pointer = self.queue.pop()
            self.defs[name] = self.lower(node, pointer)
        self.check_cycles(root)
        for made, pointer in self.one_ofs:
            self.settle_one_of(made, pointer)
        if root is False:
            refuse_schema("", "it is false: no value could ever be right.")
        if self.defs:
            if not isinstance(root, dict):
                root = {}
            root = {**root, "$defs": dict(sorted(self.defs.items()))}
        self.out.schema = root
        return self.out

    # ------------------------------------------------------------------------------------------------------- one schema

    def lower(self, node: Schema, pointer: str) -> Schema:
        if node is True or node is False:
            return {} if node else False
        if not isinstance(node, dict):
            refuse_schema(pointer, f"expected a schema (an object, true or false), not a {type(node).__name__}.")
        made: dict[str, Any] = {}
        types = self.types(node, pointer)
        if types is not None:
            made["type"] = types[0] if len(types) == 1 else types
        for keyword, value in node.items():
            rule = _RULES.get(keyword)
            if rule is None:
                continue  # an annotation, or unknown: asserts nothing
            kind = _OF_TYPE.get(keyword)
            if kind is not None and types is not None and not self.applies(kind, types):
                continue
            at = f"{pointer}/{escape(keyword)}"
            rule(self, made, node, value, at, pointer)
        return self.simplified(made, pointer)

    def types(self, node: dict[str, Any], pointer: str) -> list[str] | None:
        value = node.get("type")
        if value is None:
            return None
        named = [value] if isinstance(value, str) else value
        if not isinstance(named, list) or not named or not all(isinstance(t, str) and t in TYPES for t in named):
            refuse_schema(pointer, f"type is {value!r:.80}; expected one or more of {', '.join(sorted(TYPES))}.")
        return [t for t in dict.fromkeys(named) if not (t == "integer" and "number" in named)]

    @staticmethod
    def applies(kind: str, types: list[str]) -> bool:
        return kind in types or (kind == "number" and "integer" in types)

    def refuse(self, keyword: str, pointer: str, why: str) -> None:
        """Nobody enforces this keyword: drop it if that is allowed, else 400 by name."""
        if not self.strict and keyword in NARROWING:
            self.out.dropped.append((pointer, keyword))
            return
        way = "Leave it out" + (", or ask for strict=False, which drops it and says so." if keyword in NARROWING else ".")
        refuse_schema(pointer, f"{keyword!r} {why} {way}")

    def note(self, keyword: str, pointer: str) -> None:
        self.out.lowered.append((pointer, keyword))

    def all_of(self, made: dict[str, Any], part: Schema) -> None:
        if part != {}:
            made.setdefault("allOf", []).append(part)

    # --------------------------------------------------------------------------------------------------- keyword by keyword

    def ref(self, made: dict[str, Any], node: dict[str, Any], value: Any, at: str, pointer: str) -> None:
        target_pointer, target = self.refs.resolve(value, pointer)
        if isinstance(target, bool):
            if not target:
                self.all_of(made, False)
            return
        name = self.names.get(target_pointer)
        if name is None:
            name = self.names[target_pointer] = f"d{len(self.names)}"
            self.queue.append((name, target, target_pointer))
        if "$ref" in made:
            self.all_of(made, {"$ref": f"#/$defs/{name}"})
        else:
            made["$ref"] = f"#/$defs/{name}"

    def values(self, made: dict[str, Any], node: dict[str, Any], value: Any, at: str, pointer: str) -> None:
        """enum and const, as one enum, filtered by the type beside it."""
        listed = node.get("enum", [node.get("const")])
        if not isinstance(listed, list) or not listed:
            refuse_schema(pointer, "enum lists nothing: no value could ever be right. Name values.")
        if "enum" in node and "const" in node:
            listed = [v for v in listed if _equal(v, node["const"])]
        types = made.get("type")
        if types is not None:
            named = [types] if isinstance(types, str) else types
            listed = [v for v in listed if type_of(v) in named or (type_of(v) == "integer" and "number" in named)]
        if not listed:
            refuse_schema(pointer, "no value of the enum fits what stands beside it. Name one that does.")
        made["enum"] = listed

    def number(self, made: dict[str, Any], node: dict[str, Any], value: Any, at: str, pointer: str) -> None:
        keyword = at.rsplit("/", 1)[1]
        if isinstance(value, bool) and keyword.startswith("exclusive"):  # draft-04: a flag on the other bound
            bound = "minimum" if keyword == "exclusiveMinimum" else "maximum"
            self.note(keyword, pointer)
            if value and bound in node:
                made[keyword] = node[bound]
                made.pop(bound, None)
            return
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            refuse_schema(pointer, f"{keyword} is {value!r:.80}; expected a number.")
        if keyword == "multipleOf" and value <= 0:
            refuse_schema(pointer, f"multipleOf is {value!r}; expected a number above 0.")
        if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
            value = int(value)
        if keyword in ("minimum", "maximum") and node.get(f"exclusive{keyword.capitalize()}") is True:
            return
        made[keyword] = value

    def count(self, made: dict[str, Any], node: dict[str, Any], value: Any, at: str, pointer: str) -> None:
        keyword = at.rsplit("/", 1)[1]
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            refuse_schema(pointer, f"{keyword} is {value!r:.80}; expected a whole number from 0.")
        if keyword in ("minContains", "maxContains"):
            return  # read with `contains`
        if value or not keyword.startswith("min"):
            made[keyword] = value

    def pattern(self, made: dict[str, Any], node: dict[str, Any], value: Any, at: str, pointer: str) -> None:
        if self.good_pattern("pattern", value, pointer):
            self.add_pattern(made, value)

    def add_pattern(self, made: dict[str, Any], pattern: str) -> None:
        if "pattern" in made:
            self.all_of(made, {"pattern": pattern})
        else:
            made["pattern"] = pattern

    def good_pattern(self, keyword: str, value: Any, pointer: str) -> bool:
        if not isinstance(value, str):
            refuse_schema(pointer, f"{keyword} is a {type(value).__name__}; expected a regex as a string.")
        try:
            parse_regex(value, self.limits, param="pattern")
        except GrammarError as error:
            if len(value) > self.limits.pattern_bytes:
                refuse_schema(pointer, error.message)
            self.refuse(keyword, pointer, f"cannot be enforced: {error.message}")
            return False
        return True

    def format(self, made: dict[str, Any], node: dict[str, Any], value: Any, at: str, pointer: str) -> None:
        known = FORMAT_PATTERNS.get(value) if isinstance(value, str) else None
        if known is not None:
            self.note("format", pointer)
            self.add_pattern(made, known[0])
            if known[1] is not None:
                self.all_of(made, {"maxLength": known[1]})
        elif value in ENGINE_FORMATS:
            made["format"] = value
        else:
            listed = ", ".join(sorted([*FORMAT_PATTERNS, *ENGINE_FORMATS]))
            self.refuse("format", pointer, f"{value!r:.60} is enforced by no engine here; known are {listed}.")

    def properties(self, made: dict[str, Any], node: dict[str, Any], value: Any, at: str, pointer: str) -> None:
        mapping = self.mapping("properties", value, pointer)
        made["properties"] = {name: self.lower(part, f"{at}/{escape(name)}") for name, part in mapping.items()}

    def pattern_properties(self, made: dict[str, Any], node: dict[str, Any], value: Any, at: str, pointer: str) -> None:
        mapping = self.mapping("patternProperties", value, pointer)
        for name in mapping:
            try:
                parse_regex(name, self.limits, param="pattern")
            except GrammarError as error:
                refuse_schema(pointer, f"patternProperties holds a name that cannot be enforced: {error.message}")
        if mapping:
            made["patternProperties"] = {name: self.lower(part, f"{at}/{escape(name)}") for name, part in mapping.items()}

    def mapping(self, keyword: str, value: Any, pointer: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            refuse_schema(pointer, f"{keyword} is a {type(value).__name__}; expected an object.")
        return value

    def required(self, made: dict[str, Any], node: dict[str, Any], value: Any, at: str, pointer: str) -> None:
        made["required"] = self.names_of("required", value, pointer)
        if not made["required"]:
            del made["required"]

    def names_of(self, keyword: str, value: Any, pointer: str) -> list[str]:
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            refuse_schema(pointer, f"{keyword} is not a list of property names.")
        return list(dict.fromkeys(value))

    def additional(self, made: dict[str, Any], node: dict[str, Any], value: Any, at: str, pointer: str) -> None:
        part = self.lower(value, at)
        if part != {}:
            made["additionalProperties"] = part

    def items(self, made: dict[str, Any], node: dict[str, Any], value: Any, at: str, pointer: str) -> None:
        if isinstance(value, list):  # before 2020-12
            self.note("items", pointer)
            made["prefixItems"] = [self.lower(part, f"{at}/{i}") for i, part in enumerate(value)]
            if "additionalItems" in node:
                rest = self.lower(node["additionalItems"], f"{pointer}/additionalItems")
                if rest != {}:
                    made["items"] = rest
            if not made["prefixItems"]:
                del made["prefixItems"]
            return
        part = self.lower(value, at)
        if part != {}:
            made["items"] = part

    def prefix_items(self, made: dict[str, Any], node: dict[str, Any], value: Any, at: str, pointer: str) -> None:
        made["prefixItems"] = self.listed("prefixItems", value, at, pointer)

    def listed(self, keyword: str, value: Any, at: str, pointer: str) -> list[Schema]:
        if not isinstance(value, list) or not value:
            refuse_schema(pointer, f"{keyword} is no list of schemas, or lists none.")
        return [self.lower(part, f"{at}/{i}") for i, part in enumerate(value)]

    def every(self, made: dict[str, Any], node: dict[str, Any], value: Any, at: str, pointer: str) -> None:
        for part in self.listed("allOf", value, at, pointer):
            self.all_of(made, part)

    def any_of(self, made: dict[str, Any], node: dict[str, Any], value: Any, at: str, pointer: str) -> None:
        options = [part for part in self.listed("anyOf", value, at, pointer) if part is not False]
        if not options:
            refuse_schema(pointer, "every option of anyOf is false: no value could ever be right.")
        if {} not in options:
            self.alternatives(made, options)

    def alternatives(self, made: dict[str, Any], options: list[Schema]) -> None:
        if len(options) == 1:
            self.all_of(made, options[0])
        elif "anyOf" in made:
            self.all_of(made, {"anyOf": options})
        else:
            made["anyOf"] = options

    def one_of(self, made: dict[str, Any], node: dict[str, Any], value: Any, at: str, pointer: str) -> None:
        options = [part for part in self.listed("oneOf", value, at, pointer) if part is not False]
        if not options:
            refuse_schema(pointer, "every option of oneOf is false: no value could ever be right.")
        if len(options) == 1:
            self.note("oneOf", pointer)
            self.all_of(made, options[0])
            return
        made["oneOf"] = options
        self.one_ofs.append((made, pointer))

    def settle_one_of(self, made: dict[str, Any], pointer: str) -> None:
        """Once every $ref target is lowered."""
        options, beside = made["oneOf"], {key: made[key] for key in _SHAPE if key in made}
        apart = self.apart(options, beside)
        if apart is not None:
            self.note("oneOf", pointer)
            if not apart:
                refuse_schema(pointer, "no value fits exactly one option of oneOf.")
        elif self.loose:
            self.out.dropped.append((pointer, "oneOf"))
        else:
            self.out.unproved.append((pointer, "oneOf"))
            return
        del made["oneOf"]
        self.alternatives(made, options if apart is None else apart)

    def apart(self, options: list[Schema], beside: dict[str, Any]) -> list[Schema] | None:
        """The options, each without what another one takes too; None where that cannot be said.

        beside: what stands beside the oneOf, and holds of every option.
        """
        if len(options) > MAX_PAIRED:
            return None
        found: list[Schema] = []
        for i, option in enumerate(options):
            whole = _both(beside, option) if beside else option
            only: list[Schema] = [option]
            for j, other in enumerate(options):
                if i == j or self.disjoint(option, other, beside):
                    continue
                outside = most_of_complement(other, self.known, whole)
                if outside is None or len(only) > MAX_OVERLAPS:
                    return None
                if len(only) > 1:  # engines multiply alternatives out
                    outside = outside[:1]
                part = outside[0] if len(outside) == 1 else {"anyOf": outside}
                if part not in only:
                    only.append(part)
            found.append(only[0] if len(only) == 1 else {"allOf": only})
        return found

    def disjoint(self, a: Schema, b: Schema, beside: dict[str, Any]) -> bool:
        if are_disjoint(a, b, self.known):
            return True
        return bool(beside) and are_disjoint(_both(beside, a), _both(beside, b), self.known)

    def negation(self, made: dict[str, Any], node: dict[str, Any], value: Any, at: str, pointer: str) -> None:
        """`not`, where it says that a property is absent or a type or a listed value is excluded."""
        if value is False or (isinstance(value, dict) and value.get("type") == []):
            return
        keys = {key for key in value if key in _RULES or key == "type"} if isinstance(value, dict) else set()
        types = node.get("type")
        if keys == {"required"} and types == "object":
            names = self.names_of("required", value["required"], at)
            self.note("not", pointer)
            absent: list[Schema] = [{"properties": {name: False}} for name in names]
            if not absent:
                refuse_schema(pointer, "'not' excludes every value.")
            self.alternatives(made, absent)
        elif keys == {"type"}:
            named = [value["type"]] if isinstance(value["type"], str) else value["type"]
            left = [t for t in ([types] if isinstance(types, str) else types or _ALL_TYPES) if t not in named]
            if "number" in named:
                left = [t for t in left if t != "integer"]
            if "integer" in named and "number" in left:
                self.refuse("not", pointer, "of integers among numbers is enforced by no engine here.")
                return
            if not left:
                refuse_schema(pointer, "'not' excludes every type that is left.")
            self.note("not", pointer)
            self.all_of(made, {"type": left[0] if len(left) == 1 else left})
        elif keys in ({"enum"}, {"const"}) and isinstance(node.get("enum"), list):
            out = value["enum"] if "enum" in value else [value["const"]]
            left_values = [v for v in node["enum"] if not any(_equal(v, o) for o in out)]
            if not left_values:
                refuse_schema(pointer, "'not' excludes every value of the enum.")
            self.note("not", pointer)
            self.all_of(made, {"enum": left_values})
        else:
            outside = self.outside(value, at, made)
            if outside is None:
                self.refuse("not", pointer, "is enforced by no engine here in this form.")
                return
            if not outside:
                refuse_schema(pointer, "'not' excludes every value.")
            self.note("not", pointer)
            self.alternatives(made, outside)

    def outside(self, test: Schema, at: str, made: dict[str, Any]) -> list[Schema] | None:
        """What `test` excludes. None: not expressible, also for what is refused or would be dropped within it."""
        strict, self.strict = self.strict, True
        queue, names, one_ofs = list(self.queue), dict(self.names), list(self.one_ofs)
        try:
            lowered = self.lower(test, at)
            if self.one_ofs != one_ofs:
                return None
            return complement(lowered, self.known, {"type": made["type"]} if "type" in made else None)
        except GrammarError:
            self.queue, self.names, self.one_ofs = queue, names, one_ofs
            return None
        finally:
            self.strict = strict

    def condition(self, made: dict[str, Any], node: dict[str, Any], value: Any, at: str, pointer: str) -> None:
        """`if` on the value of one listed property, as the alternatives that it means."""
        then, other = node.get("then", True), node.get("else", True)
        if then in (True, {}) and other in (True, {}):
            return
        split = self.split(node, value)
        if split is None:
            self.branches(made, value, then, other, at, pointer)
            return
        self.note("if", pointer)
        name, inside, outside, needed = split
        yes, no = self.lower(then, f"{pointer}/then"), self.lower(other, f"{pointer}/else")
        options: list[Schema] = []
        if inside:
            options.append(_both({"properties": {name: {"enum": inside}}, "required": [name]}, yes))
        if outside:
            options.append(_both({"properties": {name: {"enum": outside}}, "required": [name]}, no))
        if name not in node.get("required", ()):
            options.append(_both({"properties": {name: False}}, no if needed else yes))
        options = [option for option in options if option is not False]
        if not options:
            refuse_schema(pointer, "no branch of 'if' can be right.")
        self.alternatives(made, options)

    def branches(self, made: dict[str, Any], value: Any, then: Any, other: Any, at: str, pointer: str) -> None:
        outside = self.outside(value, at, made)
        if outside is None:
            self.refuse("if", pointer, "is enforced by no engine here in this form.")
            return
        self.note("if", pointer)
        no = self.lower(other, f"{pointer}/else")
        inside = _both(self.lower(value, at), self.lower(then, f"{pointer}/then"))
        options = [one for one in (inside, *(_both(one, no) for one in outside)) if one is not False]
        if not options:
            refuse_schema(pointer, "no branch of 'if' can be right.")
        self.alternatives(made, options)

    @staticmethod
    def split(node: dict[str, Any], test: Any) -> tuple[str, list[Any], list[Any], bool] | None:
        """(property, values that pass, values that do not, whether it must be there to pass)."""
        if not isinstance(test, dict) or node.get("type") != "object":
            return None
        asked = {key for key in test if key in _RULES}
        properties = test.get("properties")
        if not asked <= {"properties", "required"} or not isinstance(properties, dict) or len(properties) != 1:
            return None
        ((name, part),) = properties.items()
        if test.get("type", "object") != "object" or test.get("required", [name]) != [name] or not isinstance(part, dict):
            return None
        if {key for key in part if key in _RULES} not in ({"const"}, {"enum"}):
            return None
        declared = node.get("properties", {}).get(name) if isinstance(node.get("properties"), dict) else None
        if not isinstance(declared, dict):
            return None
        every = declared.get("enum", [declared["const"]] if "const" in declared else None)
        if every is None and declared.get("type") == "boolean":
            every = [True, False]
        wanted = part.get("enum", [part.get("const")])
        if not isinstance(every, list) or not isinstance(wanted, list):
            return None
        inside = [v for v in every if any(_equal(v, w) for w in wanted)]
        return name, inside, [v for v in every if not any(_equal(v, i) for i in inside)], "required" in test

    def contains(self, made: dict[str, Any], node: dict[str, Any], value: Any, at: str, pointer: str) -> None:
        if node.get("minContains") == 0 and "maxContains" not in node:
            return
        if value in (True, {}) and "maxContains" not in node:
            self.note("contains", pointer)
            self.all_of(made, {"minItems": node.get("minContains", 1)})
            return
        self.refuse("contains", pointer, "is enforced by no engine here.")

    def unique(self, made: dict[str, Any], node: dict[str, Any], value: Any, at: str, pointer: str) -> None:
        if not isinstance(value, bool):
            refuse_schema(pointer, f"uniqueItems is {value!r:.80}; expected true or false.")
        if value and not (type(node.get("maxItems")) is int and node["maxItems"] <= 1):
            self.refuse("uniqueItems", pointer, "is enforced by no engine here.")

    def property_names(self, made: dict[str, Any], node: dict[str, Any], value: Any, at: str, pointer: str) -> None:
        """Names that match a pattern, where nothing else is said of names, are patternProperties."""
        test = self.followed(value, at)
        if test is True or (
            isinstance(test, dict) and not any(k in _RULES for k in test) and test.get("type", "string") == "string"
        ):
            return
        keys = {key for key in test if key in _RULES} if isinstance(test, dict) else set()
        rest = node.get("additionalProperties", True)
        plain = isinstance(test, dict) and test.get("type", "string") == "string" and "patternProperties" not in node
        if plain and keys and keys <= {"pattern", "minLength", "maxLength"} and not node.get("properties") and len(keys) == 1:
            pattern = test["pattern"] if "pattern" in test else _length_pattern(test)
            if self.good_pattern("propertyNames", pattern, pointer):
                self.note("propertyNames", pointer)
                part = self.lower(rest, f"{pointer}/additionalProperties")
                self.all_of(made, {"patternProperties": {pattern: part}, "additionalProperties": False})
        elif plain and keys in ({"enum"}, {"const"}) and not node.get("properties"):
            listed = test.get("enum", [test.get("const")])
            part = self.lower(rest, f"{pointer}/additionalProperties")
            self.note("propertyNames", pointer)
            self.all_of(made, {"properties": {n: part for n in listed if isinstance(n, str)}, "additionalProperties": False})
        else:
            self.refuse("propertyNames", pointer, "is enforced by no engine here beside properties, or in this form.")

    def followed(self, node: Schema, pointer: str) -> Schema:
        """What a schema that is nothing but a $ref points to."""
        for _ in range(16):
            if not isinstance(node, dict) or {key for key in node if key in _RULES or key == "type"} != {"$ref"}:
                break
            pointer, node = self.refs.resolve(node["$ref"], pointer)
        return node

    def dependencies(self, made: dict[str, Any], node: dict[str, Any], value: Any, at: str, pointer: str) -> None:
        """What a property brings with it: the property is absent, or the rest holds."""
        keyword = at.rsplit("/", 1)[1]
        for name, wanted in self.mapping(keyword, value, pointer).items():
            if isinstance(wanted, list):
                names = self.names_of(keyword, wanted, pointer)
                if not names or set(names) <= {name}:
                    continue
                part: Schema = {"required": list(dict.fromkeys([name, *names]))}
            else:
                part = _both({"required": [name]}, self.lower(wanted, f"{at}/{escape(name)}"))
            if node.get("type") != "object":
                # Beside other types the second option would let only objects through that have the property; as does the first.
                self.refuse(keyword, pointer, "is enforced by no engine here where 'type' is not \"object\".")
                return
            self.note(keyword, pointer)
            absent: Schema = {"properties": {name: False}}
            always = name in node.get("required", ()) if isinstance(node.get("required"), list) else False
            self.alternatives(made, [option for option in (part, *(() if always else (absent,))) if option is not False])

    def unevaluated(self, made: dict[str, Any], node: dict[str, Any], value: Any, at: str, pointer: str) -> None:
        keyword = at.rsplit("/", 1)[1]
        if value in (True, {}):
            return
        closed = "additionalProperties" if keyword == "unevaluatedProperties" else "items"
        if any(key in node for key in _IN_PLACE):
            self.refuse(keyword, pointer, f"is enforced by no engine here beside combinators. Say {closed!r} in each part.")
        elif closed not in node and not (closed == "items" and "contains" in node):
            self.note(keyword, pointer)
            made[closed] = self.lower(value, at)

    def dynamic(self, made: dict[str, Any], node: dict[str, Any], value: Any, at: str, pointer: str) -> None:
        self.refuse(at.rsplit("/", 1)[1], pointer, "is enforced by no engine here. Use $ref.")

    # --------------------------------------------------------------------------------------------------------- the whole

    def simplified(self, made: dict[str, Any], pointer: str) -> Schema:
        for low, high in _BOUNDS:
            if low in made and high in made and made[low] > made[high]:
                refuse_schema(pointer, f"{low} {made[low]} is above {high} {made[high]}: no value could ever be right.")
        if len(made.get("enum", ())) and set(made) <= {"type", "enum"}:
            return {"enum": made["enum"]}
        parts = made.get("allOf")
        if parts is not None:
            if False in parts:
                return False
            if len(parts) == 1 and len(made) == 1:
                return parts[0]
            for part in list(parts):  # what the node itself does not say moves into it, where that changes no order
                if not set(part) & set(made) and (set(part) <= _MERGED or (len(parts) == 1 and _may_move(part, made))):
                    parts.remove(part)
                    made.update(part)
            if made["allOf"] is parts and not parts:
                del made["allOf"]
        return made

    def check_cycles(self, root: Schema) -> None:
        """No $ref may come back to itself without consuming a character (C1)."""
        state: dict[str, int] = {}

        def visit(name: str) -> None:
            if state.get(name) == 2:
                return
            if state.get(name) == 1:
                pointer = next(p for p, n in self.names_by_pointer() if n == name)
                refuse_schema(
                    pointer, "this $ref leads back to itself and describes nothing. Put a property or an item between."
                )
            state[name] = 1
            for target in _in_place_targets(self.defs[name]):
                visit(target)
            state[name] = 2

        for name in self.defs:
            visit(name)

    def names_by_pointer(self) -> list[tuple[str, str]]:
        return list(self.names.items())


MAX_PAIRED, MAX_OVERLAPS = 64, 4
_SHAPE = ("type", "properties", "required", "additionalProperties", "patternProperties")
_MERGED = frozenset({"type", "enum", *_NUMBERS, "minLength", "maxLength", "pattern", "format", "minItems", "maxItems"})
"""Keywords whose place among others says nothing of the order of generation."""
_SETTLED_LATER = frozenset({"oneOf", "$ref"})
_LEFT_OVER = (("additionalProperties", frozenset({"properties", "patternProperties"})), ("items", frozenset({"prefixItems"})))
"""Keywords of whatever these siblings do not name."""
_ALL_TYPES = ["null", "boolean", "number", "string", "array", "object"]


def _may_move(part: dict[str, Any], made: dict[str, Any]) -> bool:
    """Whether the part means the same beside the node's own keywords: some speak of what their siblings leave over."""
    clash = any((rest in part and made.keys() & named) or (rest in made and part.keys() & named) for rest, named in _LEFT_OVER)
    return not clash and not set(part) & _SETTLED_LATER


def _in_place_targets(node: Schema) -> list[str]:
    if not isinstance(node, dict):
        return []
    found = [node["$ref"].removeprefix("#/$defs/")] if "$ref" in node else []
    for keyword in ("allOf", "anyOf", "oneOf"):
        for part in node.get(keyword, ()):
            found += _in_place_targets(part)
    return found


def _both(a: Schema, b: Schema) -> Schema:
    if a is False or b is False:
        return False
    if a == {}:
        return b
    return a if b == {} else {"allOf": [a, b]}


def _equal(a: Any, b: Any) -> bool:
    """JSON equality: 1 is 1.0, and neither is true."""
    if isinstance(a, bool) or isinstance(b, bool):
        return a is b
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(_equal(x, y) for x, y in zip(a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_equal(v, b[k]) for k, v in a.items())
    return bool(a == b)


def _length_pattern(test: dict[str, Any]) -> str:
    low, high = test.get("minLength", 0), test.get("maxLength")
    return rf"^[\s\S]{{{low},{'' if high is None else high}}}$"


_Rule = Callable[[_Lowering, dict[str, Any], dict[str, Any], Any, str, str], None]
_RULES: dict[str, _Rule] = {
    "$ref": _Lowering.ref, "$dynamicRef": _Lowering.dynamic, "$recursiveRef": _Lowering.dynamic,
    "enum": _Lowering.values, "const": _Lowering.values,
    **dict.fromkeys(_NUMBERS, _Lowering.number), **dict.fromkeys(_COUNTS, _Lowering.count),
    "pattern": _Lowering.pattern, "format": _Lowering.format,
    "properties": _Lowering.properties, "patternProperties": _Lowering.pattern_properties, "required": _Lowering.required,
    "additionalProperties": _Lowering.additional, "items": _Lowering.items, "prefixItems": _Lowering.prefix_items,
    "allOf": _Lowering.every, "anyOf": _Lowering.any_of, "oneOf": _Lowering.one_of, "not": _Lowering.negation,
    "if": _Lowering.condition, "contains": _Lowering.contains, "uniqueItems": _Lowering.unique,
    "propertyNames": _Lowering.property_names, "dependencies": _Lowering.dependencies,
    "dependentRequired": _Lowering.dependencies, "dependentSchemas": _Lowering.dependencies,
    "unevaluatedProperties": _Lowering.unevaluated, "unevaluatedItems": _Lowering.unevaluated,
}  # fmt: skip
