"""Gloo between ranks, out of reach of the host's other users.

Gloo connects ranks over TCP, and every user of a host can connect to a port of loopback. Gloo
aborts the rank if a stranger sends garbage while the ranks connect, and holds the connections of
strangers for ever. So

- while the ranks connect, the kernel drops what others send to the port. A filter on the listening
  socket lets in only those connections that the kernel lists as this user's. Each is listed once it
  has been dropped, and TCP tries again after a second;
- when they are connected, nobody listens any more: gloo needs no further connections.

Ranks of other hosts are not in the kernel's list. With several hosts only the second rule applies.
"""

from __future__ import annotations

import ctypes
import logging
import os
import socket
import stat
import struct
import tempfile
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

from torch.distributed import ProcessGroupGloo, Store  # type: ignore[attr-defined]

from fastserve_backend.errors import EngineError
from fastserve_backend.system.temporary_directory import short_temporary_directory

# How often the kernel's list is read while the ranks connect.
_POLL_S = 0.05
# A stranger who connects within the fraction of a millisecond before the filter is there costs a
# port. So many in a row are no chance.
_PORT_TRIES = 100
_SO_ATTACH_FILTER = 26  # Linux's, which the module `socket` does not have
# Instructions of classic BPF: load a word or half a word, jump if equal, return.
_LOAD_WORD, _LOAD_HALF, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x28, 0x15, 0x06
# A filter of TCP sees a packet from its TCP header on. Offsets from here on count from the IP
# header.
_FROM_IP_HEADER = 0xFFF00000
_SOURCE_ADDRESS, _SOURCE_PORT = _FROM_IP_HEADER + 12, 0
_WHOLE_PACKET = 0x7FFFFFFF
# Longest path of the directory for temporary files: that of a Unix socket is short.
_MOST_PARENT_BYTES = 70
# States in /proc/net/tcp.
_SYN_SENT, _LISTEN = 2, 10
_log = logging.getLogger(__name__)


class _Address(NamedTuple):
    """Of an IPv4 socket, as numbers."""

    host: int
    port: int


class _Connection(NamedTuple):
    """A row of /proc/net/tcp: one end of a connection, seen from its owner."""

    local: _Address
    remote: _Address
    state: int
    uid: int


def private_gloo(
    is_one_host: bool,
) -> Callable[[Store, int, int, timedelta], ProcessGroupGloo]:
    """What makes torch's process groups, for ``Backend.register_backend``.

    Args:
        is_one_host: all ranks are processes of this user on this host.
    """

    is_filtered = is_one_host and _can_filter()

    def connect(store: Store, rank: int, size: int, timeout: timedelta) -> ProcessGroupGloo:
        devices: list[ProcessGroupGloo.Device] = []
        ports: dict[int, _Address] = {}
        for interface in os.environ["GLOO_SOCKET_IFNAME"].split(","):
            device, opened = _open_device(interface, is_filtered)
            devices.append(device)
            ports |= opened
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = devices
        options._threads = 2 * len(devices)  # as torch has by default
        options._timeout = timeout
        with _admitting(ports if is_filtered else {}):
            group = ProcessGroupGloo(store, rank, size, options)
        for descriptor in ports:
            _stop_listening(descriptor)
        return group

    return connect


def _can_filter() -> bool:
    """Whether this kernel has what the first rule needs. Some sandboxes' kernels have not."""
    try:
        with socket.socket() as probe:
            _admit(probe.fileno(), ())
        _connections()
    except OSError as error:
        _log.warning("other users of this host can disturb the start of the ranks: %s", error)
        return False
    return True


def _open_device(
    interface: str, is_filtered: bool
) -> tuple[ProcessGroupGloo.Device, dict[int, _Address]]:
    """A device of gloo's, and the ports on which it listens, by descriptor.

    With ``is_filtered`` nobody is connected to these ports, and nobody can connect until
    ``_admitting``.
    """
    for _ in range(_PORT_TRIES):
        others = _listening()
        device = ProcessGroupGloo.create_device(interface=interface, lazy_init=False)
        ports = {fd: address for fd, address in _listening().items() if fd not in others}
        if not is_filtered:
            return device, ports
        for descriptor in ports:
            _admit(descriptor, ())
        used = {row.local for row in _connections() if row.state != _LISTEN}
        if used.isdisjoint(ports.values()):
            return device, ports
    raise EngineError(
        f"strangers connected to each of {_PORT_TRIES} ports of a rank before they were closed to "
        "them; see docs/several_hosts.md for a firewall rule"
    )


@contextmanager
def _admitting(ports: dict[int, _Address]) -> Iterator[None]:
    """Let this user's connections in meanwhile."""
    is_over = threading.Event()

    def run() -> None:
        admitted: dict[int, set[_Address]] = {descriptor: set() for descriptor in ports}
        while not is_over.wait(_POLL_S):
            callers = [row for row in _connections() if row.uid == os.geteuid()]
            for descriptor, port in ports.items():
                new = {row.local for row in callers if (row.remote, row.state) == (port, _SYN_SENT)}
                if not new <= admitted[descriptor]:
                    admitted[descriptor] |= new
                    _admit(descriptor, admitted[descriptor])

    thread = threading.Thread(target=run, name="rank-admission", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def _listening() -> dict[int, _Address]:
    """The listening TCP sockets of this process, by descriptor."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        descriptor = int(name)
        with suppress(OSError):  # the directory's own descriptor is closed already
            if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                continue
            with _borrowed(descriptor) as own:
                is_ip = own.family == socket.AF_INET
                if is_ip and own.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    host, port = own.getsockname()
                    found[descriptor] = _Address(_number(socket.inet_aton(host)), port)
    return found


def _connections() -> list[_Connection]:
    """All IPv4 TCP sockets of this network namespace."""
    rows = Path("/proc/net/tcp").read_text(encoding="ascii").splitlines()[1:]
    found = []
    for row in rows:
        _, local, remote, state, _, _, _, uid, *_ = row.split()
        found.append(_Connection(_address(local), _address(remote), int(state, 16), int(uid)))
    return found


def _address(text: str) -> _Address:
    """Reads ``0100007F:1F90``: the bytes of the host in this machine's order, then the port."""
    host, port = text.split(":")
    return _Address(_number(struct.pack("=I", int(host, 16))), int(port, 16))


def _number(host: bytes) -> int:
    return int.from_bytes(host, "big")


def _admit(descriptor: int, callers: Collection[_Address]) -> None:
    """Have the kernel drop all packets to this listening socket but those of the callers."""
    program = []
    for host, port in callers:
        program += [
            (_LOAD_WORD, 0, 0, _SOURCE_ADDRESS),
            (_JUMP_IF_EQUAL, 0, 3, host),
            (_LOAD_HALF, 0, 0, _SOURCE_PORT),
            (_JUMP_IF_EQUAL, 0, 1, port),
            (_RETURN, 0, 0, _WHOLE_PACKET),
        ]
    program.append((_RETURN, 0, 0, 0))
    code = b"".join(struct.pack("=HBBI", *instruction) for instruction in program)
    buffer = ctypes.create_string_buffer(code, len(code))
    with _borrowed(descriptor) as own:
        fprog = struct.pack("@HP", len(program), ctypes.addressof(buffer))
        own.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, fprog)


def _stop_listening(descriptor: int) -> None:
    """Close this socket of gloo's.

    Gloo still holds its number, may be about to accept, and aborts if that fails other than with
    "nobody is there". So the number becomes that of a socket at which nobody can ever be: a Unix
    socket whose path is gone.
    """
    with (
        tempfile.TemporaryDirectory(dir=short_temporary_directory(_MOST_PARENT_BYTES)) as directory,
        socket.socket(socket.AF_UNIX) as nobody,
    ):
        nobody.setblocking(False)
        nobody.bind(f"{directory}/closed")
        nobody.listen()
        os.dup2(nobody.fileno(), descriptor, inheritable=False)


@contextmanager
def _borrowed(descriptor: int) -> Iterator[socket.socket]:
    """The socket with this descriptor, which stays open."""
    borrowed = socket.socket(fileno=descriptor)
    try:
        yield borrowed
    finally:
        borrowed.detach()
