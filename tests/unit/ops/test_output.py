from __future__ import annotations

import io
import json

import pytest
from pydantic import BaseModel, ValidationError

from ddtree_ops.errors import BadInput, from_validation
from ddtree_ops.output import Output, OutputMode


def streams(mode: OutputMode) -> tuple[Output, io.StringIO, io.StringIO]:
    stdout, stderr = io.StringIO(), io.StringIO()
    return Output(mode, stdout=stdout, stderr=stderr, clock=iter(range(0, 1000, 10)).__next__), stdout, stderr


def use(out: Output) -> None:
    out.line("a line")
    out.table("T", ["x"], [[1]])
    out.note("a note")
    out.warning("a warning")
    with out.progress("work", 2) as advance:
        advance(1, "first")
        advance(1, "second")
    out.result({"answer": 42}, summary="the summary")


def test_human_output_keeps_the_answer_apart_from_the_talk() -> None:
    out, stdout, stderr = streams(OutputMode.HUMAN)
    use(out)
    assert "a line" in stdout.getvalue()
    assert "the summary" in stdout.getvalue()
    assert "a note" not in stdout.getvalue()
    assert "a note" in stderr.getvalue()
    assert "work: 2/2 second" in stderr.getvalue()


def test_json_output_is_one_object_a_line_with_the_result_last() -> None:
    out, stdout, stderr = streams(OutputMode.JSON)
    use(out)
    events = [json.loads(line) for line in stdout.getvalue().splitlines()]
    assert [event["event"] for event in events] == ["note", "warning", "progress", "progress", "result"]
    assert events[-1]["answer"] == 42
    assert stderr.getvalue() == ""


def test_quiet_output_is_the_summary_and_warnings() -> None:
    out, stdout, stderr = streams(OutputMode.QUIET)
    use(out)
    assert stdout.getvalue() == "the summary\n"
    assert stderr.getvalue().strip() == "warning: a warning"


def test_messages_with_brackets_are_printed_as_they_are() -> None:
    out, stdout, stderr = streams(OutputMode.HUMAN)
    out.error("found [7, 8] in [bold]x[/bold]", remedy="use [a]", exit_code=2)
    out.warning("shape [15, 16]")
    out.note("[/odd]")
    out.line("accept [1.2, 3.4]")
    out.table("T [x]", ["a [b]"], [["[/c]"]])
    assert "found [7, 8] in [bold]x[/bold]" in stderr.getvalue()
    assert "use [a]" in stderr.getvalue()
    assert "shape [15, 16]" in stderr.getvalue()
    assert "[/odd]" in stderr.getvalue()
    for text in ("accept [1.2, 3.4]", "T [x]", "a [b]", "[/c]"):
        assert text in stdout.getvalue()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_warning_during_a_bar_is_printed_above_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    stderr = Terminal()
    out = Output(stdout=io.StringIO(), stderr=stderr)
    with out.progress("work", 2) as advance:
        advance(1, "first")
        before = len(stderr.getvalue())
        out.warning("careful")
        printed = stderr.getvalue()[before:]
    erase_line = "\x1b[2K"
    assert erase_line in printed
    assert printed.index(erase_line) < printed.index("careful")


class Pair(BaseModel):
    a: int
    b: int


def test_validation_errors_are_a_line_for_each_key() -> None:
    try:
        Pair.model_validate({"a": "x"})
    except ValidationError as error:
        found = from_validation(error, file="f.yaml")
    assert isinstance(found, BadInput)
    assert found.message.splitlines()[0] == "f.yaml: 2 errors"
    assert "  b: Field required" in found.message
    assert "found 'x'" in found.message
