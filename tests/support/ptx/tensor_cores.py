"""Products of matrices by warps (``mma``) and groups of four warps (``wgmma``), and how operands
move between registers and shared memory.

Layouts are those of the PTX ISA, sections "Matrix Fragments for mma.m16n8k16", "ldmatrix" and
"Asynchronous Warpgroup Level Matrix Shared Memory Layout".
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from ptx.errors import UnknownCode
from ptx.formats import Array, decoded, halves, with_one_nan
from ptx.machine import WARP, WARP_GROUP, Machine, Mask
from ptx.program import Instruction, vector

_GROUP_WARPS = WARP_GROUP // WARP
_LANES = np.arange(WARP)
_ROWS, _COLUMNS = _LANES // 4, _LANES % 4 * 2
"""Where a lane's numbers begin in an 8 x 8 tile: it has two neighbours of a row."""
_DEPTH = 16
"""The inner dimension of each product."""


def _left_places() -> Array:
    """For each element of a warp's 16 x 16 operand, its place among the halves of the lanes'
    registers."""
    places = np.empty((16, _DEPTH), np.intp)
    for register in range(4):
        for side in range(2):
            rows, columns = _ROWS + register % 2 * 8, _COLUMNS + register // 2 * 8 + side
            places[rows, columns] = _LANES * 8 + register * 2 + side
    return places


def _right_places() -> Array:
    """The same of a warp's 16 x 8 operand."""
    places = np.empty((_DEPTH, 8), np.intp)
    for register in range(2):
        for side in range(2):
            places[register * 8 + _COLUMNS + side, _ROWS] = _LANES * 4 + register * 2 + side
    return places


_LEFT, _RIGHT = _left_places(), _right_places()
_RESULTS = [(_ROWS + register // 2 * 8) * 8 + _COLUMNS + register % 2 for register in range(4)]
"""For each register of a warp's 16 x 8 result, the lanes' places in it."""


def _multiply(machine: Machine, i: Instruction, mask: Mask) -> None:
    """D = A B + C of a warp: 16 x 16 by 16 x 8."""
    if i.parts[1:6] != ("sync", "aligned", "m16n8k16", "row", "col") or i.parts[6] != "f32":
        raise UnknownCode(i.text)
    machine.whole_warps(mask)
    half = i.parts[7]
    target, a, b, c = (vector(operand) for operand in i.operands)
    right = np.take(_fragment(machine, b, half), _RIGHT, axis=1)
    product = (_left_operand(machine, a, half) @ right).reshape(-1, 16 * 8)
    for places, register, addend in zip(_RESULTS, target, c, strict=True):
        values = np.take(product, places, axis=1).ravel()
        machine.write(register, with_one_nan(values + machine.read(addend, "f32")), mask)


def _left_operand(machine: Machine, registers: Sequence[str], half: str) -> Array:
    """float32 [warps, 16, 16]."""
    return np.take(_fragment(machine, registers, half), _LEFT, axis=1)


def _fragment(machine: Machine, registers: Sequence[str], half: str) -> Array:
    """float32 [warps, lanes x registers x 2]."""
    words = np.stack([machine.read(register, "b32") for register in registers], axis=1)
    return halves(words, half).reshape(-1, WARP * len(registers) * 2)


def _load_matrices(machine: Machine, i: Instruction, mask: Mask) -> None:
    """8 x 8 tiles of 16 bits; a lane gives the address of a row of one of them."""
    places, warps, executing = _matrix_rows(machine, i, i.operands[1], mask)
    tiles = machine.shared.read(places, 16, warps).view(np.uint16)
    tiles = tiles.reshape(int(executing.sum()), -1, 8, 8)
    if "trans" in i.parts:
        tiles = tiles.swapaxes(2, 3)
    # A lane has two neighbours, one lane after the other.
    pairs = np.ascontiguousarray(tiles).view(np.uint32).reshape(len(tiles), -1, WARP)
    for place, register in enumerate(vector(i.operands[0])):
        words = np.empty((len(executing), WARP), np.uint32)
        words[executing] = pairs[:, place]
        machine.write(register, words.ravel(), mask)


def _store_matrices(machine: Machine, i: Instruction, mask: Mask) -> None:
    places, warps, executing = _matrix_rows(machine, i, i.operands[0], mask)
    registers = vector(i.operands[1])
    words = [machine.read(one, "b32").reshape(-1, WARP)[executing] for one in registers]
    tiles = np.stack(words, axis=1).view(np.uint16).reshape(-1, len(registers), 8, 8)
    if "trans" in i.parts:
        tiles = tiles.swapaxes(2, 3)
    machine.shared.write(places, tiles.reshape(-1, 8).view(np.uint8), warps)


def _matrix_rows(
    machine: Machine, i: Instruction, address: str, mask: Mask
) -> tuple[Array, Array, Array]:
    """Indices of rows and their warps, for the warps that execute this; and a mask of these
    warps."""
    executing = machine.whole_warps(mask)
    count = 8 * int(i.parts[4].removeprefix("x"))

    def of_rows(values: Array) -> Array:
        return values.reshape(-1, WARP)[executing, :count].ravel()

    addresses = of_rows(machine.addresses(address))
    places = machine.shared.places(addresses, of_rows(machine.program_of), 16)
    return places, of_rows(machine.warp_of), executing


def _multiply_in_group(machine: Machine, i: Instruction, mask: Mask) -> None:
    if i.parts[1] == "wait_group":
        groups = machine.whole_warps(mask, WARP_GROUP)
        machine.products.wait(groups, int(i.operands[0]))
    elif i.parts[1] == "commit_group":
        machine.products.commit(machine.whole_warps(mask, WARP_GROUP))
    elif i.parts[1] == "fence":
        machine.products.fence()
    elif i.parts[1] == "mma_async":
        _begin_product(machine, i, mask)


def _begin_product(machine: Machine, i: Instruction, mask: Mask) -> None:
    """D = A B, or D + A B, of four warps: 64 x 16 by 16 x n. The result is computed at once, but it
    and the operands may not be touched until a thread waits for it."""
    shape = re.fullmatch(r"m64n(\d+)k16", i.parts[4])
    target, a, b, adds, *signs_and_layouts = i.operands
    if shape is None or i.parts[5] != "f32" or signs_and_layouts[:2] != ["1", "1"]:
        raise UnknownCode(i.text)
    executing = machine.whole_warps(mask, WARP_GROUP)
    half = i.parts[6]
    is_transposed = [layout == "1" for layout in signs_and_layouts[2:]]  # A's, if it is in memory
    if a.startswith("{"):
        left = _left_operand(machine, vector(a), half).reshape(-1, 64, _DEPTH)[executing]
    else:
        left = _shared_operand(machine, a, 64, is_transposed[0], half, executing)
    right = _shared_operand(machine, b, int(shape[1]), is_transposed[-1], half, executing)
    product = left @ right.swapaxes(1, 2)
    keeps = machine.read(adds, "pred")
    machine.products.start(executing, vector(target), vector(a) if a.startswith("{") else [])
    rows = np.arange(_GROUP_WARPS)[:, None] * 16 + _ROWS
    for place, register in enumerate(vector(target)):
        values = np.empty((len(executing), _GROUP_WARPS, WARP), np.float32)
        values[executing] = product[
            :, rows + place % 4 // 2 * 8, place // 4 * 8 + _COLUMNS + place % 2
        ]
        before = np.where(keeps, machine.read(register, "f32", by_product=True), np.float32(0))
        machine.write_by_product(register, with_one_nan(before + values.ravel()), mask)


def _shared_operand(
    machine: Machine, descriptor: str, size: int, is_transposed: bool, half: str, executing: Array
) -> Array:
    """float32 [groups, size, 16] as the descriptor says. If transposed, neighbours in memory are
    neighbours along ``size``."""
    words = machine.register(descriptor).reshape(-1, WARP_GROUP)[executing]
    if (words != words[:, :1]).any():
        raise UnknownCode("a descriptor that differs between threads")
    bits = words[:, :1, None].astype(np.int64)
    start, leading, stride = ((bits >> first & 0x3FFF) << 4 for first in (0, 16, 32))
    swizzle = {int(word) >> 62 for word in words[:, 0]}
    if len(swizzle) != 1 or swizzle == {0} or (bits >> 49 & 7).any():
        raise UnknownCode("a descriptor's layout")
    # Rows of 128, 64 or 32 bytes, eight of which are swizzled with each other in units of 16 bytes.
    pitch = 256 >> swizzle.pop()
    if is_transposed:
        index, k = np.arange(0, size, 8)[:, None], np.arange(_DEPTH)[None, :]
        width = pitch // 2
        offsets = index % width * 2 + index // width * leading + k % 8 * pitch + k // 8 * stride
    else:
        index, k = np.arange(size)[:, None], np.arange(0, _DEPTH, 8)[None, :]
        offsets = index // 8 * stride + index % 8 * pitch + k * 2
    addresses = start + offsets
    addresses ^= (addresses >> 7 & (pitch // 16 - 1)) << 4
    programs = np.broadcast_to(
        machine.program_of.reshape(-1, WARP_GROUP)[executing, :1, None], addresses.shape
    )
    places = machine.shared.places(addresses.ravel(), programs.ravel(), 16)
    groups = np.broadcast_to(np.flatnonzero(executing)[:, None, None], addresses.shape)
    data = machine.products.read_shared(places, groups.ravel())
    units = decoded(data.view(np.uint16), half).reshape(*addresses.shape, 8)
    if is_transposed:
        units = units.swapaxes(2, 3)
    return units.reshape(-1, size, _DEPTH)


TENSOR_CORES = {
    "mma": _multiply,
    "ldmatrix": _load_matrices,
    "stmatrix": _store_matrices,
    "wgmma": _multiply_in_group,
}
