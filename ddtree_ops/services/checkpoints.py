"""Where the models are: folders, the shipped pair, and why a name cannot be used as it stands."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
from pathlib import Path

from ddtree_ops.errors import BadEnvironment, BadInput

HUB_ID = re.compile(r"^[A-Za-z0-9][\w.-]*/[\w.-]+$")
HUB_TIMEOUT_S = 10.0


def pair_path() -> Path:
    """The folder of the shipped pair (`target/`, `drafter/`, `prompts.jsonl`), found without importing torch.

    Raises BadEnvironment when the engine package or its data is not installed.
    """
    spec = importlib.util.find_spec("ddtree_engine")
    roots = list(spec.submodule_search_locations or []) if spec else []
    for root in roots:
        pair = Path(root) / "reference" / "pair"
        if pair.is_dir():
            return pair
    raise BadEnvironment(
        "the shipped model pair is not installed",
        remedy="install from a checkout with `make setup`, or name your own: --model DIR --drafter DIR",
    )


def find_checkpoint(name: Path, *, what: str) -> Path:
    """The folder of a checkpoint given as a folder or as a Hub id that was downloaded before.

    what  the option's or key's name, for the message
    Raises BadInput for a missing folder, a Hub id that is not on this machine, and a gated or unknown
    repository.
    """
    if name.is_dir():
        if not (name / "config.json").is_file():
            raise BadInput(f"{what}: {name} has no config.json: not a checkpoint folder")
        return name
    if name.exists():
        raise BadInput(f"{what}: {name} is a file; a checkpoint is a folder with config.json and safetensors")
    if HUB_ID.match(str(name)):
        return _cached_snapshot(str(name)) or _refuse_hub_id(str(name), what)
    raise BadInput(f"{what}: no such folder: {name}")


def checkpoint_sha256(folder: Path) -> str:
    """sha256 (hex) over config.json and the weight files in name order, as the engine reports it.

    Each file counts as its name, a NUL and its bytes. Raises BadInput for a folder without weights.
    """
    digest = hashlib.sha256()
    for path in [folder / "config.json", *_shards(folder)]:
        digest.update(path.name.encode() + b"\0")
        try:
            with path.open("rb") as file:
                while block := file.read(1 << 20):
                    digest.update(block)
        except OSError as error:
            raise BadInput(f"{path}: cannot be read ({error.strerror})") from error
    return digest.hexdigest()


def _shards(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        if not (folder / "model.safetensors").is_file():
            raise BadInput(f"{folder}: no model.safetensors and no {index.name}: not a checkpoint folder")
        return [folder / "model.safetensors"]
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise BadInput(f"{index}: not a safetensors index ({error!r})") from error
    return [folder / name for name in names]


def _cached_snapshot(repo: str) -> Path | None:
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    hub = Path(os.environ.get("HF_HUB_CACHE") or home / "hub")
    base = hub / f"models--{repo.replace('/', '--')}"
    try:
        commit = (base / "refs" / "main").read_text(encoding="utf-8").strip()
    except OSError:
        return None
    snapshot = base / "snapshots" / commit
    return snapshot if (snapshot / "config.json").is_file() else None


def _refuse_hub_id(repo: str, what: str) -> Path:
    """Say why a Hub id cannot be used now; weights are never downloaded behind the user's back."""
    import httpx

    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")
    token = os.environ.get("HF_TOKEN")
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    try:
        answer = httpx.head(
            f"{endpoint}/{repo}/resolve/main/config.json", headers=headers, timeout=HUB_TIMEOUT_S
        )
    except httpx.HTTPError:
        raise BadInput(
            f"{what}: {repo} is no folder, is not in the local Hub cache, and the Hub cannot be reached",
            remedy=f"download it elsewhere (`hf download {repo}`) and give its folder",
        ) from None
    code = answer.headers.get("X-Error-Code", "")
    if answer.status_code in {401, 403} and code != "RepoNotFound":
        raise BadInput(
            f"{what}: {repo} is gated: the Hub refuses it ({answer.status_code})",
            remedy=f"accept its licence at {endpoint}/{repo}, set HF_TOKEN, then `hf download {repo}`",
        )
    if answer.status_code in {401, 404}:
        raise BadInput(f"{what}: the Hub has no repository {repo} that this token may see")
    raise BadInput(
        f"{what}: {repo} is not on this machine", remedy=f"`hf download {repo}`, then run the command again"
    )
