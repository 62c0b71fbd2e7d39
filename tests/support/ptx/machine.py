"""Threads that run a program: their registers and positions, and helpers for instructions."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache

import numpy as np

from ptx.async_copies import AsyncCopies
from ptx.earlier_launches import EarlierLaunches
from ptx.errors import MachineError, UnknownCode
from ptx.formats import SIZES, TYPES, UNSIGNED, Array
from ptx.global_order import GlobalOrder
from ptx.memory import SHARED_START, GlobalMemory, SharedMemory
from ptx.products import Products
from ptx.program import Instruction, Program

WARP = 32
WARP_GROUP = 4 * WARP
NO_GROUPS = np.zeros(0, np.intp)
_REGISTERS = {
    "p": np.bool_, "rs": np.uint16, "r": np.uint32, "rd": np.uint64,
    "s": np.uint8, "f": np.uint32, "l": np.uint32, "h": np.uint32,
    "w": np.uint32,  # of inline assembly
}  # fmt: skip
UNWRITTEN = 0xCDCDCDCDCDCDCDCD
"""Bits of registers that were never written, which hold arbitrary values."""
_ADDRESS = re.compile(r"\[\s*(%?\w+)\s*(?:\+\s*(-?\d+))?\s*\]")

Mask = Array
"""bool [threads]: the threads that execute an instruction."""
Execute = Callable[["Machine", Instruction, Mask], None]


class Machine:
    """All threads of some programs of a grid, in lockstep.

    The threads furthest back in the code go first. So threads that diverge meet again where their
    paths do, as on a GPU, and none waits for another except at barriers.
    """

    def __init__(
        self,
        program: Program,
        parameters: Mapping[str, int],
        grid: tuple[int, int, int],
        ids: Sequence[int],
        memory: GlobalMemory,
        shared_bytes: int,
        order: GlobalOrder | None = None,
        earlier: EarlierLaunches | None = None,
    ) -> None:
        """parameters: bits. ids: of the programs of the grid that run here. order: of all programs'
        accesses to memory; None: not checked. earlier: what may still run when this launch starts;
        None: nothing."""
        self.program = program
        self.parameters = parameters
        self.memory = memory
        self.order = order
        self._earlier = earlier
        self.num_programs = len(ids)
        self.threads = len(ids) * program.threads
        self.shared = SharedMemory(len(ids), shared_bytes, program.shared_unit)
        self.products = Products(self.shared, -(-self.threads // WARP_GROUP))
        threads = np.arange(self.threads)
        self.program_of = threads // program.threads
        self.warp_of = threads // WARP
        self.copies = AsyncCopies(memory, self.shared, self.warp_of)
        self.ids = np.array(ids)
        self.id_of = id_of = self.ids[self.program_of]
        width, height, _ = grid
        special = {
            "%tid.x": threads % program.threads,
            "%ctaid.x": id_of % width,
            "%ctaid.y": id_of // width % height,
            "%ctaid.z": id_of // (width * height),
            "%nctaid.x": np.full(self.threads, width),
            "%nctaid.y": np.full(self.threads, height),
        }
        self._special = {name: values.astype(np.uint32) for name, values in special.items()}
        self._registers: dict[str, Array] = {}
        # Most instructions are executed by all threads. Their mask is always this very object, so
        # that nothing needs to look at its values.
        self.everyone = np.ones(self.threads, np.bool_)
        self.everyone.setflags(write=False)
        self._group_starts = np.arange(0, self.threads, WARP_GROUP)
        self._all_groups = np.ones(len(self._group_starts), np.bool_)
        self._executing = self.everyone
        self.alive = np.ones(self.threads, np.bool_)
        self._waited = np.full(self.threads, earlier is None)

    def run(self, execute: Mapping[str, Execute]) -> None:
        """execute: instructions by the first part of their names.

        Raises:
            MachineError: with the instruction, or a thread has not waited for earlier launches.
            UnknownCode: of one that is not among these.
        """
        code = self.program.instructions
        waiting = {0: self.everyone}  # by index of the instruction that they execute next
        while waiting:
            at = min(waiting)
            mask = waiting.pop(at)  # of at least one thread, all of them alive
            instruction = code[at]
            executing = mask
            if instruction.guard is not None:
                executing = self._known(mask & self._guard(instruction))
            operation = instruction.parts[0]
            go_on = mask
            if operation == "bra":
                self._join(waiting, self.program.labels[instruction.operands[0]], executing)
                go_on = mask & ~executing
            elif operation == "ret":
                self.alive &= ~executing
                go_on = mask & ~executing
            elif operation not in execute:
                raise UnknownCode(instruction.text)
            elif executing is mask or executing.any():
                self._executing = executing
                try:
                    execute[operation](self, instruction, executing)
                except MachineError as error:
                    raise MachineError(f"{instruction.text}: {error}") from None
            self._join(waiting, at + 1, go_on)
        if not self._waited.all():
            raise MachineError("threads end without griddepcontrol.wait")

    def load(self, addresses: Array, width: int, mask: Mask) -> None:
        """Checks that these threads may load global memory now. addresses: int64, one each."""
        if self._earlier is not None:
            self._earlier.check(addresses[~self._waited[mask]], width)
        if self.order is not None:
            self.order.load(addresses, width, self.id_of[mask], self.warp_of[mask])

    def store(self, addresses: Array, width: int, mask: Mask) -> None:
        """The same for a store."""
        self.check_waited(mask)
        if self.order is not None:
            self.order.store(addresses, width, self.id_of[mask], self.warp_of[mask])

    def check_waited(self, mask: Mask) -> None:
        if not self._waited[mask].all():
            raise MachineError("a store before griddepcontrol.wait")

    def wait_for_earlier(self, mask: Mask) -> None:
        self._waited |= mask

    def read(self, operand: str, type_name: str, by_product: bool = False) -> Array:
        """Of all threads. by_product: a product may add to the results of one under way."""
        dtype, size = TYPES[type_name], SIZES[type_name]
        if operand in self._special:
            return self._special[operand].view(dtype)
        if not operand.startswith("%"):
            return _constants(operand, type_name, self.threads)
        if self.products.are_under_way and not by_product:
            self.products.check_use(operand, self._groups(self._executing))
        register = self.register(operand)
        if register.itemsize != size:  # the lower part
            register = register.astype(UNSIGNED[size])
        return register.view(dtype)

    def write(self, operand: str, values: Array, mask: Mask) -> None:
        """values: of all threads, as wide as the register, or integers that are extended to it."""
        if operand == "_":
            return
        groups = self._groups(mask) if self.products.are_under_way else NO_GROUPS
        self.products.check_use(operand, groups)
        self.products.check_write(operand, groups)
        self.write_by_product(operand, values, mask)

    def write_by_product(self, operand: str, values: Array, mask: Mask) -> None:
        """As `write`, to what may be the result of a product under way."""
        register = self.register(operand)
        if values.itemsize < register.itemsize:
            values = values.astype(f"{values.dtype.kind}{register.itemsize}")
        values = values.view(register.dtype)
        if mask is self.everyone:
            np.copyto(register, values)
        else:
            np.copyto(register, values, where=mask)

    def register(self, name: str) -> Array:
        if (register := self._registers.get(name)) is None:
            register = np.full(self.threads, _unwritten(name))
            self._registers[name] = register
        return register

    def addresses(self, operand: str) -> Array:
        """int64, of all threads."""
        base, offset = _address(operand)
        if base.startswith("%"):
            start = self.register(base).astype(np.int64)
        else:
            start = _constants(base, "s64", self.threads)
        return start + offset

    def whole_warps(self, mask: Mask, size: int = WARP) -> Array:
        """The warps, or groups of another size, that execute an instruction.

        Raises:
            MachineError: of one of them only some threads do.
        """
        if mask is self.everyone:
            return np.ones(self.threads // size, np.bool_)
        of_groups = mask.reshape(-1, size)
        if (of_groups.any(1) != of_groups.all(1)).any():
            raise MachineError(f"not by all {size} threads")
        executing: Array = of_groups.all(1)
        return executing

    def _groups(self, mask: Mask) -> Array:
        """bool: the groups of four warps that have a thread in the mask."""
        if mask is self.everyone:
            return self._all_groups
        of_groups: Array = np.logical_or.reduceat(mask, self._group_starts)
        return of_groups

    def _guard(self, instruction: Instruction) -> Array:
        assert instruction.guard is not None
        guard = self.register(instruction.guard)
        return ~guard if instruction.is_negated else guard

    def _known(self, mask: Mask) -> Mask:
        """The mask itself, or ``everyone`` if it has all threads."""
        return self.everyone if mask.all() else mask

    def _join(self, waiting: dict[int, Mask], at: int, mask: Mask) -> None:
        if at in waiting:
            waiting[at] = self._known(waiting[at] | mask)
        elif mask is self.everyone or mask.any():
            waiting[at] = mask


@cache
def _address(operand: str) -> tuple[str, int]:
    """The base and the offset."""
    match = _ADDRESS.fullmatch(operand)
    if match is None:
        raise UnknownCode(f"address {operand}")
    base, offset = match.groups()
    return base, int(offset or 0)


@cache
def _unwritten(name: str) -> np.generic:
    """The value of a register that was never written.

    Raises:
        UnknownCode: no such register.
    """
    kind = re.fullmatch(r"%([a-z]+)\d+", name)
    if kind is None or kind[1] not in _REGISTERS:
        raise UnknownCode(f"register {name}")
    value: np.generic = np.array(UNWRITTEN).astype(_REGISTERS[kind[1]])[()]
    return value


@cache
def _constants(text: str, type_name: str, threads: int) -> Array:
    """The constant, for each thread."""
    return np.broadcast_to(_constant(text, type_name), threads)


@cache
def _constant(text: str, type_name: str) -> np.generic:
    dtype = np.dtype(TYPES[type_name])
    if type_name == "pred":
        return np.bool_(int(text))
    if text.startswith("0f"):
        bits = int(text[2:], 16)
    elif text.startswith("global_smem"):
        bits = SHARED_START + int(text.partition("+")[2] or 0)
    else:
        bits = int(text.rstrip("U"), 0)
    unsigned = UNSIGNED[dtype.itemsize]
    constant: np.generic = np.array(bits % 256**dtype.itemsize, unsigned).view(dtype)[()]
    return constant
