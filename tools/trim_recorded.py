"""Trim a real server's recorded answers to what tests compare: tests/fixtures/sglang-0.5.23.

    python3 tools/trim_recorded.py OUT/ARM.fixtures.json OUT/ARM.refusals.json tests/fixtures/sglang-0.5.23

Of `/server_info` the storable arguments and our blocks stay; of histograms the last bucket.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

from ddtree_ops.redact import SERVER_INFO_FIELDS

KEPT = SERVER_INFO_FIELDS | {
    "model_path", "tokenizer_path", "max_queued_requests", "speculative_draft_model_path", "ddtree",
    "internal_states",
}  # fmt: skip
FOLDER = re.compile(r"/[\w./-]*/(target|drafter)\b")
RANDOM_ID = re.compile(r"\b[0-9a-f]{32}\b")
DROPPED = re.compile(
    r"sglang:(routing_key|dp_attention|per_stage|num_decode_|num_prefill_|prealloc|scheduler_)"
)
PID = re.compile(r'pid="\d+"')


def main(answers: Path, refusals: Path, out: Path) -> None:
    found = json.loads(answers.read_text())
    info = {key: value for key, value in found["server_info"].items() if key in KEPT}
    info["internal_states"] = [{"ddtree": state["ddtree"]} for state in info["internal_states"]]
    rest = {key: value for key, value in found.items() if key not in ("metrics", "server_info")}
    rest["model_info"].pop("embedding", None)
    rest["refusals"] = json.loads(refusals.read_text())
    out.mkdir(parents=True, exist_ok=True)
    for name, value in {"server_info": info, "answers": rest}.items():
        (out / f"{name}.json").write_text(clean(json.dumps(value, indent=1)) + "\n")
    (out / "metrics.txt").write_text(clean(metrics(found["metrics"])))


def metrics(text: str) -> str:
    """The families that concern one replica without disaggregation, without help and inner buckets."""
    lines = [line for line in text.splitlines() if not line.startswith("# HELP") and not DROPPED.search(line)]
    return "\n".join(line for line in lines if "_bucket{" not in line or 'le="+Inf"' in line) + "\n"


def clean(text: str) -> str:
    return PID.sub('pid="1"', RANDOM_ID.sub("0" * 32, FOLDER.sub(r"/models/\1", text)))


if __name__ == "__main__":
    main(*(Path(argument) for argument in sys.argv[1:4]))
