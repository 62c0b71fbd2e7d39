"""Instructions that load, store, copy, and meet other threads."""

from __future__ import annotations

import numpy as np

from ptx.async_copies import NOTHING
from ptx.errors import MachineError, UnknownCode
from ptx.formats import SIZES, TYPES, UNSIGNED
from ptx.machine import WARP, Machine, Mask
from ptx.program import Instruction, vector


def _index(machine: Machine, mask: Mask) -> Mask | slice:
    """Selects the threads of the mask, without a copy where these are all."""
    return slice(None) if mask is machine.everyone else mask


def _load(machine: Machine, i: Instruction, mask: Mask) -> None:
    size = SIZES[i.type]
    if i.parts[1] == "param":
        bits = machine.parameters[i.operands[1].strip("[]")] % 256**size
        values = np.array([bits], UNSIGNED[size]).view(TYPES[i.type])
        machine.write(i.operands[0], np.broadcast_to(values, machine.threads), mask)
        return
    registers = vector(i.operands[0])
    width = size * len(registers)
    chosen = _index(machine, mask)
    addresses = machine.addresses(i.operands[1])[chosen]
    if i.parts[1] == "global":
        data = machine.memory.read(addresses, width)
        machine.load(addresses, width, mask)
    elif i.parts[1] == "shared":
        places = machine.shared.places(addresses, machine.program_of[chosen], width)
        data = machine.shared.read(places, width, machine.warp_of[chosen])
    else:
        raise UnknownCode(i.text)
    values = np.empty((len(registers), machine.threads), TYPES[i.type])
    values[:, chosen] = data.view(TYPES[i.type]).T
    for register, of_register in zip(registers, values, strict=True):
        machine.write(register, of_register, mask)


def _store(machine: Machine, i: Instruction, mask: Mask) -> None:
    chosen = _index(machine, mask)
    values = np.stack([machine.read(one, i.type)[chosen] for one in vector(i.operands[1])], axis=1)
    data = values.view(np.uint8)
    addresses = machine.addresses(i.operands[0])[chosen]
    if i.parts[1] == "global":
        machine.memory.write(addresses, data)
        machine.store(addresses, data.shape[1], mask)
    elif i.parts[1] == "shared":
        places = machine.shared.places(addresses, machine.program_of[chosen], data.shape[1])
        machine.shared.write(places, data, machine.warp_of[chosen])
    else:
        raise UnknownCode(i.text)


def _async_copy(machine: Machine, i: Instruction, mask: Mask) -> None:
    if i.parts[2] == "commit_group":
        machine.copies.commit(mask)
    elif i.parts[2] == "wait_group":
        machine.copies.wait(mask, int(i.operands[0]))
    elif i.parts[3:] == ("shared", "global"):
        width = int(i.operands[2], 0)
        sources = machine.addresses(i.operands[1])[mask]
        if len(i.operands) > 3:  # bytes that are read; the rest becomes zeros
            read = machine.read(i.operands[3], "u32")[mask]
            if not np.isin(read, (0, width)).all():
                raise UnknownCode(f"{i.text}: of a part")
            sources = np.where(read == width, sources, NOTHING)
        targets = machine.addresses(i.operands[0])[mask]
        places = machine.shared.places(targets, machine.program_of[mask], width)
        machine.copies.start(np.flatnonzero(mask), sources, places, width)
        real = sources != NOTHING
        reads = mask.copy()
        reads[mask] = real
        machine.load(sources[real], width, reads)
    else:
        raise UnknownCode(i.text)


def _barrier(machine: Machine, i: Instruction, mask: Mask) -> None:
    if i.parts[1] == "warp":
        return  # the threads of a warp are together
    if i.operands != ("0",):
        raise UnknownCode(i.text)
    meets = mask.reshape(machine.num_programs, -1)
    programs = meets.any(1)
    if (meets != machine.alive.reshape(meets.shape))[programs].any():
        raise MachineError("not all threads of a program meet")
    machine.shared.barrier(programs)
    if machine.order is not None:
        machine.order.barrier(machine.ids[programs])


def _atomic(machine: Machine, i: Instruction, mask: Mask) -> None:
    """The threads come one after the other."""
    if i.parts[1:] != ("global", "gpu", "acq_rel", "add", "u32"):
        raise UnknownCode(i.text)
    machine.check_waited(mask)
    added = machine.read(i.operands[2], "u32")
    addresses = machine.addresses(i.operands[1])
    before = np.zeros(machine.threads, np.uint32)
    for thread in np.flatnonzero(mask):
        place = addresses[thread : thread + 1]
        before[thread] = machine.memory.read(place, 4).view(np.uint32).item()
        machine.memory.write(
            place, (before[thread : thread + 1] + added[thread]).view(np.uint8)[None]
        )
        if machine.order is not None:
            program = int(machine.id_of[thread])
            machine.order.add(int(place[0]), program, releases=True, acquires=True)
    machine.write(i.operands[0], before, mask)


def _shuffle(machine: Machine, i: Instruction, mask: Mask) -> None:
    machine.whole_warps(mask)
    limit = "0" if i.parts[2] == "up" else "31"
    if i.operands[3:] != (limit, "-1"):
        raise UnknownCode(i.text)
    values = machine.read(i.operands[1], "b32").reshape(-1, WARP)
    lanes = machine.read(i.operands[2], "u32").reshape(-1, WARP).astype(np.int64)
    own = np.arange(WARP)
    below = np.where(own >= lanes, own - lanes, own)
    source = {"bfly": own ^ lanes, "idx": lanes, "up": below}[i.parts[2]] % WARP
    machine.write(i.operands[0], np.take_along_axis(values, source, axis=1).ravel(), mask)


_REDUCTIONS = {"add": np.add, "min": np.minimum, "max": np.maximum}


def _reduce_warp(machine: Machine, i: Instruction, mask: Mask) -> None:
    machine.whole_warps(mask)
    if i.parts[1] != "sync" or i.parts[2] not in _REDUCTIONS or i.type not in ("s32", "u32"):
        raise UnknownCode(i.text)
    if (machine.read(i.operands[2], "b32")[mask] != 0xFFFFFFFF).any():
        raise MachineError("a result of some threads of a warp")
    values = machine.read(i.operands[1], i.type).reshape(-1, WARP)
    results = _REDUCTIONS[i.parts[2]].reduce(values, axis=1, dtype=values.dtype, keepdims=True)
    machine.write(i.operands[0], np.broadcast_to(results, values.shape).ravel(), mask)


def _grid_dependency(machine: Machine, i: Instruction, mask: Mask) -> None:
    if i.parts[1] == "wait":
        machine.wait_for_earlier(mask)
    elif i.parts[1] != "launch_dependents":  # no later launch runs here before this one has ended
        raise UnknownCode(i.text)


def _nothing(machine: Machine, i: Instruction, mask: Mask) -> None:
    """Does nothing for instructions that order accesses, which are in order here."""


DATA_MOVEMENT = {
    "ld": _load,
    "st": _store,
    "cp": _async_copy,
    "atom": _atomic,
    "bar": _barrier,
    "shfl": _shuffle,
    "redux": _reduce_warp,
    "fence": _nothing,
    "griddepcontrol": _grid_dependency,
}
