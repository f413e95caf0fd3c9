"""Read a YAML file as the fields of a msgspec struct say: its values, where each came from, and every problem in it.

Stricter than YAML where YAML surprises: only decimal numbers, no aliases, tags or duplicate keys, and a text that some
reader may take for something else must be quoted. Knows nothing of which settings there are, or of files that override
each other.
"""

import difflib
import re
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import yaml
from msgspec import Struct, inspect

from skerry.core import in_range, range_text

MAX_BYTES = 256 * 1024  # PyYAML reads some 100 KB per second on a small board
MAX_DEPTH = 32


class Leaf(Struct, frozen=True):
    """A key that is not a section: its dotted path, its type, whether it may be null, and its description."""

    path: str
    kind: inspect.Type
    optional: bool
    description: str

    @property
    def wanted(self) -> str:
        """The type and its range in words."""
        return _wanted(self.kind) + (" or null" if self.optional else "")


def leaves(struct: type[Struct]) -> Iterator[Leaf]:
    """Every key of a struct and of the structs in it, in their order."""

    def below(section: inspect.StructType, prefix: str) -> Iterator[Leaf]:
        for field in section.fields:
            leaf = as_leaf(f"{prefix}{field.name}", field.type)
            if isinstance(leaf.kind, inspect.StructType):
                yield from below(leaf.kind, f"{leaf.path}.")
            else:
                yield leaf

    yield from below(_info(struct), "")


def as_leaf(path: str, kind: inspect.Type) -> Leaf:
    return Leaf(path, *_bare(kind))


class TypedFile:
    """One file: `values` as nested dicts for msgspec.convert, `origins` by dotted key path (`file:line`), `problems`.

    With problems, `values` may lack what they concern.
    """

    def __init__(self, path: Path, struct: type[Struct]) -> None:
        self.name = printable(str(path))
        self.values: dict[str, Any] = {}
        self.origins: dict[str, str] = {}
        self.problems: list[str] = []
        self._struct = struct
        try:
            root = _composed(_text(path))
        except _UnreadableError as problem:
            self.problems.append(f"{self.name}{problem}")
            return
        if root is not None:  # else the file is empty
            self.values = self._value(root, _info(struct), "") or {}

    def _problem(self, node: yaml.Node, path: str, text: str) -> None:
        self.problems.append(f"{self._place(node)}: {path}{': ' if path else ''}{text}")

    def _place(self, node: yaml.Node) -> str:
        return f"{self.name}:{node.start_mark.line + 1}"

    def _value(self, node: yaml.Node, kind: inspect.Type, path: str) -> Any:
        """The value of a node; None also after a problem with its type."""
        kind, optional, _ = _bare(kind)
        value, found, advice = _untyped(node)
        if value is None and optional:
            return None
        if isinstance(kind, inspect.StructType) and (value is _MAPPING or value is None):
            return self._section(node, kind, path)
        if isinstance(kind, inspect.VarTupleType) and value is _LIST:
            return self._list(node, kind, path)
        if not _fits(value, kind):
            if isinstance(kind, inspect.StrType) and isinstance(node, yaml.ScalarNode) and value is not None:
                advice = advice or "quote it if it is text"
            wanted = _wanted(kind) + (" or null" if optional else "")
            self._problem(node, path, f"found {found}, wanted {wanted}" + (f" ({advice})" if advice else ""))
            return None
        if isinstance(kind, inspect.IntType | inspect.FloatType) and not in_range(value, kind):
            self._problem(node, path, f"{value} is out of range (use a value {range_text(kind)})")
        if isinstance(kind, inspect.StrType) and len(value) < (kind.min_length or 0):
            self._problem(node, path, "found an empty text, wanted at least one character")
        if isinstance(kind, inspect.StrType) and kind.max_length and len(value) > kind.max_length:
            self._problem(node, path, f"found {len(value)} characters, wanted at most {kind.max_length}")
        return value

    def _list(self, node: yaml.Node, kind: inspect.VarTupleType, path: str) -> list[Any]:
        """The items. In a list of sections, a key without a default tells the items apart: its value may not repeat."""
        values = [self._value(item, kind.item_type, f"{path}[{at}]") for at, item in enumerate(node.value)]
        item_kind, _, _ = _bare(kind.item_type)
        names = [f.name for f in item_kind.fields if f.required] if isinstance(item_kind, inspect.StructType) else []
        for name in names:
            first: dict[str, str] = {}
            for at, found in enumerate((item or {}).get(name) for item in values):
                below = f"{path}[{at}].{name}"
                if found and first.setdefault(found, below) != below:
                    self.problems.append(f"{self.origins[below]}: {below}: {printable(found)} is {first[found]} too")
        return values

    def _section(self, node: yaml.Node, kind: inspect.StructType, path: str) -> dict[str, Any]:
        fields = {field.name: field.type for field in kind.fields}
        first: dict[str, int] = {}
        values: dict[str, Any] = {}
        for key, item in node.value if isinstance(node, yaml.MappingNode) else ():  # else all keys are commented out
            if not isinstance(key, yaml.ScalarNode):
                self._problem(key, path, "found a list or a section as a key, wanted a name")
                continue
            name, below = key.value, f"{path}.{_shown(key.value)}" if path else _shown(key.value)
            if name in first:
                self._problem(key, below, f"duplicate key (first on line {first[name]})")
            elif name not in fields:
                elsewhere = [leaf.path for leaf in leaves(self._struct) if leaf.path.endswith(f".{name}")]
                self._problem(
                    key, below, f"unknown key{did_you_mean(name, fields) or did_you_mean(name, elsewhere, 0)}"
                )
            else:
                values[name] = self._value(item, fields[name], below)
                self.origins[below] = self._place(key)
            first.setdefault(name, key.start_mark.line + 1)
        for field in kind.fields:
            if field.required and field.name not in values:
                self._problem(node, f"{path}.{field.name}", f"is missing, wanted {_wanted(_bare(field.type)[0])}")
        return values


def did_you_mean(name: str, names: Iterable[str], likeness: float = 0.6) -> str:
    """` (did you mean x?)`, or nothing when no name is near."""
    near = difflib.get_close_matches(name[:80], names, 1, likeness)
    return f" (did you mean {near[0]}?)" if near else ""


def printable(text: str) -> str:
    """A text from outside, safe on one line of a terminal."""
    return text if text and text.isprintable() else repr(text)


def _short(text: str) -> str:
    return text if len(text) <= 80 else f"{text[:77]}..."


def _shown(text: str) -> str:
    return printable(_short(text))


_INT = re.compile(r"[-+]?(0|[1-9][0-9]{0,39})")
_FLOAT = re.compile(r"[-+]?((0|[1-9][0-9]*)(\.[0-9]*)?|\.[0-9]+)([eE][-+]?[0-9]+)?")
_NUMBER_1_2 = re.compile(r"[-+]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][-+]?[0-9]+)?|0o[0-7]+")  # what 1.1 takes for text
_BOOLS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
_SCALARS = {inspect.StrType: str, inspect.BoolType: bool, inspect.IntType: int, inspect.FloatType: float}
_MAPPING, _LIST, _UNREADABLE = object(), object(), object()


def _untyped(node: yaml.Node) -> tuple[Any, str, str]:
    """A scalar's value, or a mark for anything else; what to call it in a message; what to advise.

    YAML 1.1 and 1.2 read plain scalars like `010`, `1e3`, `1:30` and `1_000` differently, and people differ from both:
    only decimal numbers are numbers, and a plain scalar that either version takes for a number is not text.
    """
    tag = node.tag.removeprefix("tag:yaml.org,2002:")
    if not isinstance(node, yaml.ScalarNode):
        other = (_UNREADABLE, f"a value with the tag {_shown(node.tag)}", "leave the tag out")
        return {"map": (_MAPPING, "a section", ""), "seq": (_LIST, "a list", "")}.get(tag, other)
    text, short = node.value, _shown(node.value)
    if tag == "null":
        return None, "nothing (null)", "leave the key out to keep the default"
    if tag == "bool" and text.lower() in _BOOLS:
        value = _BOOLS[text.lower()]
        means = str(value).lower()
        return value, means if means == text.lower() else f"{short} (which YAML takes for {means})", ""
    if tag in ("int", "float") or (tag == "str" and node.style is None and _NUMBER_1_2.fullmatch(text)):
        if _INT.fullmatch(text):
            return int(text), f"the number {short}", ""
        if _FLOAT.fullmatch(text) and abs(float(text)) != float("inf"):
            return float(text), f"the number {short}", ""
        return _UNREADABLE, short, "write numbers in plain decimal digits, and texts in quotes"
    if tag == "str" and re.search("[\0\ud800-\udfff]", text):
        return _UNREADABLE, short, "it has characters that no text can have"
    if tag == "str":
        return text, f"the text {_short(text)!r}", ""
    return _UNREADABLE, f"{short} (of YAML's type {_shown(tag)})", ""


def _fits(value: Any, kind: inspect.Type) -> bool:
    if isinstance(kind, inspect.EnumType):
        return value in list(kind.cls)
    if isinstance(kind, inspect.FloatType) and type(value) is int:
        return True
    return type(value) is _SCALARS.get(type(kind))


def _wanted(kind: inspect.Type) -> str:
    """A type and its range in words."""
    match kind:
        case inspect.EnumType():
            return f"one of {', '.join(kind.cls)}"
        case inspect.IntType() | inspect.FloatType():
            name = "a whole number" if isinstance(kind, inspect.IntType) else "a number"
            return f"{name} {range_text(kind)}".rstrip()
        case inspect.BoolType():
            return "true or false"
        case inspect.StrType():
            return "text"
        case inspect.VarTupleType(item_type=inspect.StructType(fields=fields)):
            return f"a list, each item a section of {', '.join(field.name for field in fields)}"
        case inspect.VarTupleType():
            return f"a list, each item {_wanted(_bare(kind.item_type)[0])}"
        case inspect.StructType():
            return f"a section (of keys like {kind.fields[0].name})"
    raise AssertionError(f"structs read from YAML cannot have fields of type {kind}")


def _bare(kind: inspect.Type) -> tuple[inspect.Type, bool, str]:
    """A field's type without its description and None; whether it may be None; the description."""
    optional, description = False, ""
    while isinstance(kind, inspect.Metadata | inspect.UnionType):
        if isinstance(kind, inspect.Metadata):
            description = (kind.extra_json_schema or {}).get("description", description)
            kind = kind.type
        else:
            optional = True
            (kind,) = (part for part in kind.types if not isinstance(part, inspect.NoneType))
    return kind, optional, description


def _info(struct: type[Struct]) -> inspect.StructType:
    info = inspect.type_info(struct)
    assert isinstance(info, inspect.StructType)
    return info


class _UnreadableError(Exception):
    """What comes after the file's name: `:3: ...` or `: ...`."""


def _text(path: Path) -> str:
    try:
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode):  # a FIFO or a device would keep the reader waiting for ever
            raise _UnreadableError(f": is a {'directory' if stat.S_ISDIR(mode) else 'device'}, not a file")
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise _UnreadableError(f": cannot be read: {error.strerror}") from error
    if len(data) > MAX_BYTES:
        raise _UnreadableError(f": is larger than {MAX_BYTES // 1024} KiB")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise _UnreadableError(f":{line}: is not UTF-8 (byte {data[error.start]:#04x})") from error


class _Composer(yaml.SafeLoader):
    """Refuses what makes a small file large or endless: aliases and deep nesting."""

    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]
        mark = event.start_mark
        if isinstance(event, yaml.AliasEvent):
            raise yaml.MarkedYAMLError(problem="aliases (*name) are not supported", problem_mark=mark)
        if self.depth > MAX_DEPTH:
            raise yaml.MarkedYAMLError(problem=f"nested deeper than {MAX_DEPTH}", problem_mark=mark)
        self.depth += 1
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


def _composed(text: str) -> yaml.Node | None:
    """The nodes of a file, which know their lines; None when it is empty."""
    composer = None
    try:
        composer = _Composer(text)
        return composer.get_single_node()
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise _UnreadableError(
            f":{line}: has the character U+{error.character:04X}, which YAML does not allow"
        ) from error
    except yaml.MarkedYAMLError as error:
        why = ", ".join(part for part in (error.context, error.problem) if part)
        mark = error.problem_mark or error.context_mark
        raise _UnreadableError(f":{mark.line + 1 if mark else 1}: {printable(why)}") from error
    except (ValueError, OverflowError) as error:  # PyYAML on "\UFFFFFFFF", and on a %YAML version of 5000 digits
        line = composer.get_mark().line + 1 if composer else 1
        raise _UnreadableError(f":{line}: {printable(str(error))}") from error
