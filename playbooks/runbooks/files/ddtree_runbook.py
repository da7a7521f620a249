"""What the runbooks need to know of a host. Changes nothing there but the bundle that it is told to write.

    collect     read the kernel's log, cards, containers, processes, services or disks into a bundle
    containers  list the containers of ours
    wait        wait until a started container serves, or say at once why it never will
    waste       list what can be deleted without loss
    left        list everything of ours that is on the host

Each prints one JSON object. Standard library only, Python 3.8 or newer: it runs on the host. Each command has
a time limit of its own, since nvidia-smi hangs when a card has fallen off the bus. What looks like a key or a
token is taken out before anything is written, and environments of containers and arguments of processes are
never read.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

#: Ends of names of containers that do not serve: kept for a rollback, or in the middle of one.
SET_ASIDE = (".previous", ".aside")
#: Hardware faults; the same set as that of the check kernel.xid.
FATAL_XIDS = frozenset({48, 62, 63, 64, 74, 79, 92, 94, 95, 119, 120, 140, 143, 154})
XID = re.compile(r"NVRM: Xid \(PCI:([0-9a-fA-F:.]+)\): (\d+)")
KERNEL = re.compile(
    r"NVRM|nvidia|AER:|pcieport|Out of memory|oom-kill|Killed process|blocked for more than|I/O error|"
    r"segfault|Machine check|mce:",
    re.IGNORECASE,
)
KILLED = re.compile(r"Killed process (\d+) \(([^)]*)\)")
BUS = re.compile(r"([0-9a-fA-F]+):([0-9a-fA-F]{2}):([0-9a-fA-F]{2})")
GPU_FIELDS = [
    "index",
    "uuid",
    "pci.bus_id",
    "name",
    "temperature.gpu",
    "power.draw",
    "power.limit",
    "clocks.sm",
    "clocks.max.sm",
    "clocks.mem",
    "utilization.gpu",
    "memory.used",
    "memory.total",
    "clocks_event_reasons.active",
]
#: Bits of clocks_event_reasons.active; a cap is what was asked for, the others are trouble.
REASONS = {
    0x04: "power cap",
    0x08: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}
BUSY_PERCENT = 50
METRICS = re.compile(r"^(?:# (?:HELP|TYPE) )?(?:sglang:|ddtree_)")
SAMPLE = re.compile(r"^([A-Za-z_:][\w:]*)(\{[^}]*\})? ([0-9.eE+-]+)$")
#: Of /server_info, which carries keys in clear: only plain values of these names.
SERVER_INFO = [
    "version",
    "attention_backend",
    "linear_attn_backend",
    "sampling_backend",
    "dtype",
    "kv_cache_dtype",
    "quantization",
    "tp_size",
    "context_length",
    "max_running_requests",
    "max_total_num_tokens",
    "mem_fraction_static",
    "page_size",
    "chunked_prefill_size",
    "random_seed",
    "disable_cuda_graph",
    "disable_overlap_schedule",
    "disable_radix_cache",
    "enable_deterministic_inference",
    "disable_flashinfer_autotune",
    "mamba_radix_cache_strategy",
    "speculative_algorithm",
    "speculative_num_draft_tokens",
    "speculative_dflash_block_size",
    "speculative_draft_attention_backend",
]
DDTREE_INFO = [
    "arm",
    "mode",
    "budget",
    "block",
    "topk",
    "builder",
    "dtype",
    "engine",
    "model_sha256",
    "drafter_sha256",
    "allow_hybrid_unsafe",
]
#: Fields in which arms differ on purpose.
OF_THE_ARM = frozenset(
    {
        "speculative_algorithm",
        "speculative_num_draft_tokens",
        "speculative_dflash_block_size",
        "speculative_draft_attention_backend",
        *(f"ddtree.{name}" for name in ("arm", "mode", "budget", "topk", "builder", "allow_hybrid_unsafe")),
    }
)
SECRETS = (
    re.compile(
        r"(?i)(\b[\w-]*(?:api[_-]?key|token|secret|password)\b[\"']?\s*[=:]\s*[\"']?)"
        r"(?!None\b)[^\s\"',)}]{6,}"
    ),
    re.compile(r"(?i)(\bbearer\s+)\S+"),
    re.compile(r"()\bhf_[A-Za-z0-9]{8,}"),
    re.compile(r"(?i)(--[\w-]*(?:api-key|token|secret|password)\s+)\S+"),
)
MIB = 2**20


def main() -> int:
    parser = argparse.ArgumentParser(description="What the runbooks need to know of a host.")
    parser.add_argument("--docker", default="docker", help="the command of docker's client, with options")
    parser.add_argument("--nvidia-smi", default="nvidia-smi")
    parser.add_argument("--timeout", type=float, default=30.0, help="seconds for each command")
    parser.add_argument("--cluster", required=True)
    parser.add_argument("--service", default="", help="only containers of this service")
    commands = parser.add_subparsers(dest="command", required=True)
    collect = commands.add_parser("collect")
    collect.add_argument("--topic", action="append", default=[], choices=sorted(TOPICS))
    collect.add_argument("--bundle", required=True, help="the tar.gz to write")
    collect.add_argument("--kernel-log", default="", help="read this file instead of the kernel's log")
    collect.add_argument("--path", action="append", default=[], help="a folder whose space matters")
    collect.add_argument("--seconds", type=float, default=0.0, help="how long to watch what changes")
    collect.add_argument("--lines", type=int, default=400, help="of each container's log")
    commands.add_parser("containers")
    wait = commands.add_parser("wait")
    wait.add_argument("--container", required=True)
    wait.add_argument("--seconds", type=float, default=1200.0)
    waste = commands.add_parser("waste")
    waste.add_argument("--logs", required=True)
    waste.add_argument("--models", required=True)
    waste.add_argument("--days", type=float, required=True, help="files younger than this stay")
    left = commands.add_parser("left")
    for name in ("--state", "--models", "--logs"):
        left.add_argument(name, required=True)
    left.add_argument("--root", default="", help="prefix of system paths")
    left.add_argument("--file", action="append", default=[], help="a system file of ours")
    left.add_argument("--weights", action="store_true", help="list the models, too")
    arguments = parser.parse_args()
    answers = {"collect": collected, "containers": listed, "wait": waited, "waste": wasted, "left": remaining}
    result = answers[arguments.command](Host(arguments), arguments)
    json.dump(result, sys.stdout)
    sys.stdout.write("\n")
    if result.get("error"):
        sys.stderr.write(f"{result['error']}\n")
    return 1 if result.get("error") else 0


class Answer:
    """What a command said; rc is null when it is missing or hung."""

    def __init__(self, rc: int | None, stdout: str, stderr: str) -> None:
        self.rc, self.stdout, self.stderr = rc, stdout, stderr

    @property
    def text(self) -> str:
        end = "" if self.rc == 0 else f"\n[exit status {self.rc}: {self.stderr.strip()[-500:]}]\n"
        return self.stdout + end


class Host:
    """Runs commands, and keeps what they said for the bundle."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.docker_argv = shlex.split(arguments.docker)
        self.smi = arguments.nvidia_smi
        self.timeout = arguments.timeout
        self.cluster, self.service = arguments.cluster, arguments.service
        self.files: dict[str, str] = {}

    def run(self, argv: list[str], timeout: float | None = None) -> Answer:
        limit = timeout or self.timeout
        environment = dict(os.environ, LC_ALL="C")
        try:
            done = subprocess.run(
                argv,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=limit,
                env=environment,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return Answer(None, "", f"no answer in {limit:g} s")
        except OSError as error:
            return Answer(None, "", error.strerror or "cannot be run")
        return Answer(
            done.returncode, done.stdout.decode("utf-8", "replace"), done.stderr.decode("utf-8", "replace")
        )

    def docker(self, *argv: str, timeout: float | None = None) -> Answer:
        return self.run([*self.docker_argv, *argv], timeout)

    def containers(self) -> tuple[list[dict[str, Any]], str]:
        """Containers of ours and, where docker gives no answer, why."""
        filters = ["--filter", f"label=ddtree.cluster={self.cluster}"]
        if self.service:
            filters += ["--filter", f"label=ddtree.service={self.service}"]
        ids = self.docker("ps", "--all", "--quiet", "--no-trunc", *filters)
        if ids.rc != 0:
            return [], f"docker: {(ids.stderr or 'no answer').strip()[-300:]}"
        if not ids.stdout.split():
            return [], ""
        found = self.docker("inspect", *ids.stdout.split())
        try:
            answers = json.loads(found.stdout)
        except ValueError:
            return [], f"docker inspect: {found.stderr.strip()[-300:]}"
        ours = [described(one) for one in answers if not is_probe(one)]
        return sorted(ours, key=lambda one: str(one["name"])), ""


# --- containers ------------------------------------------------------------------------------------------


def is_probe(answer: dict[str, Any]) -> bool:
    """Whether the container runs one command of a check and is removed then."""
    return "ddtree.one-shot" in ((answer.get("Config") or {}).get("Labels") or {})


def described(answer: dict[str, Any]) -> dict[str, Any]:
    """What may be told of a container: not its environment, which holds keys."""
    state, host = answer.get("State") or {}, answer.get("HostConfig") or {}
    labels = (answer.get("Config") or {}).get("Labels") or {}
    name = str(answer.get("Name", "")).lstrip("/")
    argv = [str(word) for word in [answer.get("Path", ""), *(answer.get("Args") or [])]]
    asked = [uuid for one in host.get("DeviceRequests") or [] for uuid in one.get("DeviceIDs") or []]
    return {
        "name": name,
        "service": labels.get("ddtree.service", ""),
        "previous": name.endswith(SET_ASIDE),
        "image": answer.get("Image", ""),
        "hash": labels.get("ddtree.config-hash", ""),
        "state": state.get("Status", "unknown"),
        "exit_code": state.get("ExitCode"),
        "oom_killed": bool(state.get("OOMKilled")),
        "error": redact(str(state.get("Error") or "")),
        "started": state.get("StartedAt", ""),
        "finished": state.get("FinishedAt", ""),
        "health": (state.get("Health") or {}).get("Status", ""),
        "restarts": answer.get("RestartCount", 0),
        "gpus": sorted({uuid.rpartition("=")[2] for uuid in asked} | set(spec_of(labels).get("gpus") or ())),
        "url": url_of(argv),
        "argv": redact(" ".join(map(shlex.quote, argv))),
    }


def spec_of(labels: dict[str, str]) -> dict[str, Any]:
    """What `ddtree deploy` asked for when it made the container; empty where the label is not there."""
    try:
        spec = json.loads(labels.get("ddtree.spec", "{}"))
    except ValueError:
        return {}
    return spec if isinstance(spec, dict) else {}


def url_of(argv: list[str]) -> str:
    """Where a server listens, from its own arguments; empty where they do not say."""
    values = {}
    for index, word in enumerate(argv):
        name, equals, value = word.partition("=")
        if name in ("--host", "--port"):
            values[name] = value if equals else next(iter(argv[index + 1 : index + 2]), "")
    address, port = values.get("--host", "127.0.0.1"), values.get("--port", "")
    address = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(address, address)
    return f"http://[{address}]:{port}" if ":" in address else f"http://{address}:{port}" if port else ""


def listed(host: Host, arguments: argparse.Namespace) -> dict[str, Any]:
    containers, error = host.containers()
    return {"containers": containers, "error": error}


def waited(host: Host, arguments: argparse.Namespace) -> dict[str, Any]:
    """Waits for /ready as long as the container runs: one that has ended will not answer any more."""
    name, started = arguments.container, time.monotonic()
    seen = "not asked yet"
    while time.monotonic() - started < arguments.seconds:
        found = host.docker("inspect", name)
        if found.rc != 0:
            return {"error": f"{name}: {found.stderr.strip()[-300:]}"}
        one = described(json.loads(found.stdout)[0])
        if one["state"] in ("exited", "dead"):
            return {"error": f"{name} {ended(one)}; its log ends: {last_words(host, name)}"}
        if not one["url"]:
            return {"ready": False, "found": [f"{name}: {one['state']}; its arguments name no port to ask"]}
        code, body = readiness(one["url"])
        if code == 200:
            return {"ready": True, "found": [f"{name}: ready after {time.monotonic() - started:.0f} s"]}
        seen = f"/ready answers {code}" if code else body
        time.sleep(1.0)
    late = f"{name} was not ready after {arguments.seconds:g} s: {seen}"
    return {"error": f"{late}; its log ends: {last_words(host, name)}"}


def ended(one: dict[str, Any]) -> str:
    why = ", killed for lack of memory" if one["oom_killed"] else ""
    return f"exited with code {one['exit_code']}{why}{': ' + one['error'] if one['error'] else ''}"


def last_words(host: Host, name: str) -> str:
    """The end of a container's log on one line: Ansible shows the last line of what a program said."""
    answer = host.docker("logs", "--tail", "8", name)
    lines = [line.strip() for line in (answer.stdout + answer.stderr).splitlines()]
    return redact(" | ".join(line for line in lines if line))[-350:]


# --- the bundle ------------------------------------------------------------------------------------------


def collected(host: Host, arguments: argparse.Namespace) -> dict[str, Any]:
    found: list[str] = []
    result: dict[str, Any] = {"found": found, "affected": [], "error": ""}
    for topic in arguments.topic:
        found += TOPICS[topic](host, arguments, result)
    host.files["found.txt"] = "\n".join(found) + "\n"
    write_bundle(Path(arguments.bundle), host.files)
    return result


def write_bundle(file: Path, files: dict[str, str]) -> None:
    with os.fdopen(os.open(str(file), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as stream:
        bundle = tarfile.open(fileobj=stream, mode="w:gz")  # noqa: SIM115 - two in one `with` need Python 3.9
        for name, text in sorted(files.items()):
            data = redact(text).encode("utf-8", "replace")
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode, entry.mtime = len(data), 0o600, int(time.time())
            bundle.addfile(entry, io.BytesIO(data))
        bundle.close()


def kernel(host: Host, arguments: argparse.Namespace, result: dict[str, Any]) -> list[str]:
    """The kernel's lines about cards, buses and memory, and whose card reported a hardware fault."""
    lines = kernel_lines(host, arguments.kernel_log)
    if lines is None:
        return ["the kernel's log cannot be read"]
    host.files["kernel.txt"] = "\n".join(lines) + "\n"
    found = []
    xids: dict[tuple[str, int], int] = {}
    for line in lines:
        match = XID.search(line)
        if match:
            key = (match.group(1), int(match.group(2)))
            xids[key] = xids.get(key, 0) + 1
    for (bus, code), count in sorted(xids.items()):
        fatal = code in FATAL_XIDS
        found.append(
            f"Xid {code} on {bus}, {count} times: {'hardware' if fatal else 'from a program, mostly'}"
        )
        if fatal:
            result.setdefault("fatal_buses", []).append(bus)
    found += [f"the kernel ended process {pid} ({name}) for lack of memory" for pid, name in killed(lines)]
    hung = [line for line in lines if "blocked for more than" in line]
    found += [f"{len(hung)} tasks hung: {hung[-1].strip()}"] if hung else []
    return found or ["nothing about cards, buses or memory in the kernel's log"]


def kernel_lines(host: Host, file: str) -> list[str] | None:
    if file:
        try:
            text = Path(file).read_text(encoding="utf-8", errors="replace")
        except OSError:
            return None
        return [line for line in text.splitlines() if KERNEL.search(line)][-2000:]
    for argv in (["dmesg", "--ctime"], ["journalctl", "-k", "-b", "-q", "--no-pager"]):
        answer = host.run(argv)
        if answer.rc == 0:
            return [line for line in answer.stdout.splitlines() if KERNEL.search(line)][-2000:]
    return None


def killed(lines: list[str]) -> list[tuple[str, str]]:
    return [match.groups() for match in map(KILLED.search, lines) if match]  # type: ignore[misc]


def gpus(host: Host, arguments: argparse.Namespace, result: dict[str, Any]) -> list[str]:
    """What the cards say, and over some seconds how hot, fast and capped they are."""
    cards = sampled(host, arguments.seconds)
    present = nvidia_devices()
    if cards is None:
        host.files["nvidia-smi.txt"] = host.run([host.smi]).text
        return [f"nvidia-smi gives no answer; {len(present)} cards on the PCI bus"]
    host.files["nvidia-smi.txt"] = host.run([host.smi, "-q"], host.timeout * 2).text
    host.files["topology.txt"] = host.run([host.smi, "topo", "-m"]).text
    apps = "--query-compute-apps=gpu_uuid,pid,process_name,used_memory"
    host.files["gpu-processes.csv"] = host.run([host.smi, apps, "--format=csv"]).text
    host.files["lspci.txt"] = host.run(["lspci", "-nnkvv", "-d", "10de:"]).text
    result["uuids"] = {uuid: rows[-1]["pci.bus_id"] for uuid, rows in cards.items()}
    known = present or cards
    found = [f"{len(cards)} cards answer, {len(known)} on the PCI bus"]
    return found + [line for rows in cards.values() for line in judged(rows)] + unequal(cards)


def sampled(host: Host, seconds: float) -> dict[str, list[dict[str, str]]] | None:
    """The rows of each card over the time; null where nvidia-smi does not answer."""
    cards: dict[str, list[dict[str, str]]] = {}
    query = [host.smi, "--query-gpu=" + ",".join(GPU_FIELDS), "--format=csv,noheader,nounits"]
    text, started = "", time.monotonic()
    while True:
        answer = host.run(query)
        if answer.rc != 0:
            break
        text += answer.stdout
        for line in answer.stdout.splitlines():
            cells = [cell.strip() for cell in line.split(",")]
            row = dict(zip(GPU_FIELDS, cells))  # noqa: B905 - strict= is newer than Python 3.8
            cards.setdefault(row.get("uuid", ""), []).append(row)
        if time.monotonic() - started >= seconds:
            break
        time.sleep(min(1.0, seconds))
    host.files["cards.csv"] = ",".join(GPU_FIELDS) + "\n" + text
    return cards or None


def judged(rows: list[dict[str, str]]) -> list[str]:
    """One line for a card: under load what it reached, and what slowed it down."""
    busy = [row for row in rows if number(row, "utilization.gpu") >= BUSY_PERCENT]
    last = rows[-1]
    reasons = sorted({reason for row in rows for reason in slowdowns(row)})
    hottest = max(number(row, "temperature.gpu") for row in rows)
    text = f"GPU {last['index']}: up to {hottest:.0f} C, cap {number(last, 'power.limit'):.0f} W"
    if not busy:
        text += ", idle (nothing can be said about its speed under load)"
    else:
        clock = sum(number(row, "clocks.sm") for row in busy) / len(busy)
        power = max(number(row, "power.draw") for row in busy)
        text += f", {clock:.0f} of {number(last, 'clocks.max.sm'):.0f} MHz, {power:.0f} W at work"
    return [text + (f"; slowed by {', '.join(reasons)}" if reasons else "")]


def slowdowns(row: dict[str, str]) -> list[str]:
    try:
        bits = int(row.get("clocks_event_reasons.active", "0"), 16)
    except ValueError:
        return []
    return [name for bit, name in REASONS.items() if bits & bit]


def unequal(cards: dict[str, list[dict[str, str]]]) -> list[str]:
    caps = sorted({number(rows[-1], "power.limit") for rows in cards.values()})
    shown = ", ".join(f"{cap:.0f} W" for cap in caps)
    return [f"power caps differ: {shown}"] if len(caps) > 1 else []


def number(row: dict[str, str], name: str) -> float:
    try:
        return float(row.get(name, ""))
    except ValueError:
        return 0.0


def containers(host: Host, arguments: argparse.Namespace, result: dict[str, Any]) -> list[str]:
    """States and logs of the containers of ours, and which of them use a card that is gone or faulty."""
    ours, error = host.containers()
    if error:
        return [error]
    host.files["containers.json"] = json.dumps(ours, indent=1) + "\n"
    for one in ours:
        answer = host.docker("logs", "--timestamps", "--tail", str(arguments.lines), one["name"])
        host.files[f"logs/{one['name']}.txt"] = answer.stdout + answer.stderr
    result["containers"] = ours
    result["affected"] = affected(ours, result)
    found = [f"{one['name']}: {said(one)}" for one in ours]
    found += [f"{name} uses a card that is gone or faulty" for name in result["affected"]]
    return found or ["no container of ours"]


def said(one: dict[str, Any]) -> str:
    if one["state"] in ("exited", "dead"):
        return f"{ended(one)} at {one['finished'][:19]}"
    health = f", {one['health']}" if one["health"] else ""
    again = f", restarted {one['restarts']} times" if one["restarts"] else ""
    return f"{one['state']}{health} since {one['started'][:19]}{again}"


def affected(ours: list[dict[str, Any]], result: dict[str, Any]) -> list[str]:
    """Running containers whose card reported a hardware fault or does not answer any more."""
    answering = result.get("uuids")
    faulty = {place(bus) for bus in result.get("fatal_buses", [])}
    bad = {uuid for uuid, bus in (answering or driver_cards()).items() if place(bus) in faulty}
    names = []
    for one in ours:
        gone = answering is not None and any(uuid not in answering for uuid in one["gpus"])
        if one["state"] == "running" and one["gpus"] and (gone or bad & set(one["gpus"])):
            names.append(one["name"])
    return names


def place(bus: str) -> tuple[int, str, str] | None:
    """One form for the several ways in which a PCI address is written."""
    match = BUS.search(bus)
    return (int(match.group(1), 16), match.group(2).lower(), match.group(3).lower()) if match else None


def driver_cards() -> dict[str, str]:
    """UUIDs and addresses from the driver itself, for when nvidia-smi hangs."""
    found = {}
    for file in Path("/proc/driver/nvidia/gpus").glob("*/information"):
        text = file.read_text(encoding="utf-8", errors="replace")
        match = re.search(r"GPU UUID:\s*(GPU-[0-9a-f-]+)", text)
        if match:
            found[match.group(1)] = file.parent.name
    return found


def nvidia_devices() -> list[str]:
    """Addresses of NVIDIA's display and 3D controllers on the bus."""
    found = []
    for folder in sorted(Path("/sys/bus/pci/devices").glob("*")):
        try:
            vendor, kind = (folder / "vendor").read_text().strip(), (folder / "class").read_text().strip()
        except OSError:
            continue
        if vendor == "0x10de" and kind.startswith("0x03"):
            found.append(folder.name)
    return found


def processes(host: Host, arguments: argparse.Namespace, result: dict[str, Any]) -> list[str]:
    """States of processes, without their arguments: who waits in the kernel, who is dead and not buried."""
    answer = host.run(["ps", "-eo", "pid,ppid,stat,etimes,pcpu,rss,nlwp,wchan:32,comm", "--sort=-pcpu"])
    host.files["processes.txt"] = answer.text
    host.files["memory.txt"] = host.run(["free", "-m"]).text
    rows = [line.split(None, 8) for line in answer.stdout.splitlines()[1:]]
    stuck = [
        row for row in rows if len(row) == 9 and row[2].startswith("D") and not row[8].startswith("kworker")
    ]
    dead = [row for row in rows if len(row) == 9 and row[2].startswith("Z")]
    found = [f"process {row[0]} ({row[8]}) waits in the kernel in {row[7]}" for row in stuck[:10]]
    found += [
        f"process {row[0]} ({row[8]}) has ended but its parent {row[1]} has not noticed" for row in dead[:10]
    ]
    return found or [f"{len(rows)} processes, none stuck in the kernel"]


def services(host: Host, arguments: argparse.Namespace, result: dict[str, Any]) -> list[str]:
    """What the running services say: ready or not, accept length from counters, and in what they differ."""
    ours, error = host.containers()
    running = [one for one in ours if one["state"] == "running" and one["url"]]
    if error or not running:
        return [error or "no running container of ours that can be asked"]
    before = {one["name"]: counters(fetched(f"{one['url']}/metrics")[1]) for one in running}
    time.sleep(arguments.seconds)
    found, settings = [], {}
    for one in running:
        name, url = one["name"], one["url"]
        ready, why = readiness(url)
        code, text = fetched(f"{url}/metrics")
        kept = [line for line in text.splitlines() if METRICS.match(line)] if code == 200 else []
        host.files[f"services/{name}.metrics.txt"] = "\n".join(kept) + "\n"
        found.append(f"{name}: {'ready' if ready == 200 else f'not ready ({ready or why})'}")
        found += [f"{name}: {line}" for line in speeds(before[name], counters(text), arguments.seconds)]
        code, text = fetched(f"{url}/server_info")
        if code == 200:
            settings[name] = allowed(text)
        else:
            found.append(f"{name}: /server_info answers {code or text}: its settings are not compared")
    host.files["services/settings.json"] = json.dumps(settings, indent=1, sort_keys=True) + "\n"
    return found + differences(settings)


def counters(text: str) -> dict[str, float]:
    """Sums over labels of the counters that matter here."""
    sums: dict[str, float] = {}
    for line in text.splitlines():
        match = SAMPLE.match(line)
        if match and METRICS.match(match.group(1)):
            sums[match.group(1)] = sums.get(match.group(1), 0.0) + float(match.group(3))
    return sums


def speeds(before: dict[str, float], after: dict[str, float], seconds: float) -> list[str]:
    """Accept length, and whether the forked path runs, from counters: never from the server's own average."""
    tokens, steps = "sglang:generation_tokens_total", "sglang:spec_verify_calls_total"
    if not after:
        return ["no metrics: was it started with --enable-metrics?"]
    lines = []
    for what, start in (("since its start", {}), (f"over {seconds:g} s", before)):
        made, verified = (after.get(key, 0.0) - start.get(key, 0.0) for key in (tokens, steps))
        if verified > 0:
            counted = f"{made:.0f} tokens in {verified:.0f} verify steps"
            lines.append(f"accept length {made / verified:.2f} {what} ({counted})")
    if not lines:
        lines.append(f"{after.get(tokens, 0.0):.0f} tokens and no verify step: it drafts nothing, or is new")
    asked, forked = after.get("ddtree_requests_total", 0.0), after.get("ddtree_tree_kernel_requests_total")
    if forked is not None and forked < asked:
        lines.append(
            f"the forked kernels ran for {forked:.0f} of {asked:.0f} tree steps: OUTPUT MAY BE WRONG"
        )
    below = after.get("ddtree_below_spine_total", after.get("ddtree_steps_below_spine_total", 0.0))
    if below:
        lines.append(f"{below:.0f} steps accepted less than their own chain (0 with spine-first)")
    return lines


def allowed(text: str) -> dict[str, Any]:
    try:
        info = json.loads(text)
    except ValueError:
        return {}
    block = info.get("ddtree") if isinstance(info.get("ddtree"), dict) else {}
    values = {name: info.get(name) for name in SERVER_INFO}
    values.update({f"ddtree.{name}": block.get(name) for name in DDTREE_INFO})
    return {name: value for name, value in values.items() if isinstance(value, (str, int, float, bool))}


def differences(settings: dict[str, dict[str, Any]]) -> list[str]:
    """Settings in which the services differ although their arms do not ask for it."""
    names = sorted({name for values in settings.values() for name in values} - OF_THE_ARM)
    lines = []
    for name in names:
        seen = {service: values.get(name) for service, values in settings.items()}
        if len({repr(value) for value in seen.values()}) > 1:
            shown = ", ".join(f"{service} {value}" for service, value in sorted(seen.items()))
            lines.append(f"settings differ: {name}: {shown}")
    return lines


def disk(host: Host, arguments: argparse.Namespace, result: dict[str, Any]) -> list[str]:
    """How full the disks are, and what of ours is on them."""
    host.files["df.txt"] = host.run(["df", "-hT"]).text + host.run(["df", "-hi"]).text
    host.files["docker-df.txt"] = host.docker("system", "df").text
    root = host.docker("info", "--format", "{{.DockerRootDir}}").stdout.strip()
    found = []
    for path in [*arguments.path, *([root] if root else [])]:
        parent = Path(path)
        while not parent.exists():
            parent = parent.parent
        space, nodes = shutil.disk_usage(str(parent)), os.statvfs(str(parent))
        inodes = f", {100 * nodes.f_favail // nodes.f_files} % of inodes" if nodes.f_files else ""
        used = host.run(["du", "-sxm", path], host.timeout * 4).stdout.split()
        held = f", holds {int(used[0]) / 1024:.1f} GiB" if used else ""
        found.append(f"{path}: {space.free / 2**30:.1f} GiB free{inodes}{held}")
    return found


TOPICS = {
    "kernel": kernel,
    "gpus": gpus,
    "containers": containers,
    "processes": processes,
    "services": services,
    "disk": disk,
}


# --- what can go -----------------------------------------------------------------------------------------


def wasted(host: Host, arguments: argparse.Namespace) -> dict[str, Any]:
    """Untagged images and unused caches of ours, and old logs and broken-off downloads.

    Nothing that a container uses, running or stopped: the one kept for a rollback needs its image and cache.
    """
    images, problem = unused_images(host)
    volumes = host.docker(
        "volume", "ls", "--quiet", "--filter", "dangling=true", "--filter", f"name={host.cluster}-jit-"
    )
    caches = [name for name in volumes.stdout.split() if name.startswith(f"{host.cluster}-jit-")]
    old = time.time() - arguments.days * 86400
    logs = [file for file in sorted(Path(arguments.logs).rglob("*")) if is_old_log(file, old)]
    parts = [file for file in sorted(Path(arguments.models).rglob("*.incomplete")) if is_old(file, old)]
    sizes = {str(file): file.stat().st_size for file in [*logs, *parts]}
    plan = [f"remove the untagged image {one['id'][:19]} ({one['size'] / MIB:.0f} MiB)" for one in images]
    plan += [f"remove the unused cache {name}" for name in caches]
    plan += [f"delete {file} ({size / MIB:.1f} MiB)" for file, size in sizes.items()]
    return {
        "images": [one["id"] for one in images],
        "volumes": caches,
        "files": list(sizes),
        "plan": plan,
        "found": [problem] if problem else [],
    }


def unused_images(host: Host) -> tuple[list[dict[str, Any]], str]:
    label = ["--filter", "dangling=true", "--filter", "label=ddtree.context-hash"]
    listing = host.docker("images", "--quiet", "--no-trunc", *label)
    if listing.rc != 0:  # docker does not start on a full disk: files can still go
        return [], f"docker: {(listing.stderr or 'no answer').strip()[-300:]}"
    used = host.docker("ps", "--all", "--quiet", "--no-trunc").stdout.split()
    held = set(host.docker("inspect", "--format", "{{.Image}}", *used).stdout.split()) if used else set()
    found = []
    for one in sorted(set(listing.stdout.split()) - held):
        size = host.docker("image", "inspect", "--format", "{{.Size}}", one).stdout.strip()
        found.append({"id": one, "size": int(size or 0)})
    return found, ""


def is_old_log(file: Path, before: float) -> bool:
    return re.search(r"\.log(\.\d+)?(\.gz)?$", file.name) is not None and is_old(file, before)


def is_old(file: Path, before: float) -> bool:
    try:
        return file.is_file() and not file.is_symlink() and file.stat().st_mtime < before
    except OSError:
        return False


# --- what is left ----------------------------------------------------------------------------------------


def remaining(host: Host, arguments: argparse.Namespace) -> dict[str, Any]:
    """Everything of ours on the host, and the reason for leaving it where one is seen."""
    ours, problem = host.containers()
    running = [one["name"] for one in ours if one["state"] not in ("exited", "created", "dead")]
    others = sorted(other_clusters(host))
    folders, refused = our_folders(arguments)
    error = ""
    if problem and host.docker("--version").rc == 0:
        error = f"whether services run cannot be said ({problem})"
    elif running:
        error = f"services still run: {', '.join(running)}: `ddtree deploy down` first"
    elif others:
        error = f"the host also serves {', '.join(others)}, which needs what would be removed"
    elif refused:
        error = refused
    found = {
        "containers": [one["name"] for one in ours],
        "monitoring": lines_of(
            host, "ps", "--all", "--filter", "label=ddtree.monitoring", "--format", "{{.Names}}"
        ),
        "images": our_images(host),
        "volumes": our_volumes(host),
        "files": [file for file in arguments.file if Path(arguments.root + file).exists()],
        "folders": folders,
    }
    plan = [f"remove the container {name}" for name in found["containers"] + found["monitoring"]]
    plan += [f"remove the image {name}" for name in found["images"]]
    plan += [f"remove the volume {name}" for name in found["volumes"]]
    plan += [f"delete {path}" for path in found["files"] + found["folders"]]
    return {**found, "plan": plan, "found": [problem] if problem else [], "refused": error}


def lines_of(host: Host, *argv: str) -> list[str]:
    return sorted(set(host.docker(*argv).stdout.split()))


def other_clusters(host: Host) -> set[str]:
    template = '{{.Label "ddtree.cluster"}}'
    names = lines_of(host, "ps", "--all", "--filter", "label=ddtree.cluster", "--format", template)
    return set(names) - {host.cluster}


def our_images(host: Host) -> list[str]:
    """Ids of the images that were built for the cluster: by label where there is no tag any more."""
    tagged = lines_of(
        host, "images", "--quiet", "--no-trunc", "--filter", f"reference=ddtree/{host.cluster}-*"
    )
    untagged = ["--filter", "dangling=true", "--filter", "label=ddtree.context-hash"]
    return sorted({*tagged, *lines_of(host, "images", "--quiet", "--no-trunc", *untagged)})


def our_volumes(host: Host) -> list[str]:
    names = lines_of(host, "volume", "ls", "--quiet")
    monitoring = {"ddtree-prometheus", "ddtree-grafana"}
    return [name for name in names if name.startswith(f"{host.cluster}-jit-") or name in monitoring]


def our_folders(arguments: argparse.Namespace) -> tuple[list[str], str]:
    """What is in our folders, the models only when asked for; a folder near the root is somebody else's."""
    models = Path(arguments.models)
    wanted = [Path(arguments.logs), Path(arguments.state)]
    wanted += [models] if arguments.weights else []
    found = []
    for folder in wanted:
        if len(folder.parts) < 3:
            return [], f"{folder}: too near the root to be deleted by a machine; do it by hand"
        if arguments.weights or (folder != models and folder not in models.parents):
            found += [folder] if folder.exists() else []
        elif folder != models and folder.is_dir():
            kept = {models, *models.parents}
            found += [entry for entry in sorted(folder.iterdir()) if entry not in kept]
    outermost = [one for one in found if not any(other in one.parents for other in found)]
    return list(dict.fromkeys(map(str, outermost))), ""


# --- shared ----------------------------------------------------------------------------------------------


def readiness(url: str) -> tuple[int, str]:
    """Of an engine or, which has another name for it, a gateway."""
    code, text = fetched(f"{url}/ready")
    return fetched(f"{url}/readiness") if code == 404 else (code, text)


def fetched(url: str) -> tuple[int, str]:
    """Status and text of an answer; 0 and the reason where there is none. No proxy stands between."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=10) as answer:
            return int(answer.status), answer.read(20 * MIB).decode("utf-8", "replace")
    except urllib.error.HTTPError as error:
        return error.code, ""
    except (OSError, ValueError) as error:
        return 0, f"no answer ({getattr(error, 'reason', error)})"


def redact(text: str) -> str:
    for pattern in SECRETS:
        text = pattern.sub(r"\1[redacted]", text)
    return text


if __name__ == "__main__":
    sys.exit(main())
