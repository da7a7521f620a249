"""cluster.yaml: the template, the published schema, the rules over several keys, and a fuzz."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pydantic
import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ddtree_ops.config_file import load_config, parse_yaml
from ddtree_ops.errors import BadInput
from ddtree_ops.schemas.cluster import Cluster
from ddtree_ops.schemas.publish import FOLDER, PUBLISHED, json_schema

TEMPLATE = FOLDER / "cluster.template.yaml"


def minimal() -> dict[str, Any]:
    return {
        "schema": 1,
        "name": "lab",
        "hosts": {"inline": {"a": {}, "b": {}}},
        "model": {"repo": "Qwen/Qwen3.6-27B"},
        "drafter": {"path": "/srv/drafter"},
        "services": [
            {"name": "linear", "arm": "dflash", "port": 30001},
            {"name": "tree", "arm": "ddtree", "budget": 31, "port": 30002},
        ],
    }


def load(data: Any, folder: Path) -> Cluster:
    file = folder / "cluster.yaml"
    file.write_text(yaml.safe_dump(data))
    return load_config(file, Cluster)


def put(data: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    """The data with the value at a dotted key."""
    data = copy.deepcopy(data)
    node: Any = data
    *parents, last = [int(part) if part.isdigit() else part for part in key.split(".")]
    for part in parents:
        node = node.setdefault(part, {}) if isinstance(node, dict) else node[part]
    node[last] = value
    return data


def test_a_minimal_file_loads_with_the_defaults(tmp_path: Path) -> None:
    cluster = load(minimal(), tmp_path)
    assert cluster.services[1].width == 32
    assert cluster.tp == 1
    assert not cluster.model.pinned
    assert cluster.drafter.pinned


def test_the_template_is_valid() -> None:
    cluster = load_config(TEMPLATE, Cluster)
    assert [service.arm for service in cluster.services] == ["dflash", "shadow", "ddtree"]


def test_the_template_shows_every_key() -> None:
    text = TEMPLATE.read_text()
    missing = [name for name in keys_of(Cluster) if not re.search(rf"\b{name}:", text)]
    assert missing == []


def test_the_template_shows_the_defaults() -> None:
    shown = parse_yaml(TEMPLATE.read_text(), TEMPLATE).data
    for section in ("gpu", "driver", "runtime", "image", "paths", "rotation", "monitoring", "deadlines"):
        defaults = Cluster.model_fields[section].annotation().model_dump(mode="json")
        assert {key: defaults[key] for key in shown[section]} == shown[section]


def keys_of(model: type[pydantic.BaseModel]) -> Iterator[str]:
    for node in [model.model_json_schema(), *model.model_json_schema().get("$defs", {}).values()]:
        yield from node.get("properties", {})


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_published_schema_is_current(name: str) -> None:
    published = (FOLDER / name).read_text(encoding="utf-8")
    assert published == json_schema(PUBLISHED[name]), "run python -m ddtree_ops.schemas.publish"
    assert json.loads(published)["additionalProperties"] is False


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("services.1.budget", 32, r"services\.1\.budget: found 32, allowed: 7, 15, 31, 63, 127"),
        ("services.1.budget", None, r"services\.1\.budget: found null, allowed: 7, 15"),
        ("services.0.budget", 31, r"services\.0\.budget: found 31, allowed: nothing: dflash drafts no tree"),
        ("services.0.topk", 4, r"services\.0\.topk: .*drafts no tree"),
        ("services.0.scratch", "stash", r"services\.0\.scratch: .*ddtree only"),
        ("services.1.arm", "unsafe", r"services\.1\.arm: found 'unsafe', allowed: with allow_hybrid_unsafe"),
        (
            "services.1.allow_hybrid_unsafe",
            True,
            r"allow_hybrid_unsafe: found true, allowed: true for the arm",
        ),
        ("services.1.builder", "calibrated", r"services\.1\.calibration: found null, allowed: a calibration"),
        (
            "services.1.attention_backend",
            "trtllm_mha",
            r"attention_backend: found 'trtllm_mha', allowed: triton",
        ),
        ("services.1.name", "linear", r"services\.1\.name: found 'linear', allowed: a name of its own"),
        ("services.1.port", 30001, r"services\.1\.port: found 30001, allowed: .*service linear has it"),
        ("services.1.port", 9090, r"services\.1\.port: .*monitoring\.prometheus_port has it"),
        ("services.1.port", 80, r"services\.1\.port: found 80, allowed: 1024 or more"),
        ("services.1.port", True, r"services\.1\.port: found true, allowed: a whole number"),
        ("services.1.port", 65535, None),
        ("services.1.replicas", 8, r"services\.1\.replicas: found '9 GPUs', allowed: at most 8"),
        ("services.1.tp", 3, r"services\.1\.tp: found 3, allowed: 1, 2, 4 or 8"),
        ("services.1.gpus", [1, 1], r"services\.1\.gpus: .*each GPU once"),
        ("services.1.gpus", [8], r"services\.1\.gpus: found 8, allowed: 0 to 7"),
        ("services.1.hosts", ["c"], r"services\.1\.hosts\.0: found 'c', allowed: a, b"),
        ("services.1.bind", "0.0.0.0", r"services\.1\.bind: found '0\.0\.0\.0', allowed: loopback, or set"),
        ("services.1.bind", "gpu-a", r"services\.1\.bind: found 'gpu-a', allowed: an IP address"),
        ("services.1.env", {"HF_TOKEN": "x"}, r"services\.1\.env\.HF_TOKEN: .*secrets under the key secrets"),
        (
            "services.1.extra_args",
            ["--api-key", "x"],
            r"extra_args\.0: found '--api-key', .*secrets\.api_key",
        ),
        ("services.1.extra_args", ["--port=1"], r"extra_args\.0: found '--port', .*: port"),
        ("services", [], r"services: found an empty list, allowed: at least 1"),
        ("drafter", None, r"drafter: found null, allowed: a drafter, since the service linear"),
        ("model", None, r"model: found null, allowed: a repo or a path"),
        ("model.path", "/x", r"model: found 'both', allowed: either repo or path"),
        ("drafter.revision", "main2", r"drafter\.revision: .*only together with repo"),
        ("hosts.inventory", "h.ini", r"hosts: found 'both', allowed: either inventory or inline"),
        ("hosts.inline.a.usr", "x", r"a\.usr: .*allowed: address, port, user, vars \(did you mean 'user'"),
        ("hosts.group", "gpu", r"hosts\.group: found 'gpu', allowed: a group only together"),
        ("secrets.hf_token", {}, r"secrets\.hf_token: .*either file or env"),
        ("secrets.hf_token", "hf_abc", r"secrets\.hf_token: found text \(hidden"),
        ("paths.models", "relative", r"paths\.models: found 'relative', allowed: text that matches"),
        ("driver.branch", 575, r"driver\.branch: found 575, allowed: 580 or more"),
        ("image.digest", "sha256:abc", r"image\.digest: found 'sha256:abc'"),
        ("monitoring.host", "z", r"monitoring\.host: found 'z', allowed: a, b"),
        ("monitoring.grafana_port", 9090, r"monitoring\.grafana_port: .*prometheus_port has it"),
        ("engine", "reference", None),
        ("schema", 2, r"schema: found 2, allowed: 1"),
        ("surprise", 1, r"surprise: found an unknown key"),
    ],
)
def test_rules(key: str, value: Any, message: str | None, tmp_path: Path) -> None:
    data = put(minimal(), key, value)
    if message is None:
        load(data, tmp_path)
        return
    with pytest.raises(BadInput, match=message) as caught:
        load(data, tmp_path)
    assert re.search(r"cluster\.yaml:\d+:\d+: ", caught.value.message)


def test_replicas_need_room_below_the_last_port(tmp_path: Path) -> None:
    data = put(put(minimal(), "services.1.port", 65535), "services.1.replicas", 2)
    with pytest.raises(BadInput, match="room for 2 replicas"):
        load(data, tmp_path)


def test_gpus_must_be_a_multiple_of_tp(tmp_path: Path) -> None:
    data = put(put(minimal(), "services.1.gpus", [1, 2, 3]), "services.1.tp", 2)
    with pytest.raises(BadInput, match="a multiple of tp, which is 2"):
        load(data, tmp_path)


def test_two_services_on_different_hosts_may_share_port_and_gpu(tmp_path: Path) -> None:
    data = minimal()
    for service, host in zip(data["services"], "ab", strict=True):
        service |= {"hosts": [host], "gpus": [0], "port": 30001}
    load(data, tmp_path)
    with pytest.raises(BadInput, match="found 30001"):
        load(put(data, "services.1.hosts", ["a", "b"]), tmp_path)
    with pytest.raises(BadInput, match=r"gpus: found 0, allowed: a free GPU \(linear has it\)"):
        load(put(put(data, "services.1.hosts", ["b", "a"]), "services.1.port", 30002), tmp_path)


def test_the_reference_engine_needs_no_model_and_takes_no_gpu(tmp_path: Path) -> None:
    data = {**minimal(), "engine": "reference"}
    del data["model"], data["drafter"]
    load(data, tmp_path)
    with pytest.raises(BadInput, match=r"services\.0\.gpus: .*runs on CPUs"):
        load(put(data, "services.0.gpus", [0]), tmp_path)


def survives(text: str, folder: Path) -> None:
    """Loading gives a cluster or a message that names the file; anything else is a traceback for the user."""
    file = folder / "fuzz.yaml"
    file.write_bytes(text.encode("utf-8", "surrogatepass"))
    message = str(file)
    try:
        load_config(file, Cluster)
    except BadInput as error:
        message = error.message
    assert message.startswith(str(file))


FUZZ = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=20),
    st.sampled_from([10**400, "x" * 300]),
)
DATA = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


def places(node: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    yield path
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, value in items:
        yield from places(value, (*path, key))


FULL = parse_yaml(TEMPLATE.read_text(), TEMPLATE).data
PLACES = [path for path in places(FULL) if path]


@FUZZ
@given(changes=st.lists(st.tuples(st.sampled_from(PLACES), DATA), min_size=1, max_size=4))
def test_no_value_in_any_place_ends_in_a_traceback(changes: list[Any], tmp_path: Path) -> None:
    data = copy.deepcopy(FULL)
    for path, value in changes:
        node: Any = data
        for part in path[:-1]:
            try:
                node = node[part]
            except (KeyError, IndexError, TypeError):
                break
        last = path[-1]
        is_key = isinstance(node, dict) and isinstance(last, str)
        if is_key or (isinstance(node, list) and isinstance(last, int) and last < len(node)):
            node[last] = value
    survives(json.dumps(data), tmp_path)


@FUZZ
@given(data=st.data())
def test_no_damage_to_the_text_ends_in_a_traceback(data: st.DataObject, tmp_path: Path) -> None:
    text = TEMPLATE.read_text()
    for _ in range(data.draw(st.integers(1, 3))):
        start = data.draw(st.integers(0, len(text)))
        end = min(len(text), start + data.draw(st.integers(0, 40)))
        piece = data.draw(
            st.text(max_size=8) | st.sampled_from(["\t", "&a ", "*a", "<<: ", "!!", "{", "]", "- ", ": "])
        )
        text = text[:start] + piece + text[end:]
    survives(text, tmp_path)
