"""An image's CUDA against the drivers that shall run it, before gigabytes are pulled.

A driver runs programs of its own CUDA version and of older ones. An image that is newer ends in error 804 at
every start: forward compatibility is not for these cards.
"""

from __future__ import annotations

from collections.abc import Mapping

from ddtree_ops.errors import BadEnvironment, BadInput

#: The branch of the driver from which on a CUDA version runs, for the remedy alone.
FIRST_BRANCH = {(12, 8): 570, (12, 9): 575, (13, 0): 580}


def require_cuda(image: str, drivers: Mapping[str, str | None]) -> None:
    """Raises BadEnvironment when a driver is too old for the image.

    image    the image's CUDA version, `13.0`: cluster.image.cuda
    drivers  by host, the newest CUDA version of its driver (`HostFacts.cuda`); null where it is not known:
             such a host is not held up
    """
    wanted = version(image)
    short = {host: cuda for host, cuda in drivers.items() if cuda is not None and version(cuda) < wanted}
    if not short:
        return
    found = ", ".join(f"{host} has a driver for CUDA up to {cuda}" for host, cuda in sorted(short.items()))
    raise BadEnvironment(
        f"the image needs CUDA {image}, {found}: it would end in error 804",
        remedy=f"{_newer(wanted)}, or set image.base and image.cuda to one of CUDA {_most(short)} or older",
    )


def version(text: str) -> tuple[int, int]:
    """Major and minor of `13.0` or `13.0.1`. Raises BadInput."""
    parts = text.split(".")
    if len(parts) < 2 or not all(part.isdigit() for part in parts):
        raise BadInput(f"CUDA version: found {text!r}, allowed: MAJOR.MINOR")
    return int(parts[0]), int(parts[1])


def _newer(wanted: tuple[int, int]) -> str:
    branch = FIRST_BRANCH.get(wanted)
    name = f"branch {branch} or newer" if branch else "a newer branch"
    return f"update the driver to {name} (driver.branch, then ddtree deploy up)"


def _most(short: Mapping[str, str]) -> str:
    return min(short.values(), key=version)
