"""What ranks exchange, and whether NCCL would take it in this order.

NCCL does not check its callers. Ranks that call it in different orders wait for each other for
ever, or add up tensors of different layers. `problems` finds that in notes of all ranks.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from pathlib import Path

LAST = "destroy_process_group"
Notes = Mapping[int, Sequence["Communication"]]
"""Each rank's operations in the order of its calls."""


@dataclass(frozen=True)
class Communication:
    """One operation of one rank."""

    name: str
    members: tuple[int, ...]
    """Ranks of the communicator."""
    source: int
    """The rank that sends, or the member of a group that broadcasts."""
    shape: tuple[int, ...]
    dtype: str
    mode: str
    """eager, captured or replayed."""
    thread: str
    stream: int
    ended: dict[int, int]
    """By stream: how many of its operations have ended when this one has."""

    @property
    def communicator(self) -> tuple[str, tuple[int, ...]]:
        """Two ranks that send have a communicator beside that of their group."""
        return "pair" if self.name in ("send", "recv") else "group", self.members

    def is_before(self, other: Communication) -> bool:
        """Whether this one has ended when ``other``, a later one of the same rank, starts."""
        own, of_other = self.ended[self.stream], Counter(other.ended)
        of_other[other.stream] -= 1  # that is the other itself
        return of_other[self.stream] >= own

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, line: str) -> Communication:
        values = json.loads(line)
        values |= {name: tuple(values[name]) for name in ("members", "shape")}
        values["ended"] = {int(stream): n for stream, n in values["ended"].items()}
        return cls(**values)

    def __str__(self) -> str:
        return f"{self.mode} {self.name} {list(self.shape)} {self.dtype} from {self.source}"


def read_notes(directory: Path) -> dict[int, list[Communication]]:
    """Without a last line that its rank, which was killed, has not written to its end."""
    return {
        int(file.name): [
            Communication.from_json(line)
            for line in file.read_text().splitlines(keepends=True)
            if line.endswith("\n")
        ]
        for file in directory.iterdir()
    }


def problems(notes: Notes, *, have_ended: bool = True) -> list[str]:
    """
    Args:
        have_ended: every rank has ended by itself. False: some were killed, so each may have done
            less than others.
    """
    found = [*_differences(notes, have_ended), *_waits_in_a_circle(notes)]
    for rank, operations in notes.items():
        found += [f"rank {rank}: {problem}" for problem in _of_a_rank(operations, have_ended)]
    return found


def _differences(notes: Notes, have_ended: bool) -> Iterator[str]:
    """The first difference between the members of each communicator."""
    by_communicator: dict[object, dict[int, list[Communication]]] = defaultdict(dict)
    for rank, operations in notes.items():
        for one in operations:
            by_communicator[one.communicator].setdefault(rank, []).append(one)
    for by_rank in by_communicator.values():
        members = next(iter(by_rank.values()))[0].members
        sequences = [by_rank.get(rank, []) for rank in members]
        for index in range(max(map(len, sequences))):
            ones = [one[index] if index < len(one) else None for one in sequences]
            if not have_ended and None in ones:
                break
            if not _match(members, ones):
                told = "; ".join(f"rank {r}: {one}" for r, one in zip(members, ones, strict=True))
                yield f"operation {index} of the communicator of ranks {list(members)}: {told}"
                break


def _match(members: Sequence[int], ones: Sequence[Communication | None]) -> bool:
    """Whether these are one operation of a communicator."""
    first = ones[0]
    for rank, one in zip(members, ones, strict=True):
        if one is None or first is None:
            return False
        if (one.source, one.shape, one.dtype, one.mode) != (
            first.source,
            first.shape,
            first.dtype,
            first.mode,
        ):
            return False
        if first.communicator[0] == "pair":
            if one.name != ("send" if rank == one.source else "recv"):
                return False
        elif one.name != first.name:
            return False
    return True


def _waits_in_a_circle(notes: Notes) -> Iterator[str]:
    """Each operation ends when all members of its communicator have called it. So there has to be
    one order of all operations that every rank keeps."""
    before: dict[object, set[object]] = defaultdict(set)
    for operations in notes.values():
        numbers: Counter[object] = Counter()
        own = []
        for one in operations:
            own.append((one.communicator, numbers[one.communicator]))
            numbers[one.communicator] += 1
        for earlier, later in pairwise(own):
            before[later].add(earlier)
    try:
        TopologicalSorter(before).prepare()
    except CycleError as error:
        yield f"ranks wait for each other in a circle: {error.args[1]}"


def _of_a_rank(operations: Sequence[Communication], has_ended: bool) -> Iterator[str]:
    threads = {one.thread for one in operations}
    if len(threads) > 1:
        yield f"threads {sorted(threads)} communicate"
    last: dict[object, Communication] = {}
    for one in operations:
        previous = last.get(one.communicator)
        if previous is None and one.mode != "eager":
            yield f"a capture would have to make the communicator of {one}"
        # A captured operation runs when it is replayed. Replays are noted on their own.
        if one.mode != "captured":
            if previous is not None and not previous.is_before(one):
                yield f"{one} may run beside {previous}"
            last[one.communicator] = one
    if has_ended and (not operations or operations[-1].name != LAST):
        yield f"its last operation is not {LAST}"
