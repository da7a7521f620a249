"""The machine that the plan runs on: folders, prompts, time left, what has been collected."""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import json
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from engine import checkpoints
from engine.arms import Arm

ROOT = Path(__file__).resolve().parents[3]
LONGEST = 400
ENVIRONMENT = {
    "SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK": "1",
    "SGLANG_IS_FLASHINFER_AVAILABLE": "false",
    "CUDA_HOME": "/usr/local/cuda",
    "PYTHONUNBUFFERED": "1",
    # SGLang's prefix tree in Rust is built for one torch; with another it reads tensors wrongly.
    "SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND": "python",
}
# Of a longer log only the start and the end are kept.
LOG_START, LOG_END = 100_000, 250_000
MOST_BYTES = 64 * 2**20


def add_host_options(parser: argparse.ArgumentParser, minutes: float = 9.0) -> None:
    """The options of every plan on a GPU host: where results go, the pair, SGLang, and how long."""
    add = parser.add_argument
    add("--out", type=Path, default=Path(os.environ.get("OUT", "out")), help="where results go")
    add(
        "--pair",
        type=Path,
        default=ROOT / "engine_patch/reference/pair",
        help="the small pair: a folder with target/, drafter/ and prompts.jsonl",
    )
    add(
        "--bundle", default=str(ROOT / ".gpu/bundle/site.tar.xz"), help="site-packages to unpack; '' for none"
    )
    add("--minutes", type=float, default=minutes, help="end by itself after this long")


@dataclass
class Context:
    """Folders, prompts, time left and what has been collected."""

    # Of the archive; a plan that keeps its own says which.
    NAME: ClassVar[str] = "engine"

    options: argparse.Namespace
    started: float = field(default_factory=time.monotonic)
    left_over: list[str] = field(default_factory=list)
    results: dict[str, dict[str, Any]] = field(default_factory=dict)
    site: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="site-")))
    prompts: list[list[int]] = field(default_factory=list)
    # Answers and logs. Not in the results' folder: from there few files find the way back.
    raw: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="raw-")))
    # Of every run its own, so that archives of several runs do not overwrite each other's judgements.
    judge: str = field(default_factory=lambda: f"judge-{int(time.time())}")
    # Servers are asked side by side: an archive holds no half of a file.
    writing: threading.Lock = field(default_factory=threading.Lock)

    @property
    def archive(self) -> Path:
        """The one file of results, complete up to the last arm that has ended."""
        return Path(self.options.out) / f"{self.NAME}.tar.xz"

    def seconds_left(self) -> float:
        return float(self.options.minutes * 60 - (time.monotonic() - self.started))

    def prepare(self) -> None:
        if self.options.bundle:
            subprocess.run(["tar", "-xJf", self.options.bundle, "-C", str(self.site)], check=True)
        install_plugin(self.site)
        self.prompts = make_prompts(self.options.pair, self.options.prompts)
        self.keep("host", "prompts", self.prompts)
        self.keep("host", "facts", host_facts(self))

    def environment(self, arm: Arm, name: str) -> dict[str, str]:
        environment = dict(os.environ, **ENVIRONMENT)
        environment["PYTHONPATH"] = os.pathsep.join(
            [str(self.site), *filter(None, [os.environ.get("PYTHONPATH", "")])]
        )
        if arm.config is not None:
            config = {key: self._placed(value, name) for key, value in arm.config.items()}
            environment["SGLANG_DDTREE_CONFIG"] = json.dumps(config)
        environment.update(arm.environment)
        return environment

    def pair_of(self, arm: Arm) -> Path:
        """The folder with the target/ and drafter/ that an arm serves."""
        pair = Path(self.options.pair)
        return pair if arm.kind is None else checkpoints.folder_of(arm.kind, pair, self.site / "pairs")

    def _placed(self, value: Any, name: str) -> Any:
        """`@steps` is the arm's own folder, any other `@file` what an earlier arm left."""
        if not isinstance(value, str) or not value.startswith("@"):
            return value
        return str(self.raw / (f"{name}.steps" if value == "@steps" else value[1:]))

    def keep(self, arm: str, workload: str, value: Any) -> None:
        text = json.dumps(value)
        with self.writing:
            self.results.setdefault(arm, {})[workload] = value
            (self.raw / f"{arm}.{workload}.json").write_text(text)

    def save(self, preset: int = 1) -> None:
        """Write the archive anew from all that there is; a plan that is killed later has lost nothing."""
        part = self.archive.with_name(self.archive.name + ".part")
        with self.writing:
            with tarfile.open(part, "w:xz", preset=preset) as archive:
                for name, content in self._files():
                    entry = tarfile.TarInfo(name)
                    entry.size = len(content)
                    archive.addfile(entry, io.BytesIO(content))
            part.replace(self.archive)

    def _files(self) -> Iterator[tuple[str, bytes]]:
        for path in sorted(self.raw.rglob("*")):
            if not path.is_file() or path.stat().st_size >= MOST_BYTES:
                continue
            content = path.read_bytes()
            if path.suffix == ".log" and len(content) > LOG_START + LOG_END:
                content = content[:LOG_START] + b"\n[...]\n" + content[-LOG_END:]
            yield str(path.relative_to(self.raw)), content

    def close(self) -> None:
        """Write the last archive and clean up."""
        self.save(preset=6)
        shutil.rmtree(self.raw, ignore_errors=True)
        shutil.rmtree(self.site, ignore_errors=True)
        print(f"{self.archive}: {self.archive.stat().st_size / 2**20:.1f} MiB", flush=True)


def read_answers(archive: Path, workloads: Collection[str]) -> dict[str, dict[str, Any]]:
    """What an earlier run's archive holds of these workloads: arm -> workload -> value."""
    found: dict[str, dict[str, Any]] = {}
    with tarfile.open(archive) as tar:
        for entry in tar:
            arm, _, rest = entry.name.partition(".")
            workload = rest.removesuffix(".json")
            file = tar.extractfile(entry)
            if file is not None and rest.endswith(".json") and workload in workloads:
                found.setdefault(arm, {})[workload] = json.loads(file.read())
    return found


def install_plugin(site: Path) -> None:
    """What `pip install -e` does: links to the packages and the metadata that carries the entry point."""
    for name, folder in (("ddtree_engine", "engine_patch"), ("ddtree_kernels", "kernels")):
        (site / name).symlink_to(ROOT / folder)
    metadata = site / "ddtree-0.1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: ddtree\nVersion: 0.1.0\n")
    (metadata / "entry_points.txt").write_text(
        "[sglang.srt.plugins]\nddtree = ddtree_engine.sglang_plugin.register:register\n"
    )


def host_facts(context: Context) -> dict[str, Any]:
    code = (
        "import importlib.metadata as m, json, torch\n"
        "names = ['sglang', 'torch', 'triton', 'transformers', 'sglang-kernel', 'ddtree']\n"
        "def version(name):\n"
        "    try: return m.version(name)\n"
        "    except m.PackageNotFoundError: return None\n"
        "print(json.dumps({'versions': {n: version(n) for n in names}, 'cuda': torch.version.cuda,\n"
        "  'cards': [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]}))"
    )
    environment = context.environment(Arm(), "facts")
    answer = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        cwd=context.raw,
        capture_output=True,
        text=True,
        check=False,
    )
    facts: dict[str, Any] = (
        json.loads(answer.stdout) if answer.returncode == 0 else {"error": answer.stderr[-2000:]}
    )
    query = "name,driver_version,memory.total,clocks.max.sm,power.limit"
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        smi = ["nvidia-smi", f"--query-gpu={query}", "--format=csv"]
        facts["nvidia_smi"] = subprocess.run(smi, capture_output=True, text=True, check=False).stdout
    check = [sys.executable, "-m", "ddtree_engine.sglang_plugin.check", "--json", "--no-import"]
    facts["check"] = subprocess.run(
        check, env=environment, cwd=context.raw, capture_output=True, text=True, check=False
    ).stdout
    prompts = context.options.pair / "prompts.jsonl"
    facts["prompts_sha256"] = hashlib.sha256(prompts.read_bytes()).hexdigest()
    # The host's folders say nothing about the run.
    argv = ["OUT" if word == str(context.options.out) else word for word in sys.argv[1:]]
    facts |= {"python": platform.python_version(), "argv": argv, "time": time.time()}
    print("host:", json.dumps(facts.get("versions") or facts), facts.get("cards"), flush=True)
    return facts


def make_prompts(pair: Path, count: int, name: str = "prompts.jsonl") -> list[list[int]]:
    """Token ids of one of the pair's files of prompts, cut to at most `LONGEST` and of different lengths."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(pair / "target" / "tokenizer.json"))
    lines = (pair / name).read_text().splitlines()[:count]
    return [tokenizer.encode(json.loads(line)["text"]).ids[:LONGEST] for line in lines]
