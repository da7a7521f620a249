"""Runs the PTX that Triton compiles for a card on the CPU, and watches every address.

One block at a time, all its threads in step. Global addresses must lie within the allocations that a launch
was given, shared addresses within the block's shared memory, and what one warp writes to shared memory
another may touch only after a barrier. Tensor-core products round their inputs as the hardware does (tf32
drops the low 13 bits). Branches must be uniform over the block. Not covered: the machine code that ptxas
makes of the PTX, and races between blocks.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import CompiledKernel

WARP = 32
SPECIAL = re.compile(r"%(tid|ctaid|nctaid|ntid)\.([xyz])|%laneid|%warpid")
VIEWS = {
    "b8": np.uint8, "u8": np.uint8,
    "b16": np.uint16, "u16": np.uint16, "s16": np.int16, "f16": np.float16, "bf16": np.uint16,
    "b32": np.uint32, "u32": np.uint32, "s32": np.int32, "f32": np.float32,
    "bf16x2": np.uint32, "f16x2": np.uint32,
    "b64": np.uint64, "u64": np.uint64, "s64": np.int64, "f64": np.float64, "f32x2": np.uint64,
}  # fmt: skip
POISON = 0xFFFF_FFFF_FFFF_FFFF
RAW = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


class MachineError(Exception):
    """What the card would fault on, or what two warps would race for."""


@dataclass
class Memory:
    """Allocations at made-up addresses far from each other."""

    bases: list[int] = field(default_factory=list)
    blocks: list[np.ndarray] = field(default_factory=list)

    def add(self, array: np.ndarray) -> int:
        """Register a contiguous array, which is read and written in place; its address."""
        base = 0x7F00_0000_0000 + (len(self.bases) << 36)
        self.bases.append(base)
        self.blocks.append(array.reshape(-1).view(np.uint8))
        return base

    def find(self, addresses: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
        """(allocation, offset) of each address; MachineError where one is outside."""
        which = ((addresses - np.uint64(0x7F00_0000_0000)) >> np.uint64(36)).astype(np.int64)
        offset = (addresses & np.uint64((1 << 36) - 1)).astype(np.int64)
        if (addresses < 0x7F00_0000_0000).any() or (which >= len(self.blocks)).any():
            bad = addresses[(addresses < 0x7F00_0000_0000) | (which >= len(self.blocks))][0]
            raise MachineError(f"address {bad:#x} is in no allocation")
        sizes = np.array([block.size for block in self.blocks])[which]
        if (offset + size > sizes).any():
            lane = int((offset + size > sizes).argmax())
            raise MachineError(
                f"allocation {which[lane]}: bytes {offset[lane]}..{offset[lane] + size} of {sizes[lane]}"
            )
        if (offset % size).any():
            raise MachineError("misaligned global address")
        return which, offset


def tf32(bits: np.ndarray) -> np.ndarray:
    return (bits & np.uint32(0xFFFFE000)).view(np.float32)


def bf16_pair(bits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return (bits << np.uint32(16)).view(np.float32), (bits & np.uint32(0xFFFF0000)).view(np.float32)


def f16_pair(bits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    halves = np.ascontiguousarray(bits).view(np.float16).reshape(*bits.shape, 2)
    return halves[..., 0].astype(np.float32), halves[..., 1].astype(np.float32)


def to_bf16(x: np.ndarray) -> np.ndarray:
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(x), 0x7FFF, rounded).astype(np.uint16)


def _fused(x: np.ndarray, y: np.ndarray, z: np.ndarray) -> np.ndarray:
    return (x.astype(np.float64) * y + z).astype(np.float32)


class Program:
    """A parsed kernel: instructions, labels, parameters."""

    def __init__(self, ptx: str) -> None:
        body = ptx[ptx.index(".entry") :]
        head, body = body.split(")", 1)
        self.params = re.findall(r"\.param \.(\w+)[^,]*?(\w+_param_\d+)", head)
        body = body[body.index("{") + 1 :]
        body = body[: body.index("$L__func_end")] if "$L__func_end" in body else body
        self.labels: dict[str, int] = {}
        self.code: list[tuple[str | None, bool, str, list[str], str]] = []
        threads = re.search(r"\.reqntid (\d+)", ptx)
        assert threads
        self.threads = int(threads[1])
        for line in body.splitlines():
            line = line.split("//")[0].strip()
            for part in line.split(";"):
                part = part.strip().strip("{}").strip() if part.strip() in ("{", "}") else part.strip()
                if not part or part.startswith("."):
                    continue
                label = re.match(r"(\$\w+):(.*)", part)
                if label:
                    self.labels[label[1]] = len(self.code)
                    part = label[2].strip()
                    if not part:
                        continue
                predicate, negated = None, False
                guard = re.match(r"@(!?)(%p\d+)\s+(.*)", part)
                if guard:
                    negated, predicate, part = guard[1] == "!", guard[2], guard[3]
                op, _, rest = part.partition(" ")
                if part.startswith("{") or op.startswith("."):
                    continue
                self.code.append((predicate, negated, op, _split(rest), part))


def _split(text: str) -> list[str]:
    parts, depth, now = [], 0, ""
    for c in text:
        depth += c in "{[("
        depth -= c in "}])"
        if c == "," and depth == 0:
            parts.append(now.strip())
            now = ""
        else:
            now += c
    if now.strip():
        parts.append(now.strip())
    return parts


class Block:
    """One block's threads, registers and shared memory."""

    def __init__(self, program: Program, memory: Memory, params: list[Any], grid, where, shared: int) -> None:
        self.p, self.memory, self.grid, self.where = program, memory, grid, where
        self.T = program.threads
        self.regs: dict[str, np.ndarray] = {}
        self.params = {
            name: (kind, value) for (kind, name), value in zip(program.params, params, strict=True)
        }
        self.shared = np.full(shared + 16, 0xFF, np.uint8)
        self.shared_size = shared
        self.epoch = 0
        self.write_epoch = np.full(shared + 16, -1, np.int64)
        self.writer = np.full(shared + 16, -1, np.int64)
        self.read_epoch = np.full(shared + 16, -1, np.int64)
        self.reader = np.full(shared + 16, -1, np.int64)
        self.tid = np.arange(self.T)
        self.warp = self.tid // WARP
        self.reading: list[tuple] = []
        self.copies: list[list[tuple]] = [[]]
        self.steps = 0

    # operands ------------------------------------------------------------------------------------------
    def get(self, text: str, kind: str) -> np.ndarray:
        view = VIEWS[kind]
        if text in self.regs:
            value = self.regs[text]
            want = np.dtype(view).itemsize
            if value.dtype.itemsize > want or value.dtype.itemsize < want:
                value = value.astype(RAW[want])
            return value.view(view)
        if text.startswith("0f"):
            return np.full(self.T, int(text[2:], 16), np.uint32).view(view)
        special = SPECIAL.fullmatch(text)
        if special:
            axis = {"x": 0, "y": 1, "z": 2}.get(special[2] or "")
            value = {
                "tid": self.tid if axis == 0 else 0,
                "ctaid": self.where[axis or 0],
                "nctaid": self.grid[axis or 0],
                "ntid": self.T if axis == 0 else 1,
            }[special[1]]
            return np.broadcast_to(np.asarray(value, np.uint32), (self.T,)).copy().view(view)
        if text == "global_smem":
            return np.zeros(self.T, RAW[np.dtype(view).itemsize]).view(view)
        if text.startswith("%"):  # half of a pair that nothing uses; as an address it would be out of range
            return np.full(
                self.T, POISON >> 64 - 8 * np.dtype(view).itemsize, RAW[np.dtype(view).itemsize]
            ).view(view)
        number = int(text.rstrip("U"), 0) & ((1 << (8 * np.dtype(view).itemsize)) - 1)
        return np.full(self.T, number, RAW[np.dtype(view).itemsize]).view(view)

    def pred(self, text: str) -> np.ndarray:
        if text in self.regs:
            return self.regs[text]
        return np.full(self.T, int(text) != 0)

    def put(self, name: str, value: np.ndarray, mask: np.ndarray | None) -> None:
        value = np.broadcast_to(value, (self.T,))
        if value.dtype != bool:
            value = np.ascontiguousarray(value).view(RAW[value.dtype.itemsize])
        if mask is not None and not mask.all():
            old = self.regs.get(name)
            old = np.zeros(self.T, value.dtype) if old is None else old
            value = np.where(mask, value, old)
        self.regs[name] = value

    def address(self, text: str) -> np.ndarray:
        inner = text.strip("[] ")
        base, _, offset = inner.partition("+")
        base = base.strip()
        add = int(offset, 0) if offset.strip() else 0
        if base in self.params:
            raise AssertionError
        if base.startswith("%rd"):
            return (self.get(base, "s64") + np.int64(add)).view(np.uint64)
        return (self.get(base, "s32").astype(np.int64) + add).view(np.uint64)

    # shared --------------------------------------------------------------------------------------------
    def _touch(
        self, offsets: np.ndarray, warps: np.ndarray, write: bool, data: np.ndarray | None = None
    ) -> None:
        if offsets.size == 0:
            return
        if offsets.min() < 0 or offsets.max() >= self.shared_size:
            raise MachineError(f"shared byte {offsets.max()} of {self.shared_size} (least {offsets.min()})")
        clash = (self.write_epoch[offsets] == self.epoch) & (self.writer[offsets] != warps)
        if data is not None:  # replicated layouts: several warps write the same bytes
            clash &= self.shared[offsets] != data
        if clash.any():
            what = "written" if write else "read"
            raise MachineError(f"race: shared memory {what} before a barrier after a write")
        if write:
            if ((self.read_epoch[offsets] == self.epoch) & (self.reader[offsets] != warps)).any():
                raise MachineError("race: shared memory written before a barrier after a read")
            self.write_epoch[offsets] = self.epoch
            self.writer[offsets] = warps
        else:
            same = self.read_epoch[offsets] == self.epoch
            self.reader[offsets] = np.where(same & (self.reader[offsets] != warps), -2, warps)
            self.read_epoch[offsets] = self.epoch

    def shared_read(self, offsets: np.ndarray, size: int, lanes: np.ndarray) -> np.ndarray:
        """uint8 [lanes, size]"""
        if (offsets % size).any():
            raise MachineError("misaligned shared address")
        each = offsets[:, None] + np.arange(size)
        self._touch(each.reshape(-1), np.repeat(self.warp[lanes], size), False)
        return self.shared[each]

    def shared_write(self, offsets: np.ndarray, data: np.ndarray, lanes: np.ndarray) -> None:
        size = data.shape[1]
        if (offsets % size).any():
            raise MachineError("misaligned shared address")
        each = offsets[:, None] + np.arange(size)
        self._touch(each.reshape(-1), np.repeat(self.warp[lanes], size), True, data.reshape(-1))
        self.shared[each] = data

    # run -----------------------------------------------------------------------------------------------
    def run(self) -> None:
        at, code = 0, self.p.code
        with np.errstate(all="ignore"):
            while at < len(code):
                predicate, negated, op, args, text = code[at]
                mask = None
                if predicate:
                    mask = self.regs[predicate]
                    mask = ~mask if negated else mask
                at += 1
                self.steps += 1
                if op.startswith("bra"):
                    taken = np.ones(self.T, bool) if mask is None else mask
                    if taken.all():
                        at = self.p.labels[args[-1]]
                    elif taken.any():
                        raise MachineError(f"branch not uniform: {text}")
                    continue
                if op in ("ret", "exit"):
                    if mask is None or mask.all():
                        return
                    if mask.any():
                        raise MachineError("exit not uniform")
                    continue
                try:
                    self.step(op, args, mask)
                except MachineError as error:
                    raise MachineError(f"block {self.where}: {text}: {error}") from None

    def step(self, op: str, args: list[str], mask: np.ndarray | None) -> None:
        parts = op.split(".")
        name = parts[0]
        handler: Callable[..., None] | None = getattr(self, f"op_{name}", None)
        if handler is None:
            raise NotImplementedError(op)
        handler(parts, args, mask)

    # data movement -------------------------------------------------------------------------------------
    def op_ld(self, parts, args, mask):
        kind = parts[-1]
        if parts[1] == "param":
            _, value = self.params[args[1].strip("[] ")]
            size = np.dtype(VIEWS[kind]).itemsize
            wide = args[0].startswith("%rd")
            number = int(np.array(value).view(np.uint32)) if isinstance(value, np.float32) else int(value)
            raw = np.array(number & ((1 << (8 * size)) - 1), RAW[size]).view(VIEWS[kind])
            if wide and size == 4:
                raw = raw.astype(np.int64 if kind.startswith("s") else np.uint64)
            self.put(args[0], np.broadcast_to(raw, (self.T,)), mask)
            return
        vector = next((int(p[1:]) for p in parts if re.fullmatch(r"v[248]", p)), 1)
        targets = [t.strip() for t in args[0].strip("{} ").split(",")]
        size = np.dtype(VIEWS[kind]).itemsize
        lanes = np.arange(self.T) if mask is None else np.flatnonzero(mask)
        data = np.zeros((self.T, size * vector), np.uint8)
        if len(lanes):
            addresses = self.address(args[1])[lanes]
            if parts[1] == "global":
                which, offset = self.memory.find(addresses, size * vector)
                for block in np.unique(which):
                    pick = which == block
                    data[lanes[pick]] = self.memory.blocks[block][
                        offset[pick][:, None] + np.arange(size * vector)
                    ]
            else:
                data[lanes] = self.shared_read(addresses.astype(np.int64), size * vector, lanes)
        words = np.ascontiguousarray(data).view(RAW[size]).reshape(self.T, vector)
        for place, target in enumerate(targets):
            value = words[:, place]
            if target.startswith("%r") and not target.startswith(("%rd", "%rs")) and size < 4:
                value = value.astype(np.uint32)
            if target.startswith("%rs") and size < 2:
                value = value.astype(np.uint16)
            self.put(target, value, mask)

    def op_st(self, parts, args, mask):
        kind = parts[-1]
        vector = next((int(p[1:]) for p in parts if re.fullmatch(r"v[248]", p)), 1)
        sources = [t.strip() for t in args[1].strip("{} ").split(",")]
        size = np.dtype(VIEWS[kind]).itemsize
        words = np.stack([self.get(s, f"b{8 * size}") for s in sources], axis=1)
        assert words.shape[1] == vector
        data = np.ascontiguousarray(words).view(np.uint8).reshape(self.T, size * vector)
        lanes = np.arange(self.T) if mask is None else np.flatnonzero(mask)
        if not len(lanes):
            return
        addresses = self.address(args[0])[lanes]
        if parts[1] == "global":
            which, offset = self.memory.find(addresses, size * vector)
            for block in np.unique(which):
                pick = which == block
                self.memory.blocks[block][offset[pick][:, None] + np.arange(size * vector)] = data[
                    lanes[pick]
                ]
        else:
            self.shared_write(addresses.astype(np.int64), data[lanes], lanes)

    def op_cp(self, parts, args, mask):
        if parts[2] == "commit_group":
            self.copies.append([])
            return
        if parts[2] == "wait_group":
            keep = int(args[0])
            # the last list is still open
            while len(self.copies) - 1 > keep:
                for lanes, target, data in self.copies.pop(0):
                    self.shared_write(target, data, lanes)
            return
        lanes = np.arange(self.T) if mask is None else np.flatnonzero(mask)
        size = int(args[2], 0)
        taken = self.get(args[3], "s32") if len(args) > 3 else np.full(self.T, size)
        target = self.address(args[0]).astype(np.int64)
        data = np.zeros((self.T, size), np.uint8)
        reading = lanes[taken[lanes] > 0]
        if len(reading):
            which, offset = self.memory.find(self.address(args[1])[reading], size)
            for block in np.unique(which):
                pick = which == block
                data[reading[pick]] = self.memory.blocks[block][offset[pick][:, None] + np.arange(size)]
        each = target[lanes][:, None] + np.arange(size)
        self._touch(each.reshape(-1), np.repeat(self.warp[lanes], size), True)
        self.shared[each] = 0xFF
        self.copies[-1].append((lanes, target[lanes], data[lanes]))

    def op_mov(self, parts, args, mask):
        kind = parts[-1]
        if kind == "pred":
            self.put(args[0], self.pred(args[1]), mask)
        elif args[0].startswith("{"):
            targets = [t.strip() for t in args[0].strip("{} ").split(",")]
            whole = self.get(args[1], kind)
            size = whole.dtype.itemsize // len(targets)
            pieces = np.ascontiguousarray(whole).view(RAW[size]).reshape(self.T, len(targets))
            for place, target in enumerate(targets):
                if target != "_":
                    self.put(target, pieces[:, place].copy(), mask)
        elif args[1].startswith("{"):
            sources = [t.strip() for t in args[1].strip("{} ").split(",")]
            size = np.dtype(VIEWS[kind]).itemsize // len(sources)
            pieces = np.stack([self.get(s, f"b{8 * size}") for s in sources], axis=1)
            self.put(
                args[0], np.ascontiguousarray(pieces).view(RAW[np.dtype(VIEWS[kind]).itemsize])[:, 0], mask
            )
        else:
            self.put(args[0], self.get(args[1], kind), mask)

    def op_ldmatrix(self, parts, args, mask):
        count = next(int(p[1:]) for p in parts if re.fullmatch(r"x[124]", p))
        trans = "trans" in parts
        targets = [t.strip() for t in args[0].strip("{} ").split(",")]
        address = self.address(args[1]).astype(np.int64)
        out = [np.zeros(self.T, np.uint32) for _ in range(count)]
        for warp in range(self.T // WARP):
            for m in range(count):
                lanes = warp * WARP + m * 8 + np.arange(8)
                rows = self.shared_read(address[lanes], 16, lanes)
                matrix = np.ascontiguousarray(rows).view(np.uint16)
                matrix = np.ascontiguousarray(matrix.T if trans else matrix)
                out[m][warp * WARP : (warp + 1) * WARP] = matrix.view(np.uint32).reshape(-1)
        for target, value in zip(targets, out, strict=True):
            self.put(target, value, mask)

    def op_stmatrix(self, parts, args, mask):
        assert mask is None
        count = next(int(p[1:]) for p in parts if re.fullmatch(r"x[124]", p))
        trans = "trans" in parts
        sources = [self.get(t.strip(), "b32") for t in args[1].strip("{} ").split(",")]
        address = self.address(args[0]).astype(np.int64)
        for warp in range(self.T // WARP):
            for m in range(count):
                lanes = warp * WARP + m * 8 + np.arange(8)
                words = np.ascontiguousarray(sources[m][warp * WARP : (warp + 1) * WARP])
                matrix = words.view(np.uint16).reshape(8, 8)
                matrix = np.ascontiguousarray(matrix.T if trans else matrix)
                self.shared_write(address[lanes], matrix.view(np.uint8).reshape(8, 16), lanes)

    def op_shfl(self, parts, args, mask):
        mode = parts[2]
        target = args[0].split("|")[0]
        value = self.get(args[1], "b32").reshape(-1, WARP)
        lane = np.arange(WARP)
        b = self.get(args[2], "s32").reshape(-1, WARP)
        clamp = int(args[3], 0)
        segment = (clamp >> 8) & 31
        limit = clamp & 31
        low = lane & segment
        high = low | (limit & ~segment)
        source = {"bfly": lane ^ b, "idx": low | (b & ~segment), "up": lane - b, "down": lane + b}[mode]
        good = (source <= high) if mode != "up" else (source >= high)
        source = np.where(good, source, lane)
        self.put(target, np.take_along_axis(value, source, 1).reshape(-1), mask)

    def op_redux(self, parts, args, mask):
        value = self.get(args[1], parts[-1]).reshape(-1, WARP)
        how = {"add": np.sum, "min": np.min, "max": np.max}[parts[2]]
        result = how(value, axis=1).astype(value.dtype)
        self.put(args[0], np.repeat(result, WARP), mask)

    def op_bar(self, parts, args, mask):
        if parts[1] == "sync":
            self.epoch += 1

    def op_fence(self, parts, args, mask):
        pass

    # products ------------------------------------------------------------------------------------------
    def op_mma(self, parts, args, mask):
        shape = next(p for p in parts if p.startswith("m16"))
        types = parts[-3:-1]
        names = [[t.strip() for t in a.strip("{} ").split(",")] for a in args]
        a = np.stack([self.get(t, "b32") for t in names[1]], 1).reshape(-1, WARP, len(names[1]))
        b = np.stack([self.get(t, "b32") for t in names[2]], 1).reshape(-1, WARP, len(names[2]))
        c = np.stack([self.get(t, "f32") for t in names[3]], 1).reshape(-1, WARP, 4)
        warps = a.shape[0]
        lane = np.arange(WARP)
        group, inner = lane // 4, lane % 4
        if types[0] == "tf32":
            assert shape == "m16n8k8"
            A = np.zeros((warps, 16, 8), np.float32)
            B = np.zeros((warps, 8, 8), np.float32)
            av, bv = tf32(a), tf32(b)
            A[:, group, inner], A[:, group + 8, inner] = av[..., 0], av[..., 1]
            A[:, group, inner + 4], A[:, group + 8, inner + 4] = av[..., 2], av[..., 3]
            B[:, inner, group], B[:, inner + 4, group] = bv[..., 0], bv[..., 1]
        else:
            assert shape == "m16n8k16"
            pair = bf16_pair if types[0] == "bf16" else f16_pair
            A = np.zeros((warps, 16, 16), np.float32)
            B = np.zeros((warps, 16, 8), np.float32)
            for reg, (row, col) in enumerate(((0, 0), (8, 0), (0, 8), (8, 8))):
                low, high = pair(a[..., reg])
                A[:, group + row, col + inner * 2], A[:, group + row, col + inner * 2 + 1] = low, high
            for reg, row in enumerate((0, 8)):
                low, high = pair(b[..., reg])
                B[:, row + inner * 2, group], B[:, row + inner * 2 + 1, group] = low, high
        C = np.matmul(A.astype(np.float64), B.astype(np.float64))
        out = np.empty((warps, WARP, 4), np.float32)
        for reg, (row, col) in enumerate(((0, 0), (0, 1), (8, 0), (8, 1))):
            out[..., reg] = c[..., reg] + C[:, group + row, inner * 2 + col]
        out = out.reshape(self.T, 4)
        for reg, target in enumerate(names[0]):
            self.put(target, out[:, reg].copy(), mask)

    def op_wgmma(self, parts, args, mask):
        if parts[1] == "wait_group":
            for offsets, warps in self.reading:
                self._touch(offsets, warps, False)
            self.reading = []
        if parts[1] != "mma_async":
            return
        shape = next(re.fullmatch(r"m64n(\d+)k(\d+)", p) for p in parts if p.startswith("m64"))
        N, K = int(shape[1]), int(shape[2])
        kind = parts[-1]
        names = [t.strip() for t in args[0].strip("{} ").split(",")]
        groups = self.T // 128
        at = 3
        if args[1].startswith("{"):
            A = self._wgmma_registers([t.strip() for t in args[1].strip("{} ").split(",")], kind, K)
            trans_b = args[6] == "1" if len(args) > 6 else False
        else:
            trans_a = args[6] == "1" if len(args) > 6 else False
            trans_b = args[7] == "1" if len(args) > 7 else False
            A = np.stack([self._wgmma_shared(args[1], g, 64, K, trans_a, kind) for g in range(groups)])
        B = np.stack([self._wgmma_shared(args[2], g, N, K, trans_b, kind) for g in range(groups)])
        C = np.matmul(A.astype(np.float64), B.astype(np.float64).transpose(0, 2, 1))
        keep = self.pred(args[at])
        lane = np.arange(WARP)
        group, inner = lane // 4, lane % 4
        assert (int(args[4]), int(args[5])) == (1, 1)
        half = parts[-3] == "f16"
        out = np.empty((groups, 4, WARP, N // 2), np.float32)
        for chunk in range(N // 8):
            for reg, (row, col) in enumerate(((0, 0), (0, 1), (8, 0), (8, 1))):
                for warp in range(4):
                    out[:, warp, :, 4 * chunk + reg] = C[
                        :, 16 * warp + row + group, 8 * chunk + col + inner * 2
                    ]
        out = out.reshape(self.T, N // 2)
        if half:
            raise NotImplementedError("f16 accumulators")
        for reg, name in enumerate(names):
            before = np.where(keep, self.get(name, "f32"), np.float32(0)) if keep.any() else np.float32(0)
            self.put(name, (out[:, reg] + before).astype(np.float32), mask)

    def _wgmma_registers(self, names, kind, K):
        a = np.stack([self.get(t, "b32") for t in names], 1).reshape(-1, 4, WARP, len(names))
        lane = np.arange(WARP)
        group, inner = lane // 4, lane % 4
        A = np.zeros((a.shape[0], 4, 16, K), np.float32)
        for reg, (row, half) in enumerate(((0, 0), (8, 0), (0, 1), (8, 1))):
            if kind == "tf32":
                A[:, :, group + row, inner + 4 * half] = tf32(a[..., reg])
            else:
                low, high = (bf16_pair if kind == "bf16" else f16_pair)(a[..., reg])
                A[:, :, group + row, 8 * half + 2 * inner] = low
                A[:, :, group + row, 8 * half + 2 * inner + 1] = high
        return A.reshape(-1, 64, K)

    def _wgmma_shared(self, descriptor, group, rows, K, trans, kind):
        desc = int(self.get(descriptor, "b64")[group * 128])
        start, lead, stride = ((desc >> s & 0x3FFF) << 4 for s in (0, 16, 32))
        swizzle = {0: 0, 1: 128, 2: 64, 3: 32}[desc >> 62 & 3]
        size = 4 if kind == "tf32" else 2
        each = 16 // size
        n, k = np.meshgrid(np.arange(rows), np.arange(K), indexing="ij")
        if not trans:
            if swizzle:
                at = start + (n // 8) * stride + (n % 8) * swizzle + k * size
            else:
                at = start + (n // 8) * stride + (n % 8) * 16 + (k // each) * lead + (k % each) * size
        elif swizzle:
            wide = swizzle // size
            at = start + (n // wide) * lead + (n % wide) * size + (k // 8) * stride + (k % 8) * swizzle
        else:
            at = start + (n // each) * stride + (n % each) * size + (k // 8) * lead + (k % 8) * 16
        if swizzle:
            bits = {128: 7, 64: 3, 32: 1}[swizzle]
            at = at ^ (((at >> 7) & bits) << 4)
        each_byte = (at[..., None] + np.arange(size)).reshape(-1)
        warps = np.full(each_byte.size, -3 - group)
        self._touch(each_byte, warps, False)
        self.reading.append((each_byte, warps))
        raw = np.ascontiguousarray(self.shared[each_byte].reshape(rows, K, size))
        if kind == "tf32":
            return tf32(raw.view(np.uint32)[..., 0])
        if kind == "bf16":
            return (raw.view(np.uint16)[..., 0].astype(np.uint32) << np.uint32(16)).view(np.float32)
        return raw.view(np.float16)[..., 0].astype(np.float32)

    # arithmetic ----------------------------------------------------------------------------------------
    def _binary(self, parts, args, mask, function):
        kind = parts[-1]
        if kind == "pred":
            self.put(args[0], function(self.pred(args[1]), self.pred(args[2])), mask)
            return
        x, y = self.get(args[1], kind), self.get(args[2], kind)
        if kind in ("bf16", "bf16x2", "f16x2"):
            self.put(args[0], self._halves(kind, function, x, y), mask)
            return
        if kind == "f32x2":
            x, y = x.view(np.float32), y.view(np.float32)
            self.put(args[0], np.ascontiguousarray(function(x, y)).view(np.uint64), mask)
            return
        self.put(args[0], function(x, y).astype(x.dtype), mask)

    def _halves(self, kind, function, *operands):
        """16-bit operands in float32, each result rounded once."""
        if kind == "bf16":
            return to_bf16(function(*((x.astype(np.uint32) << 16).view(np.float32) for x in operands)))
        split = bf16_pair if kind == "bf16x2" else f16_pair
        round_to = to_bf16 if kind == "bf16x2" else lambda x: x.astype(np.float16).view(np.uint16)
        low, high = (round_to(function(*half)) for half in zip(*map(split, operands), strict=True))
        return low | high.astype(np.uint32) << np.uint32(16)

    def op_add(self, parts, args, mask):
        self._binary(parts, args, mask, lambda x, y: x + y)

    def op_sub(self, parts, args, mask):
        self._binary(parts, args, mask, lambda x, y: x - y)

    def op_and(self, parts, args, mask):
        self._binary(parts, args, mask, lambda x, y: x & y)

    def op_or(self, parts, args, mask):
        self._binary(parts, args, mask, lambda x, y: x | y)

    def op_xor(self, parts, args, mask):
        self._binary(parts, args, mask, lambda x, y: x ^ y)

    def op_not(self, parts, args, mask):
        value = self.pred(args[1]) if parts[-1] == "pred" else self.get(args[1], parts[-1])
        self.put(args[0], ~value, mask)

    def op_min(self, parts, args, mask):
        self._binary(parts, args, mask, np.minimum if "NaN" in parts else np.fmin)

    def op_max(self, parts, args, mask):
        self._binary(parts, args, mask, np.maximum if "NaN" in parts else np.fmax)

    def op_div(self, parts, args, mask):
        kind = parts[-1]
        if kind.startswith("f"):
            self._binary(parts, args, mask, lambda x, y: x / y)
        else:
            x, y = self.get(args[1], kind), self.get(args[2], kind)
            quotient = np.trunc(x.astype(np.float64) / y.astype(np.float64))  # 32 bits are exact in float64
            assert x.dtype.itemsize <= 4
            self.put(args[0], quotient.astype(x.dtype), mask)

    def op_rem(self, parts, args, mask):
        kind = parts[-1]
        x, y = self.get(args[1], kind), self.get(args[2], kind)
        self.put(args[0], np.fmod(x, y).astype(x.dtype), mask)

    def op_mul(self, parts, args, mask):
        kind = parts[-1]
        if parts[1] == "wide":
            wide = {2: {"u": np.uint32, "s": np.int32}, 4: {"u": np.uint64, "s": np.int64}}
            x, y = self.get(args[1], kind), self.get(args[2], kind)
            to = wide[x.dtype.itemsize][kind[0]]
            self.put(args[0], x.astype(to) * y.astype(to), mask)
        elif parts[1] == "hi":
            x, y = self.get(args[1], kind), self.get(args[2], kind)
            bits = 8 * x.dtype.itemsize
            product = [(int(a) * int(b)) >> bits for a, b in zip(x, y, strict=True)]
            self.put(args[0], np.array([p & ((1 << bits) - 1) for p in product], RAW[x.dtype.itemsize]), mask)
        else:
            self._binary(parts, args, mask, lambda x, y: x * y)

    def op_mad(self, parts, args, mask):
        kind = parts[-1]
        x, y = self.get(args[1], kind), self.get(args[2], kind)
        if parts[1] == "wide":
            to = {"u": np.uint64, "s": np.int64}[kind[0]]
            self.put(args[0], x.astype(to) * y.astype(to) + self.get(args[3], f"{kind[0]}64"), mask)
        else:
            assert parts[1] == "lo"
            self.put(args[0], x * y + self.get(args[3], kind), mask)

    def op_fma(self, parts, args, mask):
        kind = parts[-1]
        if kind == "f32x2":
            x, y, z = (self.get(t, kind).view(np.float32).astype(np.float64) for t in args[1:4])
            self.put(args[0], (x * y + z).astype(np.float32).view(np.uint64), mask)
            return
        if kind in ("bf16", "bf16x2", "f16x2"):
            operands = (self.get(t, kind) for t in args[1:4])
            self.put(args[0], self._halves(kind, _fused, *operands), mask)
            return
        x, y, z = (self.get(t, kind).astype(np.float64) for t in args[1:4])
        self.put(args[0], (x * y + z).astype(VIEWS[kind]), mask)

    def op_neg(self, parts, args, mask):
        x = self.get(args[1], parts[-1])
        sign = {"bf16": 0x8000, "bf16x2": 0x8000_8000, "f16x2": 0x8000_8000}.get(parts[-1])
        self.put(args[0], -x if sign is None else x ^ x.dtype.type(sign), mask)

    def op_abs(self, parts, args, mask):
        x = self.get(args[1], parts[-1])
        rest = {"bf16": 0x7FFF, "bf16x2": 0x7FFF_7FFF, "f16x2": 0x7FFF_7FFF}.get(parts[-1])
        self.put(args[0], np.abs(x) if rest is None else x & x.dtype.type(rest), mask)

    def op_ex2(self, parts, args, mask):
        self.put(args[0], np.exp2(self.get(args[1], "f32")), mask)

    def op_lg2(self, parts, args, mask):
        self.put(args[0], np.log2(self.get(args[1], "f32")), mask)

    def op_rcp(self, parts, args, mask):
        self.put(args[0], np.float32(1) / self.get(args[1], "f32"), mask)

    def op_sqrt(self, parts, args, mask):
        self.put(args[0], np.sqrt(self.get(args[1], "f32")), mask)

    def op_rsqrt(self, parts, args, mask):
        self.put(args[0], np.float32(1) / np.sqrt(self.get(args[1], "f32")), mask)

    def op_shl(self, parts, args, mask):
        kind = parts[-1]
        x, by = self.get(args[1], kind), self.get(args[2], "u32").astype(np.uint64)
        bits = 8 * x.dtype.itemsize
        raw = x.view(RAW[x.dtype.itemsize])
        self.put(
            args[0], np.where(by < bits, raw << np.minimum(by, bits - 1).astype(raw.dtype), raw * 0), mask
        )

    def op_shr(self, parts, args, mask):
        kind = parts[-1]
        x, by = self.get(args[1], kind), self.get(args[2], "u32").astype(np.int64)
        bits = 8 * x.dtype.itemsize
        shifted = x >> np.minimum(by, bits - 1).astype(x.dtype)
        if not kind.startswith("s"):
            shifted = np.where(by < bits, shifted, 0).astype(x.dtype)
        self.put(args[0], shifted, mask)

    def op_bfe(self, parts, args, mask):
        kind = parts[-1]
        x = self.get(args[1], kind).astype(np.int64 if kind[0] == "s" else np.uint64)
        at, size = int(args[2], 0), int(args[3], 0)
        value = (x.view(np.uint64) >> np.uint64(at)) & np.uint64((1 << size) - 1)
        if kind[0] == "s":
            sign = (value >> np.uint64(size - 1)) & np.uint64(1)
            value = np.where(sign == 1, value | np.uint64(((1 << 64) - 1) ^ ((1 << size) - 1)), value)
        self.put(args[0], value.astype(RAW[np.dtype(VIEWS[kind]).itemsize]), mask)

    def op_prmt(self, parts, args, mask):
        a, b, c = (self.get(t, "b32") for t in args[1:4])
        data = np.concatenate([a[:, None].copy().view(np.uint8), b[:, None].copy().view(np.uint8)], 1)
        out = np.zeros((self.T, 4), np.uint8)
        for i in range(4):
            nibble = (c >> np.uint32(4 * i)) & np.uint32(15)
            byte = np.take_along_axis(data, (nibble & 7)[:, None].astype(np.int64), 1)[:, 0]
            out[:, i] = np.where(nibble & 8, np.where(byte & 0x80, 0xFF, 0), byte)
        self.put(args[0], out.view(np.uint32)[:, 0], mask)

    def op_popc(self, parts, args, mask):
        self.put(args[0], np.bitwise_count(self.get(args[1], parts[-1])).astype(np.uint32), mask)

    def op_selp(self, parts, args, mask):
        kind = parts[-1]
        self.put(
            args[0], np.where(self.pred(args[3]), self.get(args[1], kind), self.get(args[2], kind)), mask
        )

    def op_setp(self, parts, args, mask):
        kind, how = parts[-1], parts[1]
        x, y = self.get(args[1], kind), self.get(args[2], kind)
        functions = {
            "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
            "eq": np.equal,
        }  # fmt: skip
        nan = np.isnan(x) | np.isnan(y) if kind.startswith("f") else np.zeros(self.T, bool)
        if how in functions:
            result = functions[how](x, y)
        elif how == "ne":
            result = (x != y) & ~nan
        elif how == "num":
            result = ~nan
        elif how == "nan":
            result = nan
        elif how == "neu":
            result = (x != y) | nan
        elif how.endswith("u"):
            result = functions[how[:-1]](x, y) | nan
        else:
            raise NotImplementedError(how)
        if len(parts) > 3 and parts[2] in ("and", "or"):
            other = self.pred(args[3])
            result = result & other if parts[2] == "and" else result | other
        self.put(args[0], result, mask)

    def op_cvt(self, parts, args, mask):
        to, source = parts[-2], parts[-1]
        mode = set(parts[1:-2])
        if to == "bf16x2":
            high, low = to_bf16(self.get(args[1], "f32")), to_bf16(self.get(args[2], "f32"))
            self.put(args[0], (high.astype(np.uint32) << np.uint32(16)) | low, mask)
        elif to == "f16x2":
            high, low = (self.get(t, "f32").astype(np.float16).view(np.uint16) for t in args[1:3])
            self.put(args[0], (high.astype(np.uint32) << np.uint32(16)) | low, mask)
        elif to == "bf16":
            self.put(args[0], to_bf16(self.get(args[1], "f32")), mask)
        elif source == "bf16":
            self.put(
                args[0], (self.get(args[1], "b16").astype(np.uint32) << np.uint32(16)).view(np.float32), mask
            )
        elif to == "tf32":
            bits = self.get(args[1], "b32")
            self.put(args[0], (bits + np.uint32(0x1000)) & np.uint32(0xFFFFE000), mask)
        else:
            x = self.get(args[1], source)
            if source.startswith("f") and to.startswith("f"):
                if "rmi" in mode:
                    x = np.floor(x)
                elif "rpi" in mode:
                    x = np.ceil(x)
                elif "rzi" in mode:
                    x = np.trunc(x)
                elif "rni" in mode:
                    x = np.rint(x)
                self.put(args[0], x.astype(VIEWS[to]), mask)
            elif source.startswith("f"):
                x = np.trunc(x) if "rzi" in mode else np.floor(x) if "rmi" in mode else np.rint(x)
                info = np.iinfo(VIEWS[to])
                x = np.where(np.isnan(x), 0, np.clip(x.astype(np.float64), info.min, info.max))
                self.put(args[0], x.astype(VIEWS[to]), mask)
            else:
                self.put(args[0], x.astype(VIEWS[to]), mask)


def launch(ptx: str, memory: Memory, params: list[Any], grid: tuple[int, ...], shared: int) -> int:
    """Run every block of a grid; instructions executed."""
    program = Program(ptx)
    grid = (*grid, 1, 1)[:3]
    steps = 0
    for z in range(grid[2]):
        for y in range(grid[1]):
            for x in range(grid[0]):
                block = Block(program, memory, [*params, 0, 0], grid, (x, y, z), shared)
                block.run()
                steps += block.steps
    return steps


class _Utils:
    def load_binary(self, name, kernel, shared, device):
        return None, kernel, 32, 0, 1024

    def get_device_properties(self, device):
        return {"max_shared_mem": 232448, "multiprocessor_count": 132, "warpSize": 32, "max_num_regs": 65536}


class Driver:
    """What Triton takes for a CUDA driver: it specialises and compiles for a card, and launches run here."""

    def __init__(self, arch: int) -> None:
        self.arch, self.utils, self.launches = arch, _Utils(), []

    def launcher_cls(self, source, metadata):
        """A launch of one compiled kernel on CPU tensors, every storage an allocation of its own."""
        names = source.fn.arg_names
        kept = [(place, source.signature[name]) for place, name in enumerate(names)]
        kept = [(place, kind) for place, kind in kept if kind != "constexpr"]

        def run(x, y, z, stream, ptx, packed, launch_metadata, enter, leave, *args):
            memory, bases, params = Memory(), {}, []
            for place, kind in kept:
                value = args[place]
                if kind.startswith("*"):
                    storage = value.untyped_storage()
                    start = storage.data_ptr()
                    if start not in bases:
                        array = torch.tensor([], dtype=torch.uint8).set_(storage).numpy()
                        bases[start] = memory.add(array)
                    params.append(bases[start] + value.data_ptr() - start)
                else:
                    params.append(np.float32(value) if kind == "fp32" else int(value))
            self.launches.append((source.fn.__name__, (x, y, z)))
            launch(
                ptx.decode() if isinstance(ptx, bytes) else ptx, memory, params, (x, y, z), metadata.shared
            )

        return run

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0

    def get_current_target(self):
        return GPUTarget("cuda", self.arch, 32)

    def get_active_torch_device(self):
        return torch.device("cpu")


def install(arch: int) -> Driver:
    """Let every Triton kernel of this process run here from now on, compiled for sm_`arch`."""
    driver = Driver(arch)
    handles = CompiledKernel._init_handles

    def with_ptx(kernel):
        kernel.kernel = kernel.asm["ptx"]
        return handles(kernel)

    CompiledKernel._init_handles = with_ptx
    triton.runtime.driver.set_active(driver)
    return driver
