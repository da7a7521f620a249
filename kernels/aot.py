"""Compile every kernel in every shipped configuration offline, for cards that this machine does not have.

    python -m ddtree_kernels.aot [--arch 90 120] [--json FILE] [--write docs/kernels.md]

Needs triton (its wheel brings ptxas) and no GPU. Fails where a kernel asks for more than 99 KB of shared
memory a block, which is what sm_120 has, where registers spill, or where Hopper's wgmma comes in unasked:
ptxas 12.8, which Triton 3.6 calls for sm_90, gives it wrong operand descriptors in some kernels. Those that
are launched with a newer one (`ddtree_kernels.toolchain`) are compiled with it here, for Hopper alone.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

SHARED_MEMORY_LIMIT = 101376
# The generated part of the documentation.
BEGIN, END = "<!-- aot table: begin -->", "<!-- aot table: end -->"
HOPPER = 90
ARCHITECTURES = (HOPPER, 120)
# Kernels with wgmma whose results were those of the reference on an H200, element for element.
EQUAL_ON_A_CARD = ("ancestor_bits",)


@dataclass(frozen=True)
class Case:
    """One kernel in one configuration: pointer and scalar types by name, constants, launch options."""

    kernel: Any
    label: str
    types: dict[str, str]
    constants: dict[str, Any]
    options: dict[str, Any]
    # For Hopper alone, assembled by a ptxas that is right about its warp groups.
    warp_groups: bool = False

    @property
    def architectures(self) -> tuple[int, ...]:
        return (HOPPER,) if self.warp_groups else ARCHITECTURES


@dataclass(frozen=True)
class Compiled:
    """What came out: shared bytes a block, registers and spilled bytes a thread, seconds to compile.

    wgmma: multiplies by Hopper's warp groups, and nobody has compared its results bit for bit on a card.
    """

    kernel: str
    label: str
    arch: str
    shared: int
    registers: int
    spill: int
    seconds: float
    wgmma: bool = False

    @property
    def fits(self) -> bool:
        """Whether the kernel runs on the card, at full speed and as its PTX says."""
        return self.shared <= SHARED_MEMORY_LIMIT and self.spill == 0 and not self.wgmma


def main(arguments: list[str] | None = None) -> int:
    """Compile, print the table, return 1 if a configuration does not fit."""
    parser = argparse.ArgumentParser(
        prog="python -m ddtree_kernels.aot", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument(
        "--arch", type=int, nargs="+", default=list(ARCHITECTURES), help="90 = Hopper, 120 = RTX PRO"
    )
    parser.add_argument("--json", type=Path, help="write the table here as well")
    parser.add_argument("--write", type=Path, help="put the table into this page, between its markers")
    parser.add_argument("--only", default="", help="compile labels that contain this text only")
    chosen = parser.parse_args(arguments)
    try:
        import triton  # noqa: F401
    except ImportError:
        print("triton is not installed: pip install triton", file=sys.stderr)
        return 3
    rows = []
    print(f"{'kernel':<26} {'configuration':<34} {'arch':<7} {'shared':>7} {'regs':>5} {'spill':>6} {'s':>6}")
    for case in cases():
        if chosen.only not in f"{case.kernel.__name__} {case.label}":
            continue
        for arch in (one for one in chosen.arch if one in case.architectures):
            row = compile_case(case, arch)
            rows.append(row)
            mark = "" if row.fits else "  <- does not fit"
            print(
                f"{row.kernel:<26} {row.label:<34} {row.arch:<7} {row.shared:>7} {row.registers:>5} "
                f"{row.spill:>6} {row.seconds:>6.1f}{mark}",
                flush=True,
            )
    if chosen.json:
        table = {
            "schema": 1,
            "triton": triton_version(),
            "shared_memory_limit": SHARED_MEMORY_LIMIT,
            "rows": [asdict(row) | {"fits": row.fits} for row in rows],
        }
        chosen.json.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
    if chosen.write:
        page = chosen.write.read_text(encoding="utf-8")
        chosen.write.write_text(with_table(page, rows), encoding="utf-8")
    return 0 if all(row.fits for row in rows) else 1


def with_table(page: str, rows: list[Compiled]) -> str:
    """The page with these rows between its markers, one line for both cards."""
    before, rest = page.split(BEGIN)
    after = rest.split(END)[1]
    lines = [
        "| kernel | configuration | card | shared memory | registers | spilled |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row.kernel} | {row.label} | {row.arch} | {row.shared} | {row.registers} | {row.spill} |"
        for row in rows
    ]
    return "\n".join(
        [
            before + BEGIN,
            f"Triton {triton_version()}, bytes a block, a thread's registers and bytes.",
            "",
            *lines,
            END + after,
        ]
    )


def triton_version() -> str:
    """The compiler's version."""
    import triton

    return str(triton.__version__)


def cases() -> Iterator[Case]:
    """Every kernel at the shapes that are served: H 16, HV 48, K = V = 128 in bfloat16, and the limits."""
    yield from _verify_cases()
    yield from _other_cases()


def _verify_cases() -> Iterator[Case]:
    from ddtree_kernels.tree_gdn import triton as gdn

    for width, state in product((8, 16, 64), ("fp32", "bf16")):
        yield _writes_case(gdn, width, state, 48)
    for heads, state in product((192, 384), ("fp32", "bf16")):
        yield _writes_case(gdn, 16, state, heads)
    # What the kernels above do not take: 17 to 32 nodes, many heads of 64, other head dims, float16, float32.
    for width, heads in ((16, 48), (16, 192), (32, 48), (32, 384)):
        yield _fused_case(gdn, width, 128, "fp32", "bf16", heads)
    for width, heads, state in ((64, 48, "fp32"), (64, 96, "fp32"), (64, 48, "bf16"), (64, 96, "bf16")):
        yield _fused_case(gdn, width, 128, state, "bf16", heads)
    for dim, state, dtype in ((128, "bf16", "bf16"), (256, "fp32", "bf16"), (256, "fp32", "fp32")):
        yield _fused_case(gdn, 32, dim, state, dtype)
    for width in (64, 128):
        yield from _solve_cases(gdn, width, 128, "bf16")
        yield _stream_case(gdn, width, 128, "fp32", "bf16")
    yield _stream_case(gdn, 64, 128, "fp32", "bf16", out="fp32")
    yield from _solve_cases(gdn, 128, 256, "bf16")
    yield from _solve_cases(gdn, 128, 128, "fp32")
    yield from _solve_cases(gdn, 128, 256, "fp32")
    for dim, state, dtype in ((128, "bf16", "bf16"), (256, "fp32", "bf16"), (128, "fp32", "fp32")):
        yield _stream_case(gdn, 64, dim, state, dtype)
    for state in ("fp32", "bf16"):
        yield _scan_case(gdn, 128, state)
    yield _scan_case(gdn, 256, "fp32")


def _writes_case(gdn: Any, width: int, state: str, heads: int) -> Case:
    config = gdn.writes_config(width, heads)
    constants = {
        "GROUP": 3,
        "K": 128,
        "V": 128,
        "BQ": gdn.padded_rows(width),
        "WORDS": (width + 31) // 32,
        "BV": config.block_v,
        "PTXAS": "",
    }
    kernel = gdn._tree_gdn_writes_kernel
    if config.tile:
        kernel, constants["BT"] = gdn._tree_gdn_tiles_kernel, config.tile
    label = f"Q{width} K128 bf16 state {state}{f' {heads} heads' if heads != 48 else ''}"
    options = {"num_warps": config.num_warps, "num_stages": 1}
    hopper = width > gdn.SMALL_WIDTH
    return Case(kernel, label, _verify_types(state, "bf16"), constants, options, warp_groups=hopper)


def _fused_case(gdn: Any, width: int, dim: int, state: str, dtype: str, heads: int = 48) -> Case:
    config = gdn.fused_config(width, dim, dim, 4 if dtype == "fp32" else 2, heads)
    constants = {
        "GROUP": 3,
        "K": dim,
        "V": dim,
        "KC": config.chunk,
        "BK": config.block_k,
        "BQ": gdn.padded_rows(width),
        "WORDS": (width + 31) // 32,
        "BV": config.block_v,
        "PRECISION": config.precision,
        "PTXAS": "",
    }
    label = f"Q{width} K{dim} {dtype} state {state}{f' {heads} heads' if heads != 48 else ''}"
    options = {"num_warps": config.num_warps, "num_stages": 1}
    types = _verify_types(state, dtype)
    hopper = width > gdn.SMALL_WIDTH
    return Case(gdn._tree_gdn_fused_kernel, label, types, constants, options, warp_groups=hopper)


def _verify_types(state: str, dtype: str) -> dict[str, str]:
    return dict.fromkeys(("a", "b", "q", "k", "v", "o"), f"*{dtype}") | {
        "A_log": "*fp32",
        "dt_bias": "*fp32",
        "pool": f"*{state}",
        "slots": "*i64",
        "bits": "*i32",
        "responses": "*fp32",
        "prefix_queries": "*fp32",
        "inverses": "*fp32",
        "facts": "*fp32",
        "states": "*fp32",
        "order": "*i32",
        "reload": "*i32",
        "keep": "*i32",
        "scale": "fp32",
        "Q": "i32",
    }


def _solve_cases(gdn: Any, width: int, dim: int, dtype: str) -> Iterator[Case]:
    config = gdn.verify_config(dim, dim)
    block = gdn.BLOCK_ROWS
    constants = {
        "GROUP": 3,
        "K": dim,
        "KC": gdn.key_chunk(dim, 4 if dtype == "fp32" else 2),
        "BQ": block,
        "BLOCKS": (width + block - 1) // block,
        "WORDS": (width + 31) // 32,
        "PRECISION": config.precision,
    }
    label, options = f"Q{width} K{dim} {dtype}", {"num_warps": config.solve_warps, "num_stages": 1}
    for kernel in (gdn._tree_gdn_invert_kernel, gdn._tree_gdn_respond_kernel):
        yield Case(kernel, label, _verify_types("fp32", dtype), constants, options)


def _stream_case(gdn: Any, width: int, dim: int, state: str, dtype: str, out: str = "") -> Case:
    config = gdn.verify_config(dim, dim)
    block = gdn.BLOCK_ROWS
    constants = {
        "HV": 48,
        "K": dim,
        "V": dim,
        "BQ": block,
        "BLOCKS": (width + block - 1) // block,
        "BK": config.block_k,
        "BV": config.block_v,
        "PRECISION": config.precision,
    }
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    label = f"Q{width} K{dim} {dtype} state {state}{f' out {out}' if out else ''}"
    types = _verify_types(state, dtype) | {"o": f"*{out or dtype}"}
    return Case(gdn._tree_gdn_stream_kernel, label, types, constants, options)


def _scan_case(gdn: Any, dim: int, state: str) -> Case:
    constants = {"GROUP": 3, "HV": 48, "K": dim, "V": dim, "BK": dim, "BV": 16, "COPIES": 8}
    types = _verify_types(state, "bf16")
    return Case(gdn._tree_gdn_scan_kernel, f"K{dim} bf16 state {state}", types, constants, {"num_warps": 2})


def _other_cases() -> Iterator[Case]:
    from ddtree_kernels.accept_walk import triton as walk
    from ddtree_kernels.ancestry import triton as ancestry
    from ddtree_kernels.commit import stash
    from ddtree_kernels.tree_build import triton as build
    from ddtree_kernels.tree_conv import triton as conv

    bf16 = dict.fromkeys(("x", "a", "b", "weight", "bias", "conv_pool", "o"), "*bf16")
    index = dict.fromkeys(("slots", "path", "counts", "track_counts", "track_slots", "parents"), "*i64")
    yield Case(
        conv._tree_conv_kernel,
        "W4 bf16",
        bf16 | index | {"pool": "*bf16", "Q": "i32", "C": "i32"},
        {"TAPS": 4, "BIAS": False, "SILU": True, "BQ": conv.BLOCK_NODES, "BC": conv.BLOCK_CHANNELS},
        {"num_warps": 4},
    )
    kept = dict.fromkeys(("kept_x", "kept_a", "kept_b"), "*bf16")
    yield Case(
        stash._stash_kernel,
        "bf16",
        bf16 | kept | {"C": "i32", "HV": "i32"},
        {"BLOCK": stash.BLOCK},
        {"num_warps": 4},
    )
    yield from _commit_cases(bf16 | index)
    outputs = ["tokens", "parents", "depths", "ranks", "counts", "positions"]
    outputs += ["first_child", "next_sibling", "selected_index", "parent_list"]
    tree = dict.fromkeys((*outputs, "roots", "ids", "prefix_lens", "budgets"), "*i64")
    tree |= dict.fromkeys(
        ("logprobs", "scores", "depth_bias", "rank_bias", "slope", "floor", "value", "step"), "*fp32"
    )
    tree |= {"bits": "*i32"}
    for builder in ("best-first", "spine-first", "calibrated"):
        for width in (16, 64, 128):
            words = (width + 31) // 32
            yield Case(
                build._tree_build_kernel,
                f"Q{width} K16 {builder}",
                tree,
                {
                    "Q": width,
                    "L": 15,
                    "K": 16,
                    "SPINE": builder == "spine-first",
                    "CALIBRATED": builder == "calibrated",
                    "HAS_BUDGETS": False,
                    "WORDS": words,
                    "BQ": width,
                    "BK": 16,
                    "BW": words,
                },
                {"num_warps": 1, "maxnreg": build.MAX_REGISTERS, "enable_fp_fusion": False},
            )
    walked = dict.fromkeys(("tokens", "parents", "node_tokens", "path", "counts", "bonus", "leaf"), "*i64")
    for width in (64, 128):
        yield Case(
            walk._accept_walk_kernel,
            f"Q{width} P16",
            walked | {"Q": "i32"},
            {"P": 16, "BQ": width},
            {"num_warps": 1},
        )
        yield Case(
            ancestry._ancestor_bits_kernel,
            f"Q{width}",
            {"parents": "*i64", "bits": "*i32", "Q": "i32"},
            {"BQ": width, "DOUBLINGS": width.bit_length() - 1, "WORDS": width // 32},
            {"num_warps": 8},
        )
        yield Case(
            ancestry._depth_first_kernel,
            f"Q{width}",
            dict.fromkeys(("bits", "order", "reload", "keep"), "*i32") | {"parents": "*i64", "Q": "i32"},
            {"BQ": width, "WORDS": width // 32},
            {"num_warps": 4},
        )


def _commit_cases(types: dict[str, str]) -> Iterator[Case]:
    from ddtree_kernels.commit import kernels as commit
    from ddtree_kernels.commit.triton import CONV_REGISTERS, DEFAULT

    types |= {"A_log": "*fp32", "dt_bias": "*fp32", "facts": "*fp32", "N": "i32"}
    heads = {"H": 16, "HV": 48, "K": 128, "V": 128, "P": 16}
    yield Case(
        commit._commit_conv_kernel,
        "W4 K128 bf16 track",
        types,
        heads | {"TAPS": 4, "BIAS": False, "SILU": True, "TRACK": True, "BP": 16, "BC": 128},
        {"num_warps": DEFAULT.conv_warps, "maxnreg": CONV_REGISTERS},
    )
    for state in ("fp32", "bf16"):
        for track in (False, True):
            yield Case(
                commit._commit_kernel,
                f"K128 bf16 state {state}{' track' if track else ''}",
                types | {"state_pool": f"*{state}"},
                heads
                | {"TRACK": track, "BK": 128, "BV": DEFAULT.block_v}
                | {"PIECES": DEFAULT.pieces, "STAGES": DEFAULT.stages},
                {"num_warps": DEFAULT.num_warps, "num_stages": 1},
            )


def compile_case(case: Case, arch: int) -> Compiled:
    """Compile one configuration for sm_`arch` and read its resources from ptxas."""
    import triton
    from ddtree_kernels import toolchain
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = case.kernel.arg_names
    signature = {
        name: "constexpr" if name in case.constants else case.types.get(name, "i32") for name in names
    }
    aligned = [["tt.divisibility", 16]]
    attributes = {
        (place,): aligned
        for place, name in enumerate(names)
        if signature[name].startswith("*") or (name.startswith("stride_") and signature[name] == "i32")
    }
    constants = {(names.index(name),): value for name, value in case.constants.items()}
    source = ASTSource(case.kernel, signature, constants, attributes)
    start = time.perf_counter()
    newer = toolchain.right_ptxas() if case.warp_groups else None
    with toolchain.assembled_by(newer[0]) if newer else contextlib.nullcontext():
        compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=case.options)
    seconds = time.perf_counter() - start
    registers, spill = _resources(compiled.asm["ptx"], arch, newer[0] if newer else None)
    name = case.kernel.__name__.strip("_").removesuffix("_kernel")
    return Compiled(
        name,
        case.label,
        f"sm_{arch}",
        compiled.metadata.shared,
        registers,
        spill,
        round(seconds, 1),
        wgmma="wgmma.mma_async" in compiled.asm["ptx"] and name not in EQUAL_ON_A_CARD and newer is None,
    )


def _resources(ptx: str, arch: int, newer: str | None) -> tuple[int, int]:
    import triton

    folder = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    target = re.search(r"\.target (\w+)", ptx)
    assert target is not None, "PTX names its target"
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        ptxas = newer or folder / ("ptxas-blackwell" if arch >= 100 else "ptxas")
        command = [ptxas, "-v", "--gpu-name", target[1], file.name, "-o", "/dev/null"]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers = re.search(r"Used (\d+) registers", report)
    spill = re.search(r"(\d+) bytes spill stores", report)
    assert registers is not None, "ptxas -v reports the registers"
    return int(registers[1]), int(spill[1]) if spill else 0


if __name__ == "__main__":
    sys.exit(main())
