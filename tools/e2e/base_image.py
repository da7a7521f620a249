"""The base of the CPU engine's image where no registry can be reached: a Debian with Python 3.11, as a tar.

    python tools/e2e/base_image.py --folder .cache/e2e [--load unix:///run/docker.sock]

prints the path of the tar, or with --load the id of the image that it became on that engine. As a library:
`Engine.import_rootfs(base_image(folder).open("rb"), BASE_TAG)`. In cluster.yaml: `image: {base: BASE_TAG}`.
Needs root and debootstrap once; both trees and tar are cached in the folder.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from rootfs import RootfsError, Say, debootstrap_tree, pack

BASE_TAG = "ddtree-base:bookworm"


def base_image(folder: Path, say: Say = lambda text: None) -> Path:
    """The tar of the root file system. Raises RootfsError."""
    tree = debootstrap_tree(folder, say=say)
    say(f"tar of {tree.name}")
    return pack(tree)


def load(archive: Path, socket: str) -> str:
    """Make it an image of the engine behind a Unix socket and return its id."""
    from ddtree_ops.containers.connection import HostLink, SshTarget

    target = SshTarget("localhost", local=True, docker_socket=socket.removeprefix("unix://"))
    with HostLink("here", target) as link, archive.open("rb") as tar:
        return link.engine().import_rootfs(tar, BASE_TAG)


def main() -> int:
    parser = argparse.ArgumentParser(description="Make the base of the CPU engine's image by debootstrap.")
    parser.add_argument("--folder", type=Path, required=True, help="where the tree and the tar are cached")
    parser.add_argument("--load", metavar="SOCKET", help="import it into the engine behind this socket")
    arguments = parser.parse_args()
    try:
        archive = base_image(arguments.folder, say=lambda text: print(f"base: {text}", file=sys.stderr))
    except RootfsError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(load(archive, arguments.load) if arguments.load else archive)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
