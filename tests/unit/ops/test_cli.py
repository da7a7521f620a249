from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tomllib
from pathlib import Path

import pydantic
import pytest
import typer

from ddtree_ops import __version__
from ddtree_ops.cli.app import app, run
from ddtree_ops.cli.common import hoist_global_flags
from ddtree_ops.errors import BadEnvironment, BadInput, Interrupted, JobFailed
from tests.support.ops import ROOT, write_checkpoint

HEAVY = ("aiohttp", "httpx", "matplotlib", "numpy", "pandas", "pydantic", "rich", "torch", "yaml")


def test_importing_the_command_line_imports_nothing_heavy() -> None:
    code = f"import sys, ddtree_ops.cli.app; print([name for name in {HEAVY!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_version_is_the_distribution_s(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    assert capsys.readouterr().out == f"ddtree {__version__}\n"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == __version__


@pytest.mark.parametrize(
    ("arguments", "hoisted"),
    [
        (["bench", "sweep", "--json"], ["--json", "bench", "sweep"]),
        (["bench", "-q", "run", "--json", "--json"], ["--quiet", "--json", "bench", "run"]),
        (["x", "--", "--json"], ["x", "--", "--json"]),
    ],
)
def test_global_flags_may_stand_anywhere(arguments: list[str], hoisted: list[str]) -> None:
    assert hoist_global_flags(arguments) == hoisted


@pytest.mark.parametrize("group", [[], ["bench"], ["compare"], ["serve"]])
def test_every_command_has_help_with_an_example(group: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*group, "--help"]) == 0
    listing = capsys.readouterr().out
    names = {
        (): ["quickstart"],
        ("bench",): ["sweep", "run", "calibrate"],
        ("compare",): ["report", "diff"],
        ("serve",): ["local"],
    }[tuple(group)]
    for name in names:
        assert name in listing
        assert run([*group, name, "--help"]) == 0
        assert f"ddtree {' '.join([*group, name])}" in capsys.readouterr().out


def test_shell_completion_is_offered(capsys: pytest.CaptureFixture[str]) -> None:
    run(["--help"])
    assert "--install-completion" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments", [["bogus"], ["bench", "sweep", "--bogus"], ["serve", "local", "--port", "x"]]
)
def test_usage_errors_exit_2(arguments: list[str]) -> None:
    assert run(arguments) == 2


class Model(pydantic.BaseModel):
    number: int


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch):
    """Let `ddtree quickstart` raise what the test wants."""

    def install(error: BaseException | type[pydantic.ValidationError]) -> None:
        import ddtree_ops.bench.quickstart as module

        def fail(*_: object, **__: object) -> None:
            if error is pydantic.ValidationError:
                Model.model_validate({"number": "x"})
            assert isinstance(error, BaseException)
            raise error

        monkeypatch.setattr(module, "run_quickstart", fail)

    return install


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (JobFailed("it broke", remedy="mend it"), 1),
        (BadInput("wrong"), 2),
        (BadEnvironment("missing"), 3),
        (Interrupted("stopped"), 130),
        (KeyboardInterrupt(), 130),
        (pydantic.ValidationError, 2),
        (RuntimeError("surprise"), 1),
        (typer.Exit(4), 4),
    ],
)
def test_each_exception_has_its_exit_code_and_no_traceback(
    failing,
    error: BaseException,
    code: int,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("DDTREE_DEBUG", raising=False)
    failing(error)
    assert run(["quickstart"]) == code
    printed = capsys.readouterr()
    assert "Traceback" not in printed.err + printed.out


def test_an_unexpected_error_points_at_the_debug_switch(
    failing, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    failing(RuntimeError("surprise"))
    monkeypatch.delenv("DDTREE_DEBUG", raising=False)
    run(["quickstart"])
    assert "internal error: RuntimeError: surprise" in (first := capsys.readouterr().err)
    assert "DDTREE_DEBUG=1" in first
    monkeypatch.setenv("DDTREE_DEBUG", "1")
    assert run(["quickstart"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_errors_are_objects_with_json(failing, capsys: pytest.CaptureFixture[str]) -> None:
    failing(JobFailed("it broke", remedy="mend it"))
    assert run(["quickstart", "--json"]) == 1
    assert json.loads(capsys.readouterr().out) == {
        "event": "error",
        "message": "it broke",
        "remedy": "mend it",
        "exit_code": 1,
    }


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["bench", "sweep", "--budget", "seven"], "--budget: found 'seven', allowed: 7, 15, 31, 63, 127"),
        (["bench", "sweep", "--budget", "7,8"], "budget 8 is not one of"),
        (["bench", "sweep", "--budget", "1e9"], "--budget: found '1e9'"),
        (["bench", "run", "--budget", "255"], "budget 255 is not one of"),
        (["bench", "sweep", "--arm", "dtree"], "Input should be 'ar', 'dflash'"),
        (["bench", "sweep", "--temperature", "warm"], "--temperature: found 'warm'"),
        (["bench", "sweep", "--arm", "unsafe"], "--allow-hybrid-unsafe"),
        (["bench", "sweep", "--model", "/nowhere/at/all", "--drafter", "/x"], "no such folder"),
        (["bench", "sweep", "none.yaml"], "none.yaml cannot be read"),
        (["serve", "local", "--budget", "9"], "--budget: found 9"),
        (["serve", "local", "--arm", "unsafe"], "wrong output"),
        (["serve", "local", "--dtype", "int8"], "--dtype: found 'int8'"),
        (["serve", "local", "--builder", "calibrated"], "needs --calibration"),
        (["serve", "local", "--model", "/nowhere/at/all"], "--model: no such folder"),
    ],
)
def test_bad_options_exit_2_and_name_what_is_allowed(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"id": "a", "text": "x"}\n')
    extra = ["--dataset", str(prompts)] if arguments[0] == "bench" else []
    assert run([*arguments, *extra]) == 2
    assert complaint in capsys.readouterr().err


def test_serving_on_a_port_in_use_exits_3(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = str(write_checkpoint(tmp_path / "m"))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert run(["serve", "local", "--model", folder, "--drafter", folder, "--port", port]) == 3
    assert f"port {port} on 127.0.0.1 cannot be used" in capsys.readouterr().err


def test_serve_shows_the_engine_s_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--arm", "ddtree", "--budget", "63", "--port", "30003", "--topk", "8", "--dtype", "bfloat16"]
    assert run(["serve", "local", *options, "--dry-run", "--json"]) == 0
    argv = json.loads(capsys.readouterr().out)["argv"]
    assert argv[:3] == [sys.executable, "-m", "ddtree_engine.reference"]
    assert argv[3:] == [
        *("--arm", "ddtree", "--budget", "63", "--topk", "8", "--dtype", "bfloat16"),
        *("--host", "127.0.0.1", "--port", "30003"),
    ]


def test_arms_without_trees_are_served_without_a_budget(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["serve", "local", "--arm", "ar", "--budget", "63", "--dry-run", "--quiet"]) == 0
    assert "--budget" not in capsys.readouterr().out


def test_the_engine_understands_every_option_that_it_is_given() -> None:
    import ddtree_engine.reference.__main__ as engine

    text = Path(engine.__file__).read_text()
    for option in (
        "arm",
        "budget",
        "topk",
        "builder",
        "calibration",
        "dtype",
        "threads",
        "max-running",
        "model",
    ):
        assert f'"--{option}"' in text
    assert '"--allow-hybrid-unsafe"' in text


def test_the_app_is_what_the_console_script_runs() -> None:
    assert os.path.basename(app.info.name or "") == "ddtree"  # noqa: PTH119
