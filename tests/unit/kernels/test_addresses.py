"""Every operation as it is compiled for a card: addresses, shared-memory order, tensor-core rounding."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from .ptx_machine import MachineError, Memory, launch

# Tensor cores round as the hardware does: three bfloat16 products for one of float32. The rest is float32.
BOUNDS = {
    "verify": 2e-5,
    "verify-two-warps": 2e-5,
    "verify-four-warps": 2e-5,
    "verify-wide": 2e-5,
    "verify-writes": 3e-5,
    "verify-writes-four-warps": 3e-5,
    "verify-tiles": 3e-5,
    "verify-scan": 2e-6,
    "adversarial": 2e-5,
    "adversarial-four-warps": 2e-5,
    "cancelling": 5e-4,
    "conv": 1e-5,
    "commit": 1e-6,
    "build-walk": 0.0,
    "ancestry": 0.0,
}


# Only Hopper multiplies by warp groups, in products of 64 rows.
HOPPER = ("verify-four-warps", "verify-writes-four-warps", "adversarial-four-warps")


@pytest.mark.parametrize(("arch", "names"), [("120", tuple(BOUNDS)), ("90", HOPPER)])
def test_compiled_operations_stay_within_their_allocations_and_are_right(arch, names):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, str(Path(__file__).with_name("compiled_ops.py")), arch, *names]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    errors = {}
    for line in done.stdout.splitlines():
        errors |= json.loads(line)
    assert set(errors) == set(names)
    for name, error in errors.items():
        assert error <= BOUNDS[name], name


PTX = """
.visible .entry probe(
	.param .u64 .ptr .global .align 1 probe_param_0,
	.param .u64 .ptr .global .align 1 probe_param_1,
	.param .u64 .ptr .global .align 1 probe_param_2
)
.reqntid 64
{{
	ld.param.b64 	%rd1, [probe_param_0];
	mov.u32 	%r1, %tid.x;
	mad.wide.u32 	%rd2, %r1, 4, %rd1;
{body}
	ret;
}}
"""


def run(body, size=64):
    memory = Memory()
    data = np.zeros(size, np.uint32)
    launch(PTX.format(body=body), memory, [memory.add(data)], (1,), 256)
    return data


def test_a_store_inside_is_done():
    assert (run("\tst.global.b32 [%rd2], %r1;") == np.arange(64)).all()


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("\tst.global.b32 [%rd2+4], %r1;", "bytes 256..260 of 256"),
        ("\tst.global.b32 [%rd2+-4], %r1;", "is in no allocation|bytes"),
        ("\tsetp.lt.u32 %p1, %r1, 9;\n\t@%p1 ld.global.b32 %r2, [%rd2+2];", "misaligned"),
        ("\tshl.b32 %r3, %r1, 3;\n\tst.shared.b32 [%r3], %r1;", "shared byte"),
        (
            "\tshl.b32 %r3, %r1, 2;\n\tst.shared.b32 [%r3], %r1;\n\txor.b32 %r4, %r3, 128;\n"
            "\tld.shared.b32 %r5, [%r4];",
            "race",
        ),
    ],
)
def test_what_a_card_would_fault_on_is_found(body, message):
    with pytest.raises(MachineError, match=message):
        run(body)


def test_a_barrier_between_two_warps_settles_it():
    run(
        "\tshl.b32 %r3, %r1, 2;\n\tst.shared.b32 [%r3], %r1;\n\tbar.sync 0;\n\txor.b32 %r4, %r3, 128;\n"
        "\tld.shared.b32 %r5, [%r4];"
    )


def test_masked_lanes_may_point_anywhere():
    data = run("\tsetp.lt.u32 %p1, %r1, 16;\n\t@%p1 st.global.b32 [%rd2], %r1;", size=16)
    assert (data == np.arange(16)).all()
