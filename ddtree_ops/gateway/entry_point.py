"""Start `smg launch` with its keys from the environment; stands alone, so that the image needs only smg.

    DDTREE_API_KEY=... python3 entry_point.py --host 127.0.0.1 --port 30080 --worker-urls http://127.0.0.1:30001

smg 1.13.0 takes keys as options only, which everyone who lists processes can read. Here they reach it inside
the process. `DDTREE_API_KEY` is what clients must send and what the gateway sends to replicas.

smg's control plane (`/workers`: which replicas there are) is closed with a key that nobody learns: the
replicas are those of cluster.yaml. Left alone it would be open to every client, and without an API key to
everyone.
"""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Sequence

VARIABLE = "DDTREE_API_KEY"
VERSION = "1.13.0"


def main(arguments: Sequence[str]) -> int:
    """Serve until SIGTERM; 3 where smg is missing or is not the version that this was made for."""
    try:
        from smg.launch_router import launch_router, parse_router_args
        from smg.smg_rs import get_version_string
    except ImportError as error:
        print(f"error: smg cannot be imported ({error})", file=sys.stderr)
        return 3
    found = str(get_version_string())
    if VERSION not in found.split():
        print(f"error: found {found!r}, allowed: smg {VERSION}", file=sys.stderr)
        return 3
    options = parse_router_args(list(arguments))
    options.api_key = os.environ.pop(VARIABLE, "") or None
    options.control_plane_api_keys = [("closed", "closed", secrets.token_urlsafe(32), "admin")]
    launch_router(options)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
