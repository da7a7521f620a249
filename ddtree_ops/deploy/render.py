"""From a replica to the container that runs it: argv, environment, mounts; and what its server must then say.

Flags are SGLang 0.5.23's. What is not asked for in cluster.yaml is chosen so that arms can be compared: the
same backends, seed, batch sizes with graphs and prefill chunks for all, no autotuning (it changes greedy
output from one start to the next). Pure but for the calibration file, which is read for its hash.
"""

from __future__ import annotations

import hashlib
import ipaddress
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from ddtree_ops.containers.spec import ContainerSpec, Healthcheck, Mount
from ddtree_ops.deploy.layout import Card, Replica
from ddtree_ops.errors import BadInput
from ddtree_ops.memory.planner import PREFILL_CHUNK, SLOTS_PER_REQUEST
from ddtree_ops.schemas.arms import Arm, Builder
from ddtree_ops.schemas.cluster import Checkpoint, Cluster, EngineKind, Scratch, Service
from ddtree_ops.services.argv import ENGINE_MODULE, THREAD_VARIABLES, serve_argv

SGLANG_MODULE = "ddtree_engine.sglang_plugin.serve"
CONFIG_VARIABLE = "SGLANG_DDTREE_CONFIG"
KEY_VARIABLE = "DDTREE_API_KEY"
#: Whatever an image starts with, ours is `python3` of its PATH.
ENTRYPOINT = ("/usr/bin/env",)
#: Inside every container.
MODELS, JIT = "/models", "/var/cache/ddtree"
DEFAULT_TOPK = 16
#: Failed checks count from the first good one on, or after this; readiness has a deadline of its own.
START_PERIOD_S = 3600.0
#: Batch sizes up to this have a graph each, larger ones every so many.
SMALL_BATCHES = 8
MODES = {Arm.SHADOW: "shadow", Arm.DDTREE: "tree", Arm.UNSAFE: "unsafe"}
#: NVLink multicast stays off: what NCCL, torch's symmetric memory (SGLang's own all-reduce stands on it) and
#: NVSHMEM have of it.
WITHOUT_MULTICAST = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
}


@dataclass(frozen=True)
class Surroundings:
    """What a container depends on besides cluster.yaml.

    image      id of the engine image on the replica's host
    folder     that of cluster.yaml
    revisions  commits by repository, for branches that were resolved
    cards      of the replica's host, for the way between GPUs
    """

    image: str
    folder: Path
    revisions: Mapping[str, str] = field(default_factory=dict)
    cards: Sequence[Card] = ()


def render(cluster: Cluster, replica: Replica, around: Surroundings) -> ContainerSpec:
    """The container of a replica. Raises BadInput for what this engine cannot do."""
    make = _reference if cluster.engine is EngineKind.REFERENCE else _sglang
    service = replica.service
    argv, env, mounts = make(cluster, replica, around)
    return ContainerSpec(
        name=replica.container(cluster.name),
        cluster=cluster.name,
        service=service.name,
        replica=replica.index,
        image=around.image,
        entrypoint=ENTRYPOINT,
        argv=(*argv, *service.extra_args),
        env={**env, **service.env},
        secret_env=(KEY_VARIABLE,) if cluster.secrets.api_key is not None else (),
        mounts=tuple(mounts),
        gpus=replica.gpus,
        shm_gib=service.shm_gib,
        ulimits=_ulimits(cluster, service),
        healthcheck=_healthcheck(replica),
        stop_timeout_s=service.stop_timeout_s,
    )


def expected_block(cluster: Cluster, service: Service) -> dict[str, Any]:
    """What `/server_info` must say in its `ddtree` block, which stock SGLang arms do not have."""
    if cluster.engine is EngineKind.SGLANG and service.arm not in MODES:
        return {}
    found: dict[str, Any] = {"arm": service.arm.value, "engine": cluster.engine.value}
    if service.arm.takes_budget:
        found |= {"budget": service.budget, "topk": _topk(service), "builder": _builder(service).value}
        found["allow_hybrid_unsafe"] = service.allow_hybrid_unsafe
    return found


def expected_arguments(cluster: Cluster, service: Service) -> dict[str, Any]:
    """What `/server_info` must say at its top level."""
    found: dict[str, Any] = {"max_running_requests": service.max_running_requests}
    if cluster.engine is EngineKind.REFERENCE:
        return found
    found |= {
        "context_length": service.context_length,
        "mem_fraction_static": service.mem_fraction,
        "tp_size": service.tp,
        "attention_backend": service.attention_backend,
    }
    if service.arm in {Arm.AR, Arm.DFLASH}:
        found["speculative_algorithm"] = "DFLASH" if service.arm is Arm.DFLASH else None
    if service.arm in {Arm.DDTREE, Arm.UNSAFE}:
        found["speculative_num_draft_tokens"] = service.width
    return found


def shipped_files(cluster: Cluster, folder: Path) -> dict[str, str]:
    """Files that services need on their hosts, name -> text; the name changes with the text.

    Raises BadInput for one that cannot be read.
    """
    found = {}
    for service in cluster.services:
        if service.calibration is not None:
            text = _calibration_text(service, folder)
            found[_calibration_name(text)] = text
    return found


def loopback(address: str) -> str:
    """Where a server that binds to the address is asked from its own host."""
    found = ipaddress.ip_address(address)
    if not found.is_unspecified:
        return str(found)
    return "127.0.0.1" if found.version == 4 else "::1"


def _reference(
    cluster: Cluster, replica: Replica, around: Surroundings
) -> tuple[list[str], dict[str, str], list[Mount]]:
    service = replica.service
    model, mounts = _folder(cluster.model, "model", cluster, around)
    drafter, more = (
        (None, []) if service.arm is Arm.AR else _folder(cluster.drafter, "drafter", cluster, around)
    )
    mounts += [mount for mount in more if mount not in mounts]
    calibration, more = _calibration(cluster, service, around)
    argv = serve_argv(
        service.arm,
        command=["python3", "-m", ENGINE_MODULE],
        budget=service.budget,
        topk=_topk(service) if service.arm.takes_budget else None,
        builder=_builder(service) if service.arm.takes_budget else None,
        calibration=calibration,
        model=model,
        drafter=drafter,
        max_running=service.max_running_requests,
        allow_hybrid_unsafe=service.allow_hybrid_unsafe,
    )
    argv += ["--host", service.bind, "--port", str(replica.port)]
    if (
        "context_length" in service.model_fields_set
    ):  # else the model's own, which is shorter than the default
        argv += ["--context-length", str(service.context_length)]
    return argv, {**dict.fromkeys(THREAD_VARIABLES, "1"), "PYTHONUNBUFFERED": "1"}, [*mounts, *more]


def _sglang(
    cluster: Cluster, replica: Replica, around: Surroundings
) -> tuple[list[str], dict[str, str], list[Mount]]:
    service = replica.service
    assert cluster.model is not None
    model, mounts = _checkpoint(cluster.model, cluster, around, "--model-path", "--revision")
    calibration, more = _calibration(cluster, service, around)
    argv = ["python3", "-m", SGLANG_MODULE, *model, *_common(service, replica.port)]
    if service.arm is not Arm.AR:
        assert cluster.drafter is not None
        names = ("--speculative-draft-model-path", "--speculative-draft-model-revision")
        drafter, other = _checkpoint(cluster.drafter, cluster, around, *names)
        mounts += [mount for mount in other if mount not in mounts]
        argv += [*_speculative(service), *drafter]
    mounts += [*more, Mount(f"{cluster.name}-jit-{_short(around.image)}", JIT, read_only=False)]
    env = {
        "HF_HUB_CACHE": MODELS,
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "TRITON_CACHE_DIR": f"{JIT}/triton",
        "TORCHINDUCTOR_CACHE_DIR": f"{JIT}/inductor",
        "FLASHINFER_WORKSPACE_BASE": f"{JIT}/flashinfer",
        "SGLANG_CACHE_DIR": f"{JIT}/sglang",
        "CUDA_CACHE_PATH": f"{JIT}/cuda",
        "PYTHONUNBUFFERED": "1",
        **nccl_environment(replica, around.cards),
    }
    if service.arm in MODES:
        env[CONFIG_VARIABLE] = json.dumps(_plugin_config(service, calibration), sort_keys=True)
    return argv, env, mounts


def _common(service: Service, port: int) -> list[str]:
    options: dict[str, object] = {
        "--host": service.bind,
        "--port": port,
        "--tp-size": service.tp,
        "--context-length": service.context_length,
        "--max-running-requests": service.max_running_requests,
        "--mem-fraction-static": service.mem_fraction,
        "--mamba-ssm-dtype": service.ssm_dtype,
        "--max-mamba-cache-size": service.max_running_requests * SLOTS_PER_REQUEST,
        "--attention-backend": service.attention_backend,
        "--linear-attn-backend": "triton",
        "--chunked-prefill-size": PREFILL_CHUNK,
        "--random-seed": 0,
    }
    argv = [str(part) for pair in options.items() for part in pair]
    if service.tp > 1:
        # Else SGLang turns it on by itself for this model on some cards: multicast, another order of sums.
        argv.append("--enforce-disable-flashinfer-allreduce-fusion")
    return [
        *argv,
        "--cuda-graph-bs-decode",
        *map(str, graph_batches(service.max_running_requests)),
        "--disable-flashinfer-autotune",
        "--enable-metrics",
    ]


def graph_batches(running: int) -> list[int]:
    """Batch sizes with a CUDA graph: all small ones, then every eighth, and the largest."""
    large = range(2 * SMALL_BATCHES, running + 1, SMALL_BATCHES)
    return sorted({*range(1, min(running, SMALL_BATCHES) + 1), *large, running})


def _speculative(service: Service) -> list[str]:
    tree = service.arm in MODES
    backend = "triton" if service.attention_backend == "triton" else "flashinfer"
    argv = ["--speculative-algorithm", "DDTREE" if tree else "DFLASH"]
    argv += ["--speculative-draft-attention-backend", backend]
    if service.arm in {Arm.DDTREE, Arm.UNSAFE}:
        argv += ["--speculative-num-draft-tokens", str(service.width)]
    return argv


def _plugin_config(service: Service, calibration: Path | None) -> dict[str, Any]:
    found: dict[str, Any] = {
        "mode": MODES[service.arm],
        "budget": service.budget,
        "topk": _topk(service),
        "builder": _builder(service).value,
        "state": "wy" if service.scratch is Scratch.STASH else "snapshot",
    }
    if calibration is not None:
        found["calibration"] = str(calibration)
    if service.allow_hybrid_unsafe:
        found["allow_hybrid_unsafe"] = True
    return found


def nccl_environment(replica: Replica, cards: Sequence[Card]) -> dict[str, str]:
    """How the GPUs of a replica talk; nothing where it has one. `env` of the service goes over it.

    A level that is too high can deadlock over PCIe, so SYS is for GPUs of several NUMA nodes only.
    """
    if len(replica.gpus) < 2:
        return {}
    nodes = {card.numa for card in cards if card.uuid in replica.gpus}
    level = "SYS" if len(nodes) > 1 else "PHB"
    return {"NCCL_P2P_LEVEL": level, "NCCL_IB_DISABLE": "1", **WITHOUT_MULTICAST}


def _checkpoint(
    model: Checkpoint, cluster: Cluster, around: Surroundings, path_option: str, revision_option: str
) -> tuple[list[str], list[Mount]]:
    if model.path is not None:
        return [path_option, model.path], [Mount(model.path, model.path)]
    assert model.repo is not None
    revision = around.revisions.get(model.repo, model.revision)
    argv = [path_option, model.repo, revision_option, revision]
    return argv, [Mount(cluster.paths.models, MODELS)]


def _folder(
    model: Checkpoint | None, key: str, cluster: Cluster, around: Surroundings
) -> tuple[Path | None, list[Mount]]:
    """The folder of a checkpoint inside the container; null where the shipped pair serves."""
    if model is None:
        return None, []
    if model.path is not None:
        return Path(model.path), [Mount(model.path, model.path)]
    assert model.repo is not None
    revision = model.revision if model.pinned else around.revisions.get(model.repo)
    if revision is None:
        allowed = "a commit, since the CPU engine takes folders"
        raise BadInput.at(file=None, key=f"{key}.revision", found=model.revision, allowed=allowed)
    snapshot = PurePosixPath(MODELS) / f"models--{model.repo.replace('/', '--')}" / "snapshots" / revision
    return Path(snapshot), [Mount(cluster.paths.models, MODELS)]


def _calibration(cluster: Cluster, service: Service, around: Surroundings) -> tuple[Path | None, list[Mount]]:
    """Where the file lies, on the host and in the container alike."""
    if service.calibration is None:
        return None, []
    name = _calibration_name(_calibration_text(service, around.folder))
    path = f"{cluster.paths.state}/files/{name}"
    return Path(path), [Mount(path, path)]


def _calibration_name(text: str) -> str:
    return f"calibration-{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"


def _calibration_text(service: Service, folder: Path) -> str:
    assert service.calibration is not None
    file = folder / service.calibration.expanduser()
    try:
        text = file.read_text(encoding="utf-8")
        json.loads(text)
    except (OSError, ValueError) as error:
        key, found = f"services.{service.name}.calibration", f"{file} ({error})"
        raise BadInput.at(
            file=None, key=key, found=found, allowed="a file of `ddtree bench calibrate`"
        ) from error
    return text


def _topk(service: Service) -> int:
    return service.topk or DEFAULT_TOPK


def _builder(service: Service) -> Builder:
    return service.builder or Builder.BEST_FIRST


def _ulimits(cluster: Cluster, service: Service) -> dict[str, int]:
    """The CPU engine needs none, and an engine without CAP_SYS_RESOURCE may not raise them."""
    if cluster.engine is EngineKind.REFERENCE and "ulimits" not in service.model_fields_set:
        return {}
    limits = {"memlock": service.ulimits.memlock, "stack": service.ulimits.stack}
    return {name: value for name, value in limits.items() if value is not None}


def _healthcheck(replica: Replica) -> Healthcheck:
    """Asks `/ready`, which is open and costs nothing: SGLang's `/health` generates a token."""
    host = loopback(replica.service.bind)
    host = f"[{host}]" if ":" in host else host
    code = f"from urllib.request import urlopen; urlopen('http://{host}:{replica.port}/ready', timeout=4)"
    return Healthcheck(("python3", "-c", code), interval_s=30.0, start_period_s=START_PERIOD_S)


def _short(image: str) -> str:
    return image.removeprefix("sha256:")[:12]
