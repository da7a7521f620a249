"""Is the operator's own machine fit to deploy from and to measure from? `ddtree doctor`.

Everything is looked at for real: programs are started, ports are bound, files are read. Without a
cluster.yaml the checks of configuration, secrets and the Hub are left out.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ddtree_ops.config_file import load_config
from ddtree_ops.errors import BadInput
from ddtree_ops.hosts.checks import GIB, Finding, Status
from ddtree_ops.hosts.hub import Access, probe_revision
from ddtree_ops.hosts.secrets import resolve_secret
from ddtree_ops.schemas.cluster import Cluster, Secrets

COMMAND_TIMEOUT_S = 15.0
MIN_PYTHON = (3, 11)
MIN_FREE = 5 * GIB
#: Sockets of the load client at high concurrency, with room for the rest.
MIN_OPEN_FILES = 1024
QUICKSTART_PORTS = (30001, 30002, 30003)


@dataclass(frozen=True)
class Row:
    """What a check of this machine is about, for the documentation."""

    id: str
    wanted: str
    otherwise: str
    remedy: str


ROWS = {
    row.id: row
    for row in (
        Row(
            "operator.python",
            "Python 3.11 or newer",
            "fail",
            "use a newer Python: make setup PYTHON=python3.12",
        ),
        Row(
            "operator.disk",
            "5 GiB free here",
            "warn",
            "free space: results, reports and built images need it",
        ),
        Row("operator.open_files", "1024 open files allowed", "warn", "ulimit -n 4096 before sweeps"),
        Row(
            "operator.ports",
            "the asked ports free on loopback",
            "warn",
            "stop what listens there (ss -tlnp), or choose other ports",
        ),
        Row(
            "operator.engine",
            "the CPU engine's packages",
            "skip",
            "pip install 'ddtree[local]' for quickstart and serve local",
        ),
        Row(
            "operator.ansible",
            "ansible-core and ansible-runner beside this Python",
            "warn; fail with a cluster.yaml",
            "pip install 'ddtree[deploy]'",
        ),
        Row(
            "operator.ssh",
            "an OpenSSH client",
            "warn; fail with a cluster.yaml",
            "apt-get install openssh-client",
        ),
        Row(
            "operator.known_hosts",
            "a known_hosts file: host keys are always checked",
            "warn with a cluster.yaml",
            "connect once by hand and compare fingerprints, or set ssh.known_hosts",
        ),
        Row(
            "operator.docker",
            "a Docker engine that answers",
            "skip",
            "needed only where images are built or run on this machine",
        ),
        Row(
            "config.file",
            "a valid cluster.yaml",
            "fail",
            "mend the file; ddtree deploy init writes a fresh one",
        ),
        Row(
            "config.secrets",
            "every secret can be read: variable set, or file of mode 0600",
            "fail",
            "set the variable, or chmod 600 the file",
        ),
        Row(
            "config.pins",
            "image by digest, models by commit",
            "warn",
            "set image.digest and the revisions, or keep the lock file that deploy writes",
        ),
        Row(
            "hub.model",
            "the token may fetch the model's revision",
            "fail; skip offline",
            "accept its licence on the Hub and set secrets.hf_token",
        ),
        Row(
            "hub.drafter",
            "the token may fetch the drafter's revision (it is gated)",
            "fail; skip offline",
            "accept its licence on the Hub and set secrets.hf_token",
        ),
    )
}


def check_operator(
    *, cluster_file: Path | None = None, ports: tuple[int, ...] = QUICKSTART_PORTS, folder: Path | None = None
) -> list[Finding]:
    """Every check of this machine, and of a cluster.yaml if there is one."""
    deploys = cluster_file is not None
    findings = [
        _python(),
        _disk(folder or Path.cwd()),
        _open_files(),
        _ports(ports),
        _engine(),
        _ansible(deploys),
        _ssh(deploys),
    ]
    cluster = None
    if cluster_file is not None:
        try:
            cluster = load_config(cluster_file, Cluster)
            findings.append(_finding("config.file", Status.PASS, f"{len(cluster.services)} services"))
        except BadInput as error:
            findings.append(_finding("config.file", Status.FAIL, " ".join(error.message.split())))
    findings += [_known_hosts(cluster), _docker()]
    if cluster is not None and cluster_file is not None:
        findings += _cluster(cluster, cluster_file.parent)
    return findings


def _finding(id: str, status: Status, found: str) -> Finding:
    remedy = ROWS[id].remedy if status in {Status.WARN, Status.FAIL} else None
    return Finding(id, "this machine", status, found, remedy)


def _python() -> Finding:
    version = sys.version_info[:3]
    status = Status.PASS if version >= MIN_PYTHON else Status.FAIL
    return _finding("operator.python", status, ".".join(map(str, version)))


def _disk(folder: Path) -> Finding:
    free = shutil.disk_usage(folder).free
    status = Status.PASS if free >= MIN_FREE else Status.WARN
    return _finding("operator.disk", status, f"{free // GIB} GiB free in {folder}")


def _open_files() -> Finding:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = soft == resource.RLIM_INFINITY
    status = Status.PASS if unlimited or soft >= MIN_OPEN_FILES else Status.WARN
    return _finding("operator.open_files", status, "unlimited" if unlimited else str(soft))


def _ports(ports: tuple[int, ...]) -> Finding:
    taken = [port for port in ports if not _free(port)]
    if taken:
        return _finding("operator.ports", Status.WARN, f"{', '.join(map(str, taken))} in use")
    return _finding("operator.ports", Status.PASS, f"{', '.join(map(str, ports))} free")


def _free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _engine() -> Finding:
    version = _version("torch")
    if version is None:
        return _finding("operator.engine", Status.SKIP, "not installed: no quickstart, no serve local")
    return _finding("operator.engine", Status.PASS, f"torch {version}")


def _ansible(needed: bool) -> Finding:
    core, runner = _version("ansible-core"), _version("ansible-runner")
    program = Path(sys.executable).with_name("ansible-playbook")
    if core is None or runner is None or not program.exists():
        found = (
            "not installed" if core is None and runner is None else f"ansible-core {core}, runner {runner}"
        )
        return _finding("operator.ansible", Status.FAIL if needed else Status.WARN, found)
    return _finding("operator.ansible", Status.PASS, f"ansible-core {core}, ansible-runner {runner}")


def _ssh(needed: bool) -> Finding:
    answer = _run("ssh", "-V")
    if answer is None:
        return _finding("operator.ssh", Status.FAIL if needed else Status.WARN, "no ssh that answers")
    return _finding("operator.ssh", Status.PASS, answer.split(",")[0])


def _known_hosts(cluster: Cluster | None) -> Finding:
    given = cluster.ssh.known_hosts if cluster is not None else None
    file = (given or Path("~/.ssh/known_hosts")).expanduser()
    if file.is_file() and file.stat().st_size:
        count = sum(1 for line in file.read_text(errors="replace").splitlines() if line.strip())
        return _finding("operator.known_hosts", Status.PASS, f"{count} keys in {file}")
    status = Status.WARN if cluster is not None else Status.SKIP
    return _finding("operator.known_hosts", status, f"no keys in {file}")


def _docker() -> Finding:
    answer = _run("docker", "version", "--format", "{{.Server.Version}}")
    if answer is None or not re.match(r"\d", answer):
        return _finding("operator.docker", Status.SKIP, "no engine that answers")
    return _finding("operator.docker", Status.PASS, answer)


def _cluster(cluster: Cluster, folder: Path) -> Iterator[Finding]:
    problems, token = [], None
    for key in Secrets.model_fields:
        try:
            value = resolve_secret(getattr(cluster.secrets, key), key=f"secrets.{key}", folder=folder)
        except BadInput as error:
            problems.append(error.message)
        else:
            token = value if key == "hf_token" else token
    try:
        resolve_secret(cluster.ssh.become_password, key="ssh.become_password", folder=folder)
    except BadInput as error:
        problems.append(error.message)
    yield _finding(
        "config.secrets", Status.FAIL if problems else Status.PASS, "; ".join(problems) or "all readable"
    )
    yield _pins(cluster)
    for id, checkpoint in (("hub.model", cluster.model), ("hub.drafter", cluster.drafter)):
        if checkpoint is None or checkpoint.repo is None:
            yield _finding(id, Status.SKIP, "a folder on the hosts" if checkpoint else "not used")
            continue
        answer = probe_revision(checkpoint.repo, checkpoint.revision, token=token)
        status = {Access.OK: Status.PASS, Access.UNREACHABLE: Status.SKIP}.get(answer.access, Status.FAIL)
        yield _finding(id, status, f"{checkpoint.repo}@{checkpoint.revision}: {answer.detail}")


def _pins(cluster: Cluster) -> Finding:
    loose = ["image.digest"] if cluster.image.digest is None else []
    loose += [
        f"{key}.revision"
        for key, checkpoint in (("model", cluster.model), ("drafter", cluster.drafter))
        if checkpoint is not None and not checkpoint.pinned
    ]
    return _finding("config.pins", Status.WARN if loose else Status.PASS, ", ".join(loose) or "all pinned")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _run(*argv: str) -> str | None:
    """The first line that a program prints; null when it is missing, fails or hangs."""
    try:
        done = subprocess.run(
            argv,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=COMMAND_TIMEOUT_S,
            env={**os.environ, "LC_ALL": "C"},
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = (done.stdout + done.stderr).strip().splitlines()
    return lines[0] if done.returncode == 0 and lines else None
