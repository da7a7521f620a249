"""`python3 -c PROGRAM RANKS SECONDS`: an all-reduce over all GPUs that are visible, or death at the limit.

Runs inside an engine image, which has torch; nothing of ours is imported. Prints one JSON object.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time

#: 64 MiB of float32: enough to leave the path for small messages.
ELEMENTS = 1 << 24
RANK = "DDTREE_PROBE_RANK"


def main() -> int:
    ranks, seconds = int(sys.argv[1]), float(sys.argv[2])
    if RANK in os.environ:
        return _rank(int(os.environ[RANK]), ranks)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    program = sys.orig_argv[sys.orig_argv.index("-c") + 1]
    argv = [sys.executable, "-c", program, *sys.argv[1:]]
    base = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    started = [subprocess.Popen(argv, env={**base, RANK: str(rank)}) for rank in range(ranks)]
    timer = threading.Timer(seconds, _kill, [started])
    timer.start()
    codes = [one.wait() for one in started]
    timer.cancel()
    if any(codes):
        hung = all(code in (0, -9) for code in codes)
        print(f"all-reduce over {ranks} GPUs {'hung' if hung else 'failed'}: exit codes {codes}")
        return 1
    return 0


def _kill(started: list[subprocess.Popen[bytes]]) -> None:
    for one in started:
        one.kill()


def _rank(rank: int, ranks: int) -> int:
    import torch
    import torch.distributed as dist

    cuda = torch.cuda.is_available()
    if cuda and torch.cuda.device_count() < ranks:
        print(f"{torch.cuda.device_count()} GPUs are visible, {ranks} are needed")
        return 1
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo", rank=rank, world_size=ranks)
    peers = [
        torch.cuda.can_device_access_peer(rank, other) for other in range(ranks) if cuda and other != rank
    ]
    data = torch.full((ELEMENTS if cuda else 1024,), float(rank + 1), device=device)
    dist.all_reduce(data)
    expected = ranks * (ranks + 1) / 2
    right = bool((data == expected).all())
    began = time.perf_counter()
    for _ in range(5):
        dist.all_reduce(data)
    if cuda:
        torch.cuda.synchronize()
    took = (time.perf_counter() - began) / 5
    if rank == 0:
        speed = data.numel() * 4 / 1e9 / took
        print(json.dumps({"ranks": ranks, "right": right, "peer_access": all(peers), "gb_per_s": speed}))
    dist.destroy_process_group()
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
