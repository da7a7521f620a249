"""The YAML loader: positions in messages, the core schema, and what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pydantic
import pytest

from ddtree_ops.config_file import MAX_BYTES, MAX_DEPTH, AtKey, load_config, parse_yaml, read_yaml
from ddtree_ops.errors import BadInput
from ddtree_ops.schemas.sweep import Sweep


class Leaf(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")
    size: int = pydantic.Field(ge=1, le=9)
    api_token: str = pydantic.Field("", max_length=3)

    @pydantic.model_validator(mode="after")
    def _not_five(self) -> Leaf:
        if self.size == 5:
            raise AtKey(("size",), 5, "anything but 5")
        return self


class Root(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")
    leaves: dict[str, Leaf] = {}
    many: list[Leaf] = []


def error(text: str, model: type[pydantic.BaseModel], folder: Path) -> str:
    file = folder / "f.yaml"
    file.write_text(text)
    with pytest.raises(BadInput) as caught:
        load_config(file, model)
    return caught.value.message.replace(f"{file}", "F")


def test_a_wrong_value_is_found_at_its_line_and_column(tmp_path: Path) -> None:
    assert error("many:\n  - size: 3\n  - size: 12\n", Root, tmp_path) == (
        "F:3:11: many.1.size: found 12, allowed: 9 or less"
    )


def test_an_unknown_key_is_found_at_its_key_with_the_closest_name(tmp_path: Path) -> None:
    assert error("leaves:\n  a: {size: 1, sise: 2}\n", Root, tmp_path) == (
        "F:2:16: leaves.a.sise: found an unknown key, allowed: api_token, size (did you mean 'size'?)"
    )


def test_a_missing_key_points_at_what_it_is_missing_from(tmp_path: Path) -> None:
    assert error("many:\n  - {}\n", Root, tmp_path) == (
        "F:2:5: many.0.size: found nothing, allowed: this key is needed"
    )


def test_a_rule_over_several_keys_points_at_the_key_it_names(tmp_path: Path) -> None:
    assert (
        error("many: [{size: 5}]\n", Root, tmp_path)
        == "F:1:15: many.0.size: found 5, allowed: anything but 5"
    )


def test_several_errors_come_in_the_order_of_the_file(tmp_path: Path) -> None:
    lines = error("zoo: 1\nmany: [{size: x}]\nleaves: 3\n", Root, tmp_path).splitlines()
    assert [line.split(": ")[0].strip() for line in lines] == ["F", "F:1:1", "F:2:15", "F:3:9"]


def test_a_value_that_may_be_a_secret_is_not_shown(tmp_path: Path) -> None:
    message = error("many: [{size: 1, api_token: hunter2}]\n", Root, tmp_path)
    assert "hunter2" not in message
    assert "hidden" in message


def test_the_branches_of_unions_do_not_hide_the_place(tmp_path: Path) -> None:
    message = error("engine:\n  kind: local\n  topk: 100\n  foo: 1\n", Sweep, tmp_path)
    assert "F:3:9: engine.topk: found 100, allowed: 64 or less" in message
    assert "F:4:3: engine.foo: found an unknown key, allowed: allow_hybrid_unsafe" in message


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("no", "no"),
        ("on", "on"),
        ("true", True),
        ("12:30", "12:30"),
        ("2024-13-45", "2024-13-45"),
        ("0o17", 15),
        ("017", 17),
        ("0x1f", 31),
        ("1e3", 1000.0),
        ("-.inf", float("-inf")),
        ("~", None),
        ("'5'", "5"),
        ("1_000", "1_000"),
    ],
)
def test_scalars_follow_the_core_schema(text: str, value: Any) -> None:
    assert parse_yaml(f"a: {text}\n", Path("f")).data == {"a": value}


def test_own_keys_win_over_merged_ones_wherever_the_merge_stands() -> None:
    text = "base: &b {x: 1, y: 1}\none:\n  x: 2\n  <<: *b\ntwo:\n  <<: [{x: 3}, *b]\n"
    data = parse_yaml(text, Path("f")).data
    assert data["one"] == {"x": 2, "y": 1}
    assert data["two"] == {"x": 3, "y": 1}


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("a: 1\nb: 2\na: 3\n", "f:3:1: a: found the key again (first on line 1)"),
        ("a: {1: x}\n", "f:1:5: a: found the key '1'"),
        ("a: !!python/object/apply:os.system [id]\n", "f:1:4: a: found the tag"),
        ("a: !!binary aGk=\n", "found the tag"),
        ("a: &x [*x]\n", "f:1:4: a.0: found an alias to something around it"),
        ("a: [1\nb: 2\n", "f:2:2: not YAML"),
        ("a: *nowhere\n", "f:1:4: not YAML"),
        ("a: \x07\n", "not YAML"),
        ("a: " + "9" * 5000 + "\n", "allowed: a value of the type int"),
        ("--- 1\n--- 2\n", "f:2:1: not YAML"),
        ("<<: 3\n", "found no mapping after <<"),
        ("? [a]\n: 1\n", "found the key 'a list or mapping'"),
    ],
)
def test_what_is_not_plain_data_is_refused_at_its_place(text: str, where: str) -> None:
    with pytest.raises(BadInput) as caught:
        parse_yaml(text, Path("f"))
    assert where in caught.value.message


def test_aliases_of_aliases_do_not_fill_the_memory() -> None:
    lines = ["a0: &a0 [x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 12)]
    with pytest.raises(BadInput, match="more than"):
        parse_yaml("\n".join(lines), Path("f"))


@pytest.mark.parametrize("depth", [MAX_DEPTH + 1, 5000])
def test_deep_nesting_is_refused(depth: int) -> None:
    with pytest.raises(BadInput, match="levels"):
        parse_yaml("[" * depth + "]" * depth, Path("f"))


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"a: \xff\n", "not UTF-8"),
        (b"#" * (MAX_BYTES + 1), "allowed: at most"),
        (b"", "empty"),
        (b"- 1\n", "mapping"),
    ],
)
def test_a_file_that_cannot_be_a_configuration_is_refused(raw: bytes, message: str, tmp_path: Path) -> None:
    file = tmp_path / "f.yaml"
    file.write_bytes(raw)
    with pytest.raises(BadInput, match=message):
        load_config(file, Root)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"nothing\.yaml: cannot be read \(No such file"):
        read_yaml(tmp_path / "nothing.yaml")
