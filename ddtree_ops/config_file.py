"""Read a YAML file into a pydantic model. Errors name FILE:LINE:COLUMN, the key, what was found and allowed.

YAML is read by the core schema of YAML 1.2 (`no`, `12:30` and a date are strings), with merge keys. Refused:
duplicate keys, keys that are not strings, tags that name Python objects, documents that expand without bound.
Works for any model whose keys are strings: cluster.yaml, sweep.yaml.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pydantic
import yaml

from ddtree_ops.errors import BadInput

MAX_BYTES = 1 << 20
MAX_NODES = 50_000
MAX_DEPTH = 64
SHOWN_CHARACTERS = 60
SECRET_KEYS = re.compile(r"secret|token|password|passwd|api_?key|credential", re.IGNORECASE)

KeyPath = tuple[str | int, ...]
ModelT = TypeVar("ModelT", bound=pydantic.BaseModel)


class AtKey(ValueError):
    """Raised by a validator of a whole model that knows which key below it is wrong."""

    def __init__(self, path: Sequence[str | int], found: object, allowed: str) -> None:
        super().__init__(f"found {found!r}, allowed: {allowed}")
        self.path = tuple(path)
        self.found = found
        self.allowed = allowed


@dataclass(frozen=True, order=True)
class Position:
    """A place in a text file, counted from 1."""

    line: int
    column: int

    def __str__(self) -> str:
        return f"{self.line}:{self.column}"


@dataclass
class Document:
    """The data of a file and where each key and value of it stands."""

    file: Path
    data: Any
    values: dict[KeyPath, Position] = field(default_factory=dict)
    keys: dict[KeyPath, Position] = field(default_factory=dict)

    def position(self, path: KeyPath, *, key: bool = False) -> Position:
        """Where a value (or its key) stands, or else the nearest thing around it."""
        places = self.keys if key else self.values
        for length in range(len(path), -1, -1):
            position = places.get(path[:length]) or self.values.get(path[:length])
            if position is not None:
                return position
        return Position(1, 1)


def load_config(file: Path, model: type[ModelT]) -> ModelT:
    """The file as an instance of `model`. Raises BadInput, a line for each wrong key."""
    document = read_yaml(file)
    if document.data is None:
        raise BadInput(f"{file}: the file is empty", remedy="start from the commented template")
    if not isinstance(document.data, dict):
        found = _shown(document.data, ())
        raise BadInput(f"{file}:{document.position(())}: found {found}, allowed: a mapping of keys to values")
    try:
        return model.model_validate(document.data)
    except pydantic.ValidationError as error:
        raise explain(error, document, model) from None


def read_yaml(file: Path) -> Document:
    """The file's data with positions. Raises BadInput when it cannot be read or is not plain YAML."""
    try:
        raw = file.read_bytes()
    except OSError as error:
        raise BadInput(f"{file}: cannot be read ({error.strerror})") from error
    if len(raw) > MAX_BYTES:
        raise BadInput(f"{file}: found {len(raw)} bytes, allowed: at most {MAX_BYTES}")
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise BadInput(f"{file}: byte {error.start} is not UTF-8") from error
    return parse_yaml(text, file)


def parse_yaml(text: str, file: Path) -> Document:
    """Like :func:`read_yaml`, for text that was read already; `file` is for messages only."""
    try:
        loader = _CoreLoader(text)
        try:
            root = loader.get_single_node()
            return _Builder(loader, file).document(root)
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f":{mark.line + 1}:{mark.column + 1}" if mark else ""
        raise BadInput(f"{file}{where}: not YAML: {error.problem or error.context}") from None
    except yaml.YAMLError as error:
        raise BadInput(f"{file}: not YAML: {str(error).splitlines()[0]}") from None
    except RecursionError:
        raise BadInput(f"{file}: nested too deeply, allowed: {MAX_DEPTH} levels") from None


def explain(error: pydantic.ValidationError, document: Document, model: type[pydantic.BaseModel]) -> BadInput:
    """pydantic's errors as one BadInput, a line for each wrong key, in the order of the file."""
    schema = model.model_json_schema(by_alias=True)
    found = sorted({_found(item, document, schema) for item in error.errors(include_url=False)})
    lines = [f"{document.file}:{position}: {message}" for position, message in found]
    if len(lines) == 1:
        return BadInput(lines[0])
    return BadInput(f"{document.file}: {len(lines)} errors\n" + "\n".join(f"  {line}" for line in lines))


def _found(item: Any, document: Document, schema: Mapping[str, Any]) -> tuple[Position, str]:
    loc: KeyPath = item["loc"]
    kind, context = item["type"], item.get("ctx", {})
    cause = context.get("error")
    if isinstance(cause, AtKey):
        path = (*_in_document(document.data, loc), *cause.path)
        return document.position(path), _message(path, _shown(cause.found, path), cause.allowed)
    if kind == "extra_forbidden":
        path = (*_in_document(document.data, loc[:-1]), loc[-1])
        known = sorted(_properties(schema, loc[:-1]))
        close = difflib.get_close_matches(str(loc[-1]), known, n=1)
        hint = f" (did you mean {close[0]!r}?)" if close else ""
        return document.position(path, key=True), _message(path, "an unknown key", ", ".join(known) + hint)
    if kind == "missing":
        parent = _in_document(document.data, loc[:-1])
        return document.position(parent), _message((*parent, loc[-1]), "nothing", "this key is needed")
    path = _in_document(document.data, loc)
    return document.position(path), _message(path, _shown(item["input"], path), _allowed(item))


def _message(path: KeyPath, found: str, allowed: str) -> str:
    return f"{_dotted(path)}: found {found}, allowed: {allowed}"


def _allowed(item: Any) -> str:
    context = item.get("ctx", {})
    kind = item["type"]
    texts = {
        "greater_than": "more than {gt}",
        "greater_than_equal": "{ge} or more",
        "less_than": "less than {lt}",
        "less_than_equal": "{le} or less",
        "enum": "{expected}",
        "literal_error": "{expected}",
        "string_pattern_mismatch": "text that matches {pattern}",
        "string_too_short": "at least {min_length} characters",
        "string_too_long": "at most {max_length} characters",
        "too_short": "at least {min_length} of them",
        "too_long": "at most {max_length} of them",
        "union_tag_invalid": "{expected_tags}",
        "int_type": "a whole number",
        "int_parsing": "a whole number",
        "int_from_float": "a whole number",
        "float_type": "a number",
        "float_parsing": "a number",
        "finite_number": "a finite number",
        "bool_type": "true or false",
        "bool_parsing": "true or false",
        "string_type": "text",
        "list_type": "a list",
        "dict_type": "a mapping of keys to values",
        "model_type": "a mapping of keys to values",
        "model_attributes_type": "a mapping of keys to values",
        "none_required": "null",
        "path_type": "a path",
    }
    if "error" in context:
        return str(context["error"])
    if kind in texts:
        return texts[kind].format(**context)
    return str(item["msg"])


def _in_document(data: Any, loc: Sequence[str | int]) -> KeyPath:
    """The part of pydantic's location that exists in the data: it also names the branches of unions."""
    path: list[str | int] = []
    for part in loc:
        inside = isinstance(data, dict) and part in data
        if isinstance(data, list) and isinstance(part, int):
            inside = 0 <= part < len(data)
        if not inside:
            continue
        data = data[part]
        path.append(part)
    return tuple(path)


def _properties(schema: Mapping[str, Any], loc: Sequence[str | int]) -> set[str]:
    """The keys that the model knows at a location of a pydantic error."""
    nodes = list(_branches(schema, schema))
    for part in loc:
        below: list[Mapping[str, Any]] = []
        for node in nodes:
            if isinstance(part, int) and "items" in node:
                below += _branches(node["items"], schema)
            elif part in node.get("properties", {}):
                below += _branches(node["properties"][part], schema)
            elif isinstance(part, str):
                values = [node.get("additionalProperties"), *node.get("patternProperties", {}).values()]
                for value in values:
                    below += _branches(value, schema) if isinstance(value, dict) else ()
        nodes = below or nodes  # a part that names the branch of a union leads nowhere
    return {name for node in nodes for name in node.get("properties", {})}


def _branches(node: Mapping[str, Any], root: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    if "$ref" in node:
        yield from _branches(root["$defs"][node["$ref"].rsplit("/", 1)[1]], root)
    for branch in [*node.get("anyOf", ()), *node.get("oneOf", ()), *node.get("allOf", ())]:
        yield from _branches(branch, root)
    yield node


def _dotted(path: Sequence[str | int]) -> str:
    return ".".join(str(part) for part in path) or "(top level)"


def _shown(value: object, path: Sequence[str | int]) -> str:
    """A value for a message: short, and hidden where a user may have put a secret."""
    if isinstance(value, str) and any(isinstance(part, str) and SECRET_KEYS.search(part) for part in path):
        return "text (hidden: it may be a secret)"
    if isinstance(value, dict):
        return "a mapping" if value else "an empty mapping"
    if isinstance(value, list):
        return f"a list of {len(value)}" if value else "an empty list"
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    text = str(value) if isinstance(value, int) and abs(value) < 10**18 else repr(value)
    return text if len(text) <= SHOWN_CHARACTERS else text[: SHOWN_CHARACTERS - 1] + "…"


class _CoreLoader(yaml.SafeLoader):
    """PyYAML with the scalars of YAML 1.2's core schema."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 - PyYAML's own name


def _resolve(tag: str, pattern: str, first: str) -> None:
    for character in first:
        _CoreLoader.yaml_implicit_resolvers.setdefault(character, []).append((tag, re.compile(pattern)))


_resolve("tag:yaml.org,2002:bool", r"^(?:true|True|TRUE|false|False|FALSE)$", "tTfF")
_resolve("tag:yaml.org,2002:int", r"^(?:[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)$", "-+0123456789")
_resolve(
    "tag:yaml.org,2002:float",
    r"^(?:[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$",
    "-+0123456789.",
)
_resolve("tag:yaml.org,2002:null", r"^(?:~|null|Null|NULL|)$", "~nN")
_CoreLoader.yaml_implicit_resolvers.setdefault("", []).append(("tag:yaml.org,2002:null", re.compile(r"^$")))
_resolve("tag:yaml.org,2002:merge", r"^<<$", "<")

_MERGE = "tag:yaml.org,2002:merge"
_SCALARS = {f"tag:yaml.org,2002:{name}" for name in ("str", "int", "float", "bool", "null")}


class _Builder:
    """Turns YAML nodes into data and remembers where each stood."""

    def __init__(self, loader: yaml.SafeLoader, file: Path) -> None:
        self._loader = loader
        self._file = file
        self._open: list[int] = []
        self._nodes = 0
        self._values: dict[KeyPath, Position] = {}
        self._keys: dict[KeyPath, Position] = {}

    def document(self, root: yaml.Node | None) -> Document:
        data = None if root is None else self._build(root, ())
        return Document(self._file, data, self._values, self._keys)

    def _build(self, node: yaml.Node, path: KeyPath) -> Any:
        self._nodes += 1
        if self._nodes > MAX_NODES:
            raise self._refuse(node, path, f"more than {MAX_NODES} values", "fewer")
        if id(node) in self._open:
            raise self._refuse(node, path, "an alias to something around it", "no alias to itself")
        if len(self._open) >= MAX_DEPTH:
            raise self._refuse(node, path, "too many levels", f"at most {MAX_DEPTH} levels")
        self._values[path] = _position(node)
        self._open.append(id(node))
        try:
            if isinstance(node, yaml.MappingNode):
                return self._mapping(node, path)
            if isinstance(node, yaml.SequenceNode):
                self._plain(node, path, {"tag:yaml.org,2002:seq"})
                return [self._build(item, (*path, index)) for index, item in enumerate(node.value)]
            return self._scalar(node, path)
        finally:
            self._open.pop()

    def _mapping(self, node: yaml.MappingNode, path: KeyPath) -> dict[str, Any]:
        self._plain(node, path, {"tag:yaml.org,2002:map"})
        data: dict[str, Any] = {}
        own: set[str] = set()
        for key_node, value_node in node.value:
            if key_node.tag == _MERGE:
                data.update(self._merge(value_node, path))
        self._values[path] = _position(node)
        for key_node, value_node in node.value:
            if key_node.tag == _MERGE:
                continue
            if not isinstance(key_node, yaml.ScalarNode) or key_node.tag != "tag:yaml.org,2002:str":
                found = key_node.value if isinstance(key_node, yaml.ScalarNode) else "a list or mapping"
                raise self._refuse(key_node, path, f"the key {found!r}", "keys that are text (quote it)")
            key = str(key_node.value)
            if key in own:
                first = self._keys[(*path, key)]
                again = f"the key again (first on line {first.line})"
                raise self._refuse(key_node, (*path, key), again, "it once")
            own.add(key)
            self._keys[(*path, key)] = _position(key_node)
            data[key] = self._build(value_node, (*path, key))
        return data

    def _merge(self, node: yaml.Node, path: KeyPath) -> dict[str, Any]:
        nodes = list(reversed(node.value)) if isinstance(node, yaml.SequenceNode) else [node]
        merged: dict[str, Any] = {}
        for item in nodes:
            if not isinstance(item, yaml.MappingNode):
                raise self._refuse(item, path, "no mapping after <<", "a mapping or a list of mappings")
            merged.update(self._build(item, path))
        return merged

    def _scalar(self, node: yaml.Node, path: KeyPath) -> Any:
        self._plain(node, path, _SCALARS)
        text = str(node.value)
        if node.tag == "tag:yaml.org,2002:str":
            return text
        try:
            if node.tag == "tag:yaml.org,2002:int":
                return int(text, 0) if text[:2] in {"0o", "0x"} else int(text)
            return self._loader.construct_object(node, deep=True)
        except (ValueError, OverflowError, KeyError, yaml.YAMLError):
            kind = node.tag.rsplit(":", 1)[1]
            raise self._refuse(node, path, _shown(text, path), f"a value of the type {kind}") from None

    def _plain(self, node: yaml.Node, path: KeyPath, allowed: set[str]) -> None:
        if node.tag not in allowed:
            raise self._refuse(node, path, f"the tag {node.tag}", "plain values, lists and mappings")

    def _refuse(self, node: yaml.Node, path: KeyPath, found: str, allowed: str) -> BadInput:
        where = f"{self._file}:{_position(node)}"
        return BadInput(f"{where}: {_dotted(path)}: found {found}, allowed: {allowed}")


def _position(node: yaml.Node) -> Position:
    return Position(node.start_mark.line + 1, node.start_mark.column + 1)
