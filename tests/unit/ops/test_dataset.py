from __future__ import annotations

from pathlib import Path

import pytest

from ddtree_ops.bench.dataset import load_dataset
from ddtree_ops.errors import BadInput


def write(path: Path, *lines: str) -> str:
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(path)


def test_prompts_are_read_in_order_and_frozen_by_hash(tmp_path: Path) -> None:
    name = write(
        tmp_path / "p.jsonl", '{"id": "a", "text": "x", "tag": 1}', "", '{"id": "b", "input_ids": [1, 2]}'
    )
    dataset = load_dataset(name)
    assert [prompt.request() for prompt in dataset.prompts] == [{"text": "x"}, {"input_ids": [1, 2]}]
    other = write(tmp_path / "q.jsonl", '{"text": "x", "id": "a"}', '{"id": "b", "input_ids": [1, 3]}')
    assert load_dataset(other).sha256 != dataset.sha256
    assert load_dataset(name, 1).sha256 == load_dataset(other, 1).sha256


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{not json", "not JSON"),
        ('["a"]', "found list"),
        ('{"text": "x"}', "id: found None"),
        ('{"id": 3, "text": "x"}', "id: found 3"),
        ('{"id": "b"}', "one of text and input_ids"),
        ('{"id": "b", "text": "x", "input_ids": [1]}', "one of text and input_ids"),
        ('{"id": "b", "text": ""}', "text: found ''"),
        ('{"id": "b", "input_ids": []}', "input_ids"),
        ('{"id": "b", "input_ids": [1, true]}', "input_ids"),
        ('{"id": "b", "input_ids": [-1]}', "input_ids"),
        ('{"id": "a", "text": "x"}', "taken by line 1"),
    ],
)
def test_a_bad_line_is_named_with_file_and_number(tmp_path: Path, line: str, complaint: str) -> None:
    name = write(tmp_path / "p.jsonl", '{"id": "a", "text": "x"}', line)
    with pytest.raises(BadInput, match=r"p\.jsonl:2: .*") as caught:
        load_dataset(name)
    assert complaint in caught.value.message


def test_missing_empty_binary_and_short_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="cannot be read"):
        load_dataset(str(tmp_path / "none.jsonl"))
    with pytest.raises(BadInput, match="no prompts"):
        load_dataset(write(tmp_path / "e.jsonl", ""))
    (tmp_path / "b.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(BadInput, match="UTF-8"):
        load_dataset(str(tmp_path / "b.jsonl"))
    with pytest.raises(BadInput, match="found 1 prompts, 2 were asked for"):
        load_dataset(write(tmp_path / "s.jsonl", '{"id": "a", "text": "x"}'), 2)
