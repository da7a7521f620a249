"""The machine's warp-group products: right on every layout Triton uses, and watched like other accesses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from .ptx_machine import MachineError, Memory, launch


def test_dots_of_whole_numbers_are_exact_from_registers_and_from_shared_memory():
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, str(Path(__file__).with_name("compiled_dots.py"))]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(rows) == 20
    assert [row["name"] for row in rows if row["wrong"]] == []
    assert {place for row in rows for place in row["left"]} == {"registers", "shared"}


# One 64x8x16 product of a warp group; both operands are rows of 32 bytes, swizzled by 32 bytes.
PTX = """
.visible .entry probe(
	.param .u64 .ptr .global .align 1 probe_param_0,
	.param .u64 .ptr .global .align 1 probe_param_1,
	.param .u64 .ptr .global .align 1 probe_param_2
)
.reqntid 128
{{
	ld.param.b64 	%rd1, [probe_param_0];
	mov.u32 	%r1, %tid.x;
	shl.b32 	%r2, %r1, 4;
	mad.wide.u32 	%rd2, %r1, 16, %rd1;
	mov.b32 	%r3, 0;
	st.shared.v4.b32 	[%r2], {{%r3, %r3, %r3, %r3}};
	st.shared.v4.b32 	[%r2+2048], {{%r3, %r3, %r3, %r3}};
	{barrier}
	mov.b64 	%rd3, {x};
	mov.b64 	%rd4, {y};
	wgmma.fence.sync.aligned;
	wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {{%r4, %r5, %r6, %r7}}, %rd3, %rd4, 0, 1, 1, 0, 0;
	wgmma.commit_group.sync.aligned;
	{between}
	wgmma.wait_group.sync.aligned 0;
	st.global.v4.b32 	[%rd2], {{%r4, %r5, %r6, %r7}};
	ret;
}}
"""


def descriptor(start):
    stride, swizzle_32 = 256, 3
    return start >> 4 | 1 << 16 | (stride >> 4) << 32 | swizzle_32 << 62


def run(x=0, y=2048, barrier="bar.sync 0;", between=""):
    memory = Memory()
    data = np.full((128, 4), np.nan, np.float32)
    ptx = PTX.format(x=descriptor(x), y=descriptor(y), barrier=barrier, between=between)
    launch(ptx, memory, [memory.add(data)], (1,), 4096)
    return data


def test_a_product_within_shared_memory_is_done():
    assert (run() == 0).all()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"y": 4096 - 128}, "shared byte"),
        ({"barrier": ""}, "race"),
        ({"between": "bar.sync 0;\n\tst.shared.b32 [%r2], %r3;"}, "race"),
    ],
)
def test_what_a_card_would_read_wrongly_is_found(changed, message):
    with pytest.raises(MachineError, match=message):
        run(**changed)
