#!/usr/bin/env python3
"""Prove the SGLang plugin on a GPU host: start servers arm by arm, run workloads, keep everything raw.

    python3 tools/gpu/engine_plan.py --stages smoke --out $OUT
    python3 tools/gpu/engine_plan.py --stages a,b,c,d,f,g --out $OUT --parallel 4
    python3 tools/gpu/engine_plan.py --list

Needs on the host: Python 3.12, a CUDA build of torch, `tokenizers`; SGLang itself comes from the bundle
(`--bundle`, a tar of site-packages; `--bundle ''` uses an installed SGLang). Standard library otherwise.

Stages are the gates of the engine (a..k), `smoke`, and `step` (step times at a 27B's shape, dummy weights).
Every arm is started once and serves all workloads that the stages ask of it. Raw answers go to
`<out>/engine.tar.xz`, one JSON file per arm and workload; `judge.json` in it has the figures that need no
statistics; `tools/gpu/engine_summary.py` makes the gates of them. Whatever does not fit into `--minutes` is
listed as left over, and the plan ends by itself.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import hashlib
import json
import os
import platform
import random
import shutil
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
BLOCK = 16
START_LIMIT = 330
LONGEST = 400
ENVIRONMENT = {
    "SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK": "1",
    "SGLANG_IS_FLASHINFER_AVAILABLE": "false",
    "CUDA_HOME": "/usr/local/cuda",
    "PYTHONUNBUFFERED": "1",
}
SERVER = """
--host 127.0.0.1 --attention-backend triton --sampling-backend pytorch --linear-attn-backend triton
--max-running-requests 8 --cuda-graph-bs-decode 1 2 4 8 --context-length 2048 --random-seed 1
--mamba-ssm-dtype float32 --disable-prefill-cuda-graph --enable-metrics --watchdog-timeout 900
""".split()  # noqa: SIM905 - as it is typed
SMALL_POOLS = "--mem-fraction-static 0.88 --max-total-tokens 32768 --max-mamba-cache-size 96".split()  # noqa: SIM905
DRAFTING = ["--speculative-draft-attention-backend", "triton"]


@dataclass(frozen=True)
class Arm:
    """One way of serving: `algorithm` None is plain decoding; `config` is SGLANG_DDTREE_CONFIG."""

    algorithm: str | None = None
    width: int | None = None
    config: dict[str, Any] | None = None
    flags: tuple[str, ...] = ("--disable-radix-cache", "--grammar-backend", "none")
    environment: tuple[tuple[str, str], ...] = ()


def tree(
    width: int,
    builder: str = "best-first",
    *,
    topk: int = 16,
    flags: tuple[str, ...] = Arm.flags,
    **config: Any,
) -> Arm:
    keys = {"mode": "tree", "topk": topk, "builder": builder, "self_check": 0, **config}
    return Arm("DDTREE", width, keys, flags)


CACHED = ("--grammar-backend", "none")
EAGER = (*Arm.flags, "--disable-cuda-graph")
ARMS: dict[str, Arm] = {
    "ar": Arm(),
    "dflash": Arm("DFLASH"),
    "shadow": Arm("DDTREE", None, {"mode": "shadow", "budget": 63}),
    "chain": tree(BLOCK, topk=1),
    "tree16-eager": tree(16, flags=EAGER),
    "tree8": tree(8),
    "tree16": tree(16),
    "tree16-torch": tree(16, build_kernel="torch"),
    "tree32": tree(32),
    "tree64": tree(64),
    "tree16-check": tree(16, self_check=100),
    "tree32-check": tree(32, self_check=100),
    "tree64-check": tree(64, self_check=25),
    "tree32-spine": tree(32, "spine-first"),
    "tree64-spine": tree(64, "spine-first"),
    "tree32-log": tree(32, step_log="@steps"),
    "tree32-fused-move": Arm(
        "DDTREE",
        32,
        tree(32).config,
        environment=(("SGLANG_NATIVE_MOVE_KV_CACHE", "0"),),
    ),
    "tree32-cached": tree(32, flags=CACHED),
    "tree32-pages": tree(32, flags=(*CACHED, "--page-size", "16")),
    "tree32-grammar": tree(32, flags=("--disable-radix-cache", "--grammar-backend", "xgrammar")),
    "unsafe32": tree(32, mode="unsafe", allow_hybrid_unsafe=True),
    "ar-tp2": Arm(flags=(*Arm.flags, "--tp-size", "2")),
    "tree32-tp2": tree(32, flags=(*Arm.flags, "--tp-size", "2")),
}

# Stage -> arms and what each has to serve. `ar` is the reference and answers questions about ties.
STAGES: dict[str, dict[str, list[str]]] = {
    "smoke": {
        "ar": ["greedy"],
        "dflash": ["greedy"],
        "shadow": ["greedy", "info"],
        "chain": ["greedy", "info"],
        "tree16-eager": ["greedy", "info"],
        "tree16-torch": ["greedy", "info"],
        "tree16": ["greedy", "info"],
    },
    "a": {"dflash": ["greedy"], "shadow": ["greedy", "info"]},
    "b": {"dflash": ["greedy"], "chain": ["greedy", "info"]},
    "c": {"tree16-check": ["info"], "tree32-check": ["info"], "tree64-check": ["info"]},
    "d": {
        "ar": ["greedy", "ties"],
        "dflash": ["greedy"],
        "tree8": ["greedy", "info"],
        "tree16": ["greedy", "info"],
        "tree32": ["greedy", "info"],
        "tree64": ["greedy", "info"],
        "tree32-fused-move": ["greedy", "info"],
    },
    "e": {"tree32-log": ["greedy", "info", "steps"]},
    "f": {
        "tree32-spine": ["greedy", "info"],
        "tree64-spine": ["greedy", "info"],
        "tree32": ["greedy", "info"],
    },
    "g": {"tree32": ["greedy", "info"]},
    "h": {
        "ar": ["greedy", "ties"],
        "tree32-cached": ["greedy", "cache", "lengths", "batches", "aborts", "load", "info"],
        "tree32-pages": ["greedy", "cache", "lengths", "info"],
    },
    "features": {
        "ar": ["greedy", "features", "ties"],
        "tree32-grammar": ["greedy", "features", "grammar", "refusals", "fixtures", "info"],
        "shadow": ["refusals"],
    },
    "i": {"ar": ["draws"], "tree32": ["draws"], "dflash": ["draws"]},
    "j": {"ar": ["greedy", "ties"], "tree32": ["greedy", "info"], "unsafe32": ["greedy", "info"]},
    "k": {"ar-tp2": ["greedy", "ties"], "tree32-tp2": ["greedy", "info"]},
}
STEP_ARMS = ("step-ar", "step-dflash", "step-tree8", "step-tree16", "step-tree32", "step-tree64")


def main() -> int:
    options = parse_options()
    options.out, options.pair = options.out.resolve(), options.pair.resolve()
    if options.list:
        print(json.dumps({"stages": STAGES, "step": STEP_ARMS}, indent=1))
        return 0
    options.out.mkdir(parents=True, exist_ok=True)
    context = Context(options)
    work = plan_of(options.stages.split(","))
    print("arms:", ", ".join(work) or "none", flush=True)
    try:
        context.prepare()
        failures = run_plan(
            context, work, [stage for stage in options.stages.split(",") if stage in ("step",)]
        )
        judge(context)
    finally:
        context.pack()
    print("left over:", ", ".join(context.left_over) or "nothing", flush=True)
    print("failed:", ", ".join(failures) or "nothing", flush=True)
    return 1 if failures else 0


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--stages", default="smoke", help="comma-separated: " + ", ".join([*STAGES, "step"]))
    add("--list", action="store_true", help="show stages and arms, run nothing")
    add("--out", type=Path, default=Path(os.environ.get("OUT", "out")), help="where results go")
    add(
        "--pair",
        type=Path,
        default=ROOT / "engine_patch/reference/pair",
        help="folder with target/, drafter/ and prompts.jsonl",
    )
    add(
        "--bundle", default=str(ROOT / ".gpu/bundle/site.tar.xz"), help="site-packages to unpack; '' for none"
    )
    add("--minutes", type=float, default=9.0, help="end by itself after this long")
    add("--parallel", type=int, default=3, help="servers started side by side")
    add("--prompts", type=int, default=40)
    add("--tokens", type=int, default=160)
    add("--load-minutes", type=float, default=3.0)
    add("--draws", type=int, default=1000, help="per prompt, 20 prompts")
    return parser.parse_args()


def plan_of(stages: list[str]) -> dict[str, list[str]]:
    """Arm -> its workloads, in the order of the stages."""
    unknown = [stage for stage in stages if stage not in STAGES and stage != "step"]
    if unknown:
        raise SystemExit(f"--stages: found {', '.join(unknown)}, allowed are {', '.join([*STAGES, 'step'])}")
    work: dict[str, list[str]] = {}
    for stage in stages:
        for arm, workloads in STAGES.get(stage, {}).items():
            mine = work.setdefault(arm, [])
            mine += [name for name in workloads if name not in mine]
    return work


# -- the host ---------------------------------------------------------------------------------------------


@dataclass
class Context:
    """Folders, prompts, time left and what has been collected."""

    options: argparse.Namespace
    started: float = field(default_factory=time.monotonic)
    left_over: list[str] = field(default_factory=list)
    results: dict[str, dict[str, Any]] = field(default_factory=dict)
    site: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="site-")))
    prompts: list[list[int]] = field(default_factory=list)
    # Of every run its own, so that archives of several runs do not overwrite each other's judgements.
    judge: str = field(default_factory=lambda: f"judge-{int(time.time())}")

    @property
    def raw(self) -> Path:
        return Path(self.options.out) / "raw"

    def seconds_left(self) -> float:
        return float(self.options.minutes * 60 - (time.monotonic() - self.started))

    def prepare(self) -> None:
        self.raw.mkdir(exist_ok=True)
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
            config = {
                key: str(self.raw / f"{name}.steps") if value == "@steps" else value
                for key, value in arm.config.items()
            }
            environment["SGLANG_DDTREE_CONFIG"] = json.dumps(config)
        environment.update(arm.environment)
        return environment

    def keep(self, arm: str, workload: str, value: Any) -> None:
        self.results.setdefault(arm, {})[workload] = value
        (self.raw / f"{arm}.{workload}.json").write_text(json.dumps(value))

    def pack(self) -> None:
        """One archive: the way back has room for few files."""
        target = Path(self.options.out) / "engine.tar.xz"
        with tarfile.open(target, "w:xz", preset=6) as archive:
            for path in sorted(self.raw.rglob("*")):
                if path.is_file() and path.stat().st_size < 64 * 2**20:
                    archive.add(path, arcname=str(path.relative_to(self.raw)))
        shutil.rmtree(self.raw, ignore_errors=True)
        shutil.rmtree(self.site, ignore_errors=True)
        print(f"{target}: {target.stat().st_size / 2**20:.1f} MiB", flush=True)


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
    facts |= {"python": platform.python_version(), "argv": sys.argv[1:], "time": time.time()}
    print("host:", json.dumps(facts.get("versions") or facts), facts.get("cards"), flush=True)
    return facts


def make_prompts(pair: Path, count: int) -> list[list[int]]:
    """Token ids of the pair's prompts, cut to at most `LONGEST` and of different lengths."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(pair / "target" / "tokenizer.json"))
    lines = (pair / "prompts.jsonl").read_text().splitlines()[:count]
    return [tokenizer.encode(json.loads(line)["text"]).ids[:LONGEST] for line in lines]


# -- servers ----------------------------------------------------------------------------------------------


class Server:
    """One server process and the requests to it."""

    def __init__(self, context: Context, name: str, arm: Arm, port: int, argv: list[str]) -> None:
        self.name = name
        self.url = f"http://127.0.0.1:{port}"
        self.log = context.raw / f"{name}.log"
        self.began = time.monotonic()
        self.ready_after: float | None = None
        self._file = self.log.open("w")
        self.process = subprocess.Popen(
            argv,
            env=context.environment(arm, name),
            # Not the repository's root, which Python would search first: its folder `kernels` has the name of
            # a library that transformers looks for.
            cwd=context.raw,
            stdout=self._file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def wait(self, limit: float) -> bool:
        """Whether it has generated a token; a process that answers /health may still be unable to."""
        deadline = time.monotonic() + limit
        while time.monotonic() < deadline and self.process.poll() is None:
            with contextlib.suppress(OSError, ValueError):
                if self.get("/health", timeout=3) is not None:
                    self.generate([5, 6, 7, 8], 4)
                    self.ready_after = time.monotonic() - self.began
                    return True
            time.sleep(1)
        return False

    def stop(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, 9)
        self.process.wait()
        self._file.close()
        time.sleep(1)  # the card's memory comes back a little later

    def get(self, path: str, timeout: float = 60) -> str:
        with urllib.request.urlopen(self.url + path, timeout=timeout) as answer:
            return str(answer.read().decode())

    def post(self, path: str, body: dict[str, Any], timeout: float = 180) -> Any:
        request = urllib.request.Request(
            self.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            text = answer.read().decode()
        return json.loads(text) if text.startswith(("{", "[")) else text

    def flush(self) -> None:
        """Empty the prefix cache; refused while a request is still being cleaned up."""
        for _ in range(50):
            try:
                self.post("/flush_cache", {})
                return
            except urllib.error.HTTPError:
                time.sleep(0.2)
        raise RuntimeError("the prefix cache cannot be flushed")

    def generate(self, ids: list[int], tokens: int, *, temperature: float = 0.0, **more: Any) -> Any:
        sampling = {"max_new_tokens": tokens, "temperature": temperature, "ignore_eos": True}
        sampling |= more.pop("sampling", {})
        return self.post("/generate", {"input_ids": ids, "sampling_params": sampling, **more})


def argv_of(context: Context, arm: Arm, port: int) -> list[str]:
    pair = context.options.pair
    argv = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(pair / "target")]
    argv += ["--port", str(port), *SERVER, *SMALL_POOLS, *arm.flags]
    if arm.algorithm is not None:
        argv += ["--speculative-algorithm", arm.algorithm, *DRAFTING]
        argv += ["--speculative-draft-model-path", str(pair / "drafter")]
    if arm.width is not None:
        argv += ["--speculative-num-draft-tokens", str(arm.width)]
    return argv


def run_plan(context: Context, work: dict[str, list[str]], extra: list[str]) -> list[str]:
    """Start arms in groups, serve their workloads, keep `ar` up for questions about ties."""
    failures: list[str] = []
    names = list(work)
    # The first server fills the caches of compiled kernels that the others then find.
    groups = [names[:1]] if names else []
    rest = names[1:]
    groups += [rest[i : i + context.options.parallel] for i in range(0, len(rest), context.options.parallel)]
    reference: Server | None = None
    port = 30100
    try:
        for group in groups:
            if context.seconds_left() < 150:
                context.left_over += group
                continue
            servers = []
            for name in group:
                port += 7
                servers.append(Server(context, name, ARMS[name], port, argv_of(context, ARMS[name], port)))
            for server in servers:
                failures += serve(context, server, work[server.name])
                if server.name.startswith("ar") and server.ready_after is not None and reference is None:
                    reference = server
                else:
                    server.stop()
        if reference is not None:
            questions = ask_about_ties(context, reference)
            context.keep(context.judge, "differences", questions)
    finally:
        if reference is not None:
            reference.stop()
    for stage in extra:
        assert stage == "step"
        failures += step_times(context)
    return failures


def serve(context: Context, server: Server, workloads: list[str]) -> list[str]:
    limit = min(START_LIMIT, max(30.0, context.seconds_left() - 20))
    if not server.wait(limit):
        tail = server.log.read_text(errors="replace")[-6000:]
        print(f"{server.name}: NOT READY after {limit:.0f} s\n{tail}", flush=True)
        return [server.name]
    print(f"{server.name}: ready after {server.ready_after:.0f} s", flush=True)
    failures = []
    for workload in workloads:
        began = time.monotonic()
        try:
            context.keep(server.name, workload, WORKLOADS[workload](context, server))
            print(f"  {server.name}.{workload}: {time.monotonic() - began:.1f} s", flush=True)
        except Exception as error:  # a workload that breaks must not take the plan with it
            body = error.read().decode()[:500] if isinstance(error, urllib.error.HTTPError) else ""
            print(f"  {server.name}.{workload}: FAILED {type(error).__name__}: {error} {body}", flush=True)
            tail = server.log.read_text(errors="replace")[-3000:]
            print(tail, flush=True)
            failures.append(f"{server.name}.{workload}")
            if server.process.poll() is not None:
                break
    return failures


# -- workloads --------------------------------------------------------------------------------------------


def greedy(context: Context, server: Server) -> Any:
    """Every prompt alone, at T=0."""
    rows = []
    for number, ids in enumerate(context.prompts):
        began = time.monotonic()
        rid = f"greedy-{number}-{os.getpid()}"
        answer = server.generate(ids, context.options.tokens, rid=rid)
        meta = answer["meta_info"]
        rows.append(
            {
                "rid": rid,
                "output_ids": answer["output_ids"],
                "seconds": time.monotonic() - began,
                "meta": {
                    key: value for key, value in meta.items() if key.startswith(("spec_", "completion_"))
                },
            }
        )
    return rows


def ties(context: Context, server: Server) -> Any:
    """Valid executions of one prefix: decode's log-probabilities, prefill's, and a batch of four's."""
    rows = []
    for ids in context.prompts[:8]:
        top = {"return_logprob": True, "top_logprobs_num": 2}
        answer = server.generate(ids, 64, **top)
        decoded = answer["meta_info"]["output_top_logprobs"]
        output = answer["output_ids"]
        for place in range(1, 64, 7):
            prefix = ids + output[:place]
            alone = server.generate(prefix, 1, **top)["meta_info"]["output_top_logprobs"][0]
            with concurrent.futures.ThreadPoolExecutor(4) as pool:
                jobs = [pool.submit(server.generate, prefix, 1, **top) for _ in range(4)]
                together = [job.result()["meta_info"]["output_top_logprobs"][0] for job in jobs]
            rows.append({"decode": decoded[place], "prefill": alone, "batched": together})
    return rows


def info(context: Context, server: Server) -> Any:
    """The plugin's counters; asked twice, since the first question starts the copy that the second reads."""
    server.get("/server_info")
    time.sleep(0.5)
    server.generate(context.prompts[0], 8)
    state = json.loads(server.get("/server_info"))["internal_states"][0]
    wanted = ("ddtree", "avg_spec_accept_length", "memory_usage", "startup_time")
    return {key: state.get(key) for key in wanted} | {
        key: state.get(key)
        for key in (
            "speculative_num_draft_tokens",
            "speculative_eagle_topk",
            "speculative_num_steps",
            "disable_overlap_schedule",
            "disable_cuda_graph",
            "cuda_graph_config",
        )
    }


def steps(context: Context, server: Server) -> Any:
    """How many lines the step log has; the log itself is packed with the raw files."""
    server.generate(context.prompts[0], 8)
    log = context.raw / f"{server.name}.steps" / "steps.jsonl"
    return {"lines": sum(1 for _ in log.open()), "bytes": log.stat().st_size}


def cache(context: Context, server: Server) -> Any:
    """A continuation that hits what a tree commit has cached, against the same one on an empty cache."""
    rows = []
    for number, ids in enumerate(context.prompts[:10]):
        server.flush()
        first = server.generate(ids, 96)["output_ids"]
        keep = 40 + 5 * number
        follow = ids + first[:keep] + ids[:12]
        warm = server.generate(follow, 48)
        server.flush()
        cold = server.generate(follow, 48)
        rows.append(
            {
                "prefix": follow,
                "warm": warm["output_ids"],
                "cold": cold["output_ids"],
                "cached_tokens": warm["meta_info"].get("cached_tokens"),
            }
        )
    return rows


def lengths(context: Context, server: Server) -> Any:
    """Prompt lengths around page and chunk boundaries, warm against cold."""
    text = [token for ids in context.prompts for token in ids]
    rows = []
    for length in [*range(1, 4), *range(14, 19), *range(62, 67), *range(126, 131), *range(254, 259)]:
        ids = text[7 : 7 + length]
        server.flush()
        cold = server.generate(ids, 40)
        warm = server.generate(ids, 40)
        rows.append(
            {"prefix": ids, "cold": cold["output_ids"], "warm": warm["output_ids"]}
            | {"cached_tokens": warm["meta_info"].get("cached_tokens")}
        )
    return rows


def batches(context: Context, server: Server) -> Any:
    """The same prompts 1, 2, 4 and 8 at a time."""
    rows: dict[str, Any] = {}
    for size in (1, 2, 4, 8):
        with concurrent.futures.ThreadPoolExecutor(size) as pool:
            answers = list(pool.map(lambda ids: server.generate(ids, 64), context.prompts[:16]))
        rows[str(size)] = [answer["output_ids"] for answer in answers]
    return rows


def aborts(context: Context, server: Server) -> Any:
    """Connections that break in mid-stream; afterwards the server answers as before."""
    before = server.generate(context.prompts[0], 64)["output_ids"]
    broken = 0
    for number in range(12):
        body = {
            "input_ids": context.prompts[number % len(context.prompts)],
            "stream": True,
            "sampling_params": {"max_new_tokens": 400, "temperature": 0, "ignore_eos": True},
        }
        request = urllib.request.Request(
            server.url + "/generate", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        answer = urllib.request.urlopen(request, timeout=60)
        for _ in range(1 + number % 5):
            answer.readline()
        answer.close()
        broken += 1
    time.sleep(2)
    after = server.generate(context.prompts[0], 64)["output_ids"]
    return {"aborted": broken, "before": before, "after": after}


def load(context: Context, server: Server) -> Any:
    """Mixed requests at eight in flight; greedy ones are compared with what they gave alone."""
    seconds = min(context.options.load_minutes * 60, context.seconds_left() - 60)
    expected = [server.generate(ids, 48)["output_ids"] for ids in context.prompts[:8]]
    deadline = time.monotonic() + seconds
    lock = threading.Lock()
    outcome: Counter[str] = Counter()
    differing: list[dict[str, Any]] = []
    slowest = [0.0]

    def worker(number: int) -> None:
        rng = random.Random(number)
        while time.monotonic() < deadline:
            place = rng.randrange(8)
            ids = context.prompts[place]
            kind = rng.choice(["greedy", "greedy", "sampled", "penalty", "logprobs", "stop", "abort"])
            began = time.monotonic()
            try:
                problem = one_request(server, kind, ids, rng, expected[place])
            except Exception as error:  # counted, not raised: the load goes on
                problem = f"{type(error).__name__}: {error}"
            with lock:
                outcome[kind] += 1
                slowest[0] = max(slowest[0], time.monotonic() - began)
                if problem is not None:
                    outcome[f"{kind}: problem"] += 1
                    if len(differing) < 40:
                        differing.append({"kind": kind, "prompt": place, "problem": problem})

    threads = [threading.Thread(target=worker, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return {
        "seconds": seconds,
        "requests": dict(outcome),
        "problems": differing,
        "slowest_seconds": slowest[0],
        "prefixes": context.prompts[:8],
        "expected": expected,
    }


def one_request(
    server: Server, kind: str, ids: list[int], rng: random.Random, expected: list[int]
) -> str | dict[str, Any] | None:
    """Send one request of a kind; what was wrong with the answer, if anything."""
    if kind == "greedy":
        output = server.generate(ids, 48)["output_ids"]
        return None if output == expected else {"output_ids": output}
    if kind == "abort":
        try:
            server.post(
                "/generate", {"input_ids": ids, "sampling_params": {"max_new_tokens": 600}}, timeout=0.2
            )
        except OSError:
            return None
        return None
    sampling: dict[str, Any] = {"top_p": 0.9, "min_p": 0.02}
    if kind == "penalty":
        sampling = {"frequency_penalty": 0.5, "presence_penalty": 0.3}
    if kind == "stop":
        sampling = {"stop": ["\n\n", "return"], "ignore_eos": False}
    more: dict[str, Any] = {"return_logprob": True, "top_logprobs_num": 3} if kind == "logprobs" else {}
    tokens = rng.randrange(8, 64)
    answer = server.generate(ids, tokens, temperature=0.8, sampling=sampling, **more)
    count = len(answer["output_ids"])
    if kind != "stop" and count != tokens:
        return f"asked for {tokens} tokens, got {count}"
    if kind == "logprobs" and len(answer["meta_info"]["output_token_logprobs"]) != tokens:
        return f"{len(answer['meta_info']['output_token_logprobs'])} log-probabilities for {tokens} tokens"
    return None


def draws(context: Context, server: Server) -> Any:
    """Counts of the first three tokens at T=0.8: the first is prefill's, the others a verify pass's."""
    rows = []
    for ids in context.prompts[:20]:
        counts: Counter[str] = Counter()
        remaining = context.options.draws
        while remaining > 0:
            size = min(64, remaining)
            sampling = {"max_new_tokens": 3, "temperature": 0.8, "ignore_eos": True}
            answers = server.post("/generate", {"input_ids": [ids] * size, "sampling_params": sampling}, 300)
            counts.update(",".join(map(str, answer["output_ids"])) for answer in answers)
            remaining -= size
        rows.append(dict(counts))
    return rows


def features(context: Context, server: Server) -> Any:
    """Penalties, logit bias, logprobs and stop strings at T=0, to be compared between arms."""
    bias = {str(context.prompts[0][3]): -100.0}
    cases: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "frequency_penalty": ({"frequency_penalty": 1.0}, {}),
        "presence_penalty": ({"presence_penalty": 1.5}, {}),
        "repetition_penalty": ({"repetition_penalty": 1.3}, {}),
        "logit_bias": ({"logit_bias": bias}, {}),
        "stop": ({"stop": ["return", "\n\n"], "ignore_eos": False}, {}),
        "stop_token_ids": ({"stop_token_ids": [context.prompts[1][5]], "ignore_eos": False}, {}),
        "logprobs": ({}, {"return_logprob": True, "top_logprobs_num": 2, "logprob_start_len": 0}),
        "min_p, near zero temperature": ({"min_p": 0.5, "temperature": 0.01}, {}),
    }
    rows: dict[str, Any] = {}
    for name, (sampling, more) in cases.items():
        rows[name] = [server.generate(ids, 40, sampling=sampling, **more) for ids in context.prompts[:4]]
    return rows


def grammar(context: Context, server: Server) -> Any:
    """Answers under a grammar have to match it."""
    rows = []
    for ids in context.prompts[:4]:
        for temperature in (0.0, 0.8):
            sampling = {"regex": "(yes|no|perhaps) [0-9]{3}", "ignore_eos": False}
            answer = server.generate(ids, 24, temperature=temperature, sampling=sampling)
            rows.append({"text": answer["text"], "finish": answer["meta_info"]["finish_reason"]})
    return rows


def refusals(context: Context, server: Server) -> Any:
    """Requests that must be answered 400."""
    bodies: dict[str, dict[str, Any]] = {
        "ddtree_budget": {"sampling_params": {"custom_params": {"ddtree_budget": 7}, "max_new_tokens": 4}},
        "return_hidden_states": {"return_hidden_states": True, "sampling_params": {"max_new_tokens": 4}},
    }
    rows = {}
    for name, body in bodies.items():
        try:
            answer = server.post("/generate", {"input_ids": context.prompts[0], **body})
            rows[name] = {"status": 200, "body": answer}
        except urllib.error.HTTPError as error:
            rows[name] = {"status": error.code, "body": error.read().decode()[:600]}
    return rows


def fixtures(context: Context, server: Server) -> Any:
    """A real server's answers as they are, for the CPU engine's server to be tested against."""
    ids = context.prompts[2]
    sampling = {"max_new_tokens": 24, "temperature": 0, "ignore_eos": True}
    body = {"input_ids": ids, "sampling_params": sampling, "stream": True}
    request = urllib.request.Request(
        server.url + "/generate", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        stream = answer.read().decode()
    chat = {"model": "default", "messages": [{"role": "user", "content": "def"}], "max_tokens": 8}
    completion = {"model": "default", "prompt": "def add(", "max_tokens": 8, "temperature": 0}
    recorded: dict[str, Any] = {
        "generate": server.generate(ids, 24),
        "generate_logprobs": server.generate(ids, 4, return_logprob=True, top_logprobs_num=2),
        "generate_stream": stream,
        "server_info": json.loads(server.get("/server_info")),
        "metrics": server.get("/metrics"),
        "model_info": json.loads(server.get("/model_info")),
        "v1_models": json.loads(server.get("/v1/models")),
        "v1_completions": server.post("/v1/completions", completion),
    }
    try:
        recorded["v1_chat_completions"] = server.post("/v1/chat/completions", chat)
    except urllib.error.HTTPError as error:  # a tokenizer without a chat template
        recorded["v1_chat_completions"] = {"status": error.code, "body": error.read().decode()[:600]}
    return recorded


WORKLOADS: dict[str, Callable[[Context, Server], Any]] = {
    function.__name__: function
    for function in (
        greedy, ties, info, steps, cache, lengths, batches,
        aborts, load, draws, features, grammar, refusals, fixtures,
    )
}  # fmt: skip


# -- what can be said on the spot -------------------------------------------------------------------------


def common_prefix(one: list[int], other: list[int]) -> int:
    for place, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return place
    return min(len(one), len(other))


def comparisons(context: Context) -> Iterator[tuple[str, int, list[int], list[int], list[int]]]:
    """(where, number, prompt, one output, the other) of all executions that should agree."""
    outputs = greedy_outputs(context)
    for reference in ("ar", "ar-tp2", "dflash"):
        for arm, rows in outputs.items():
            if reference not in outputs or arm == reference or (reference == "ar" and "tp2" in arm):
                continue
            for number, (mine, theirs) in enumerate(zip(rows, outputs[reference], strict=True)):
                yield f"{arm} against {reference}", number, context.prompts[number], mine, theirs
    for arm, runs in context.results.items():
        for workload in ("cache", "lengths"):
            for number, row in enumerate(runs.get(workload, ())):
                yield f"{arm} {workload}", number, row["prefix"], row["warm"], row["cold"]
        sizes = runs.get("batches", {})
        for size, rows in sizes.items():
            for number, (mine, theirs) in enumerate(zip(rows, sizes["1"], strict=True)):
                yield f"{arm} batch {size}", number, context.prompts[number], mine, theirs
        loaded = runs.get("load")
        if loaded:
            # Named even when nothing differed.
            yield f"{arm} load", 0, [], [], []
        for problem in loaded["problems"] if loaded else ():
            if isinstance(problem["problem"], dict):
                number = problem["prompt"]
                mine, theirs = problem["problem"]["output_ids"], loaded["expected"][number]
                yield f"{arm} load", number, loaded["prefixes"][number], mine, theirs


def greedy_outputs(context: Context) -> dict[str, list[list[int]]]:
    return {
        arm: [row["output_ids"] for row in runs["greedy"]]
        for arm, runs in context.results.items()
        if "greedy" in runs
    }


def ask_about_ties(context: Context, server: Server) -> dict[str, Any]:
    """The reference's two best tokens after every prefix at which two executions part.

    `compared` names every comparison that was made, also those without a difference.
    """
    compared: set[str] = set()
    questions = []
    for where, number, prompt, mine, theirs in comparisons(context):
        compared.add(where)
        place = common_prefix(mine, theirs)
        if place == min(len(mine), len(theirs)):
            continue
        if context.seconds_left() < 20:
            context.left_over.append("tie questions")
            break
        answer = server.generate(prompt + mine[:place], 1, return_logprob=True, top_logprobs_num=2)
        best = answer["meta_info"]["output_top_logprobs"][0]
        questions.append(
            {
                "where": where,
                "prompt": number,
                "place": place,
                "tokens": [mine[place], theirs[place]],
                "best": best,
                "gap": best[0][0] - best[1][0],
            }
        )
    return {"compared": sorted(compared), "questions": questions}


def judge(context: Context) -> None:
    """Figures without statistics, printed and kept."""
    lines: dict[str, Any] = {}
    outputs = greedy_outputs(context)
    for arm, runs in context.results.items():
        line: dict[str, Any] = {}
        if "greedy" in runs:
            steps_taken = sum(row["meta"].get("spec_verify_ct", 0) for row in runs["greedy"])
            tokens = sum(len(row["output_ids"]) for row in runs["greedy"])
            line["accept_length"] = tokens / steps_taken if steps_taken else None
            for reference in ("ar", "dflash"):
                if reference in outputs and arm != reference:
                    same = [
                        mine == theirs for mine, theirs in zip(outputs[arm], outputs[reference], strict=True)
                    ]
                    line[f"identical_to_{reference}"] = f"{sum(same)}/{len(same)}"
        described = (runs.get("info") or {}).get("ddtree") or {}
        for key in (
            "requests",
            "tree_kernel_requests",
            "below_spine",
            "spine_accept_length",
            "shadow_accept_length",
        ):
            if key in described:
                line[key] = described[key]
        if described.get("self_check"):
            check = dict(described["self_check"])
            check.pop("errors", None)
            line["self_check"] = check
        if line:
            lines[arm] = line
    asked = context.results.get(context.judge, {}).get("differences", {}).get("questions", [])
    noise = tie_noise(context)
    lines["ties"] = {
        "questions": len(asked),
        "noise": noise,
        "largest_gap": max((q["gap"] for q in asked), default=0),
    }
    if noise is not None:
        lines["ties"]["not_near"] = [q["where"] for q in asked if q["gap"] > 2 * noise]
    context.keep(context.judge, "figures", lines)
    print(json.dumps(lines, indent=1), flush=True)


def tie_noise(context: Context) -> float | None:
    """Largest change of the two best tokens' distance between valid executions of one prefix."""
    rows = [row for runs in context.results.values() for row in runs.get("ties", ())]
    changes = []
    for row in rows:
        variants = [row["decode"], row["prefill"], *row["batched"]]
        by_token = [{entry[1]: entry[0] for entry in variant} for variant in variants]
        tokens = set.intersection(*(set(values) for values in by_token))
        for token in tokens:
            values = [entry[token] for entry in by_token]
            changes.append(max(values) - min(values))
    return max(changes) if changes else None


# -- step times at a 27B's shape ---------------------------------------------------------------------------

QWEN36_27B = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "vocab_size": 248320,
    "hidden_size": 5120,
    "intermediate_size": 17408,
    "num_hidden_layers": 64,
    "full_attention_interval": 4,
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 16,
    "num_attention_heads": 24,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "attn_output_gate": True,
    "hidden_act": "silu",
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 48,
    "mamba_ssm_dtype": "float32",
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
    "partial_rotary_factor": 0.25,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000000,
        "partial_rotary_factor": 0.25,
        "mrope_section": [11, 11, 10],
        "mrope_interleaved": True,
    },
    "bos_token_id": 1,
    "eos_token_id": 2,
}
DRAFTER_27B = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "hidden_size": 5120,
    "intermediate_size": 17408,
    "num_hidden_layers": 5,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "rope_theta": 10000000,
    "max_position_embeddings": 32768,
    "vocab_size": 248320,
    "layer_types": ["full_attention"] * 5,
    "block_size": BLOCK,
    "num_target_layers": 64,
    "dflash_config": {"mask_token_id": 248319, "target_layer_ids": [1, 16, 31, 46, 61]},
    "dtype": "bfloat16",
}
STEP_SERVER = """
--host 127.0.0.1 --attention-backend triton --sampling-backend pytorch --linear-attn-backend triton
--grammar-backend none --skip-tokenizer-init --load-format dummy --context-length 4096 --random-seed 1
--max-running-requests 2 --cuda-graph-bs-decode 1 2 --mem-fraction-static 0.85 --disable-radix-cache
--mamba-ssm-dtype float32 --disable-prefill-cuda-graph --watchdog-timeout 900
""".split()  # noqa: SIM905


def step_arm(name: str) -> Arm:
    kind = name.removeprefix("step-")
    if kind == "ar":
        return Arm()
    if kind == "dflash":
        return Arm("DFLASH")
    return tree(int(kind.removeprefix("tree")))


def step_argv(folder: Path, arm: Arm, port: int) -> list[str]:
    argv = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(folder / "target")]
    argv += ["--port", str(port), *STEP_SERVER]
    if arm.algorithm is not None:
        argv += ["--speculative-algorithm", arm.algorithm, *DRAFTING]
        argv += ["--speculative-draft-model-path", str(folder / "drafter")]
    if arm.width is not None:
        argv += ["--speculative-num-draft-tokens", str(arm.width)]
    return argv


def step_times(context: Context) -> list[str]:
    """One server at a time, alone on the card: seconds a step takes, and its stages, at batch 1 and 2."""
    folder = write_step_checkpoints(context.site)
    failures: list[str] = []
    port = 31000
    for name in STEP_ARMS:
        if context.seconds_left() < 170:
            context.left_over.append(name)
            continue
        port += 7
        arm = step_arm(name)
        server = Server(context, name, arm, port, step_argv(folder, arm, port))
        try:
            failures += serve_steps(context, server)
        finally:
            server.stop()
    return failures


def write_step_checkpoints(site: Path) -> Path:
    folder = site / "shapes"
    for name, config in (("target", QWEN36_27B), ("drafter", DRAFTER_27B)):
        (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / name / "config.json").write_text(json.dumps(config))
    return folder


def serve_steps(context: Context, server: Server) -> list[str]:
    if not server.wait(min(START_LIMIT, context.seconds_left() - 30)):
        print(f"{server.name}: NOT READY\n{server.log.read_text(errors='replace')[-5000:]}", flush=True)
        return [server.name]
    rng = random.Random(0)
    prompt = [rng.randrange(1000, 200000) for _ in range(200)]
    server.generate(prompt, 64)
    rows: dict[str, Any] = {"ready_seconds": server.ready_after}
    for batch in (1, 2):
        began = time.monotonic()
        with concurrent.futures.ThreadPoolExecutor(batch) as pool:
            jobs = [pool.submit(server.generate, prompt, 256) for _ in range(batch)]
            answers = [job.result() for job in jobs]
        seconds = time.monotonic() - began
        # Random weights accept next to nothing: a step is a verify pass, or a token without speculation.
        passes = max(answer["meta_info"].get("spec_verify_ct") or 256 for answer in answers)
        rows[f"batch_{batch}"] = {"seconds": seconds, "steps": passes, "ms_per_step": 1e3 * seconds / passes}
    state = json.loads(server.get("/server_info"))["internal_states"][0]
    rows["ddtree"], rows["memory_usage"] = state.get("ddtree"), state.get("memory_usage")
    with contextlib.suppress(OSError, ValueError):
        rows["profile"] = profile(context, server, prompt)
    context.keep(server.name, "steps", rows)
    print(
        f"{server.name}: {json.dumps({k: v for k, v in rows.items() if k.startswith('batch')})}", flush=True
    )
    return []


def profile(context: Context, server: Server, prompt: list[int]) -> Any:
    """Ask SGLang for a kernel trace of some steps and add up time by kernel name."""
    folder = context.site / f"{server.name}.profile"
    server.post("/start_profile", {"output_dir": str(folder), "num_steps": 12, "activities": ["GPU"]})
    server.generate(prompt, 48)
    deadline = time.monotonic() + 30
    traces: list[Path] = []
    while not traces and time.monotonic() < deadline:
        time.sleep(1)
        traces = list(folder.rglob("*.json.gz"))
    if not traces:
        return None
    import gzip

    time.sleep(1)
    with gzip.open(traces[0], "rt") as file:
        events = json.load(file)["traceEvents"]
    totals: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    spans = []
    for event in events:
        if event.get("cat") == "kernel":
            totals[event["name"][:120]] += event["dur"]
            calls[event["name"][:120]] += 1
            spans.append((event["ts"], event["ts"] + event["dur"]))
    busy, reach = 0.0, 0.0
    for start, end in sorted(spans):
        busy += max(0.0, end - max(start, reach))
        reach = max(reach, end)
    whole = max((end for _, end in spans), default=0.0) - min((start for start, _ in spans), default=0.0)
    kernels = [[name, calls[name], microseconds] for name, microseconds in totals.most_common(60)]
    return {"steps": 12, "busy_us": busy, "span_us": whole, "kernels": kernels}


if __name__ == "__main__":
    raise SystemExit(main())
