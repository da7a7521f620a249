"""Write the tables of the documentation that come from code: ``python tools/make_docs.py``.

A table stands between `<!-- made: NAME -->` and `<!-- end -->`; the rest of a page is written by hand.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ddtree_ops.hosts.checks import CHECKS
from ddtree_ops.hosts.operator import ROWS
from ddtree_ops.runbooks.page import all_pages
from ddtree_ops.schemas.cluster import Cluster

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGES = ("preflight.md", "cluster-yaml.md", "runbooks.md")
PLACE = re.compile(r"(<!-- made: (?P<name>[\w-]+) -->\n).*?(?=<!-- end -->)", re.DOTALL)


def main() -> None:
    for page in PAGES:
        file = DOCS / page
        file.write_text(filled(file.read_text(encoding="utf-8")), encoding="utf-8")


def filled(text: str) -> str:
    """The page with its tables as they are now."""
    return PLACE.sub(lambda place: f"{place[1]}{TABLES[place['name']]()}", text)


def checks(rows: Mapping[str, Any]) -> str:
    lines = ["| check | passes with | otherwise | what to do |", "|---|---|---|---|"]
    lines += [f"| `{row.id}` | {row.wanted} | {row.otherwise} | {row.remedy} |" for row in rows.values()]
    return "\n".join(lines) + "\n"


def runbooks() -> str:
    """Every page with what points to it."""
    lines = ["| page | when | severity | play | what points to it |", "|---|---|---|---|---|"]
    for page in all_pages().values():
        link = f"[{page.id}](../ddtree_ops/runbooks/pages/{page.id}.md)"
        pointers = ", ".join(f"`{name}`" for name in (*page.alerts, *page.checks))
        play = "" if not page.play else page.changes or "reads only"
        lines.append(f"| {link} | {page.title} | {page.severity.value} | {play} | {pointers} |")
    return "\n".join(lines) + "\n"


def keys() -> str:
    """A table for each object of cluster.yaml, the top level first."""
    schema = Cluster.model_json_schema(by_alias=True)
    parts = [_object("Top level", schema, schema)]
    for name, key in (
        ("Hosts", "hosts"),
        ("InlineHost", "hosts.inline.NAME"),
        ("Ssh", "ssh"),
        ("Gpu", "gpu"),
        ("Driver", "driver"),
        ("Runtime", "runtime"),
        ("Image", "image"),
        ("Checkpoint", "model, drafter"),
        ("Paths", "paths"),
        ("Secrets", "secrets"),
        ("Secret", "secrets.NAME, ssh.become_password"),
        ("Service", "services"),
        ("Ulimits", "services.ulimits"),
        ("Gateway", "gateways"),
        ("GatewayHealth", "gateways.health"),
        ("Rotation", "rotation"),
        ("Monitoring", "monitoring"),
        ("Deadlines", "deadlines"),
    ):
        parts.append(_object(f"`{key}`", schema["$defs"][name], schema))
    return "\n".join(parts)


def _object(title: str, node: Mapping[str, Any], root: Mapping[str, Any]) -> str:
    lines = [f"### {title}", "", node.get("description", "").split("\n")[0], ""]
    lines += ["| key | value | default | |", "|---|---|---|---|"]
    needed = set(node.get("required", ()))
    for name, value in node["properties"].items():
        default = "needed" if name in needed else _default(value)
        lines.append(
            f"| `{name}` | {_kind(value, root)} | {default} | {_clean(value.get('description', ''))} |"
        )
    return "\n".join(lines) + "\n"


def _kind(value: Mapping[str, Any], root: Mapping[str, Any]) -> str:
    return " or ".join(dict.fromkeys(_kinds(value, root)))


def _kinds(value: Mapping[str, Any], root: Mapping[str, Any]) -> Iterator[str]:
    if "$ref" in value:
        name = value["$ref"].rsplit("/", 1)[1]
        node = root["$defs"][name]
        yield _choices(node["enum"]) if "enum" in node else f"see {name}"
    elif "anyOf" in value:
        for branch in value["anyOf"]:
            yield from _kinds(branch, root)
    elif "enum" in value:
        yield _choices(value["enum"])
    elif "const" in value:
        yield f"`{value['const']}`"
    elif value.get("type") == "array":
        yield f"list of {_kind(value['items'], root)}"
    else:
        yield _plain(value)


def _plain(value: Mapping[str, Any]) -> str:
    names = {"integer": "whole number", "string": "text", "boolean": "true, false", "object": "mapping"}
    kind = names.get(str(value.get("type")), str(value.get("type", "anything")))
    low = value.get("minimum", value.get("exclusiveMinimum"))
    high = value.get("maximum", value.get("exclusiveMaximum"))
    return f"{kind}, {low} to {high}" if low is not None and high is not None else kind


def _choices(values: list[Any]) -> str:
    return ", ".join(f"`{value}`" for value in values)


def _default(value: Mapping[str, Any]) -> str:
    default = value.get("default")
    if isinstance(default, dict) and default:
        return "see below"
    return "" if default is None else f"`{str(default).lower() if isinstance(default, bool) else default}`"


def _clean(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


TABLES: dict[str, Callable[[], str]] = {
    "host-checks": lambda: checks(CHECKS),
    "operator-checks": lambda: checks(ROWS),
    "cluster-keys": keys,
    "runbooks": runbooks,
}


if __name__ == "__main__":
    main()
