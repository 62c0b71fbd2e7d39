"""Memory that a gateway takes for bodies which are large when they are read.

    python benchmarks/gateway_memory.py

For each kind of body a fresh ``fastserve gateway`` with the limits of docker-compose.yml gets eight
of the largest at once, three times. There is no model server behind it, and half of them are
refused: no more than --max-held-bytes are held.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial

import httpx2
import psutil
from rich.console import Console
from rich.table import Table

MAX_BODY_BYTES, MAX_HELD_BYTES = 2 << 20, 8 << 20
AT_ONCE, ROUNDS = 8, 3
MIB = 1 << 20
HEADERS = {"Content-Type": "application/json"}
CHAT, COMPLETIONS = "chat/completions", "completions"
MESSAGES, PROMPT = '{"model": "fastserve", "messages": [', '{"model": "fastserve", "prompt": ['
UNKNOWN = '{"model": "fastserve", "prompt": "a", "unknown": ['
# Name, route, how the body begins, what is repeated in the list.
KINDS = (
    ("messages without text", CHAT, MESSAGES, '{"role":"u","content":""}'),
    ("token ids", COMPLETIONS, PROMPT, "7"),
    ("texts", COMPLETIONS, PROMPT, '"ab"'),
    ("unknown: empty lists", COMPLETIONS, UNKNOWN, "[]"),
    ("unknown: small objects", COMPLETIONS, UNKNOWN, '{"":0}'),
    ("unknown: nested objects", COMPLETIONS, UNKNOWN, '{"":' * 150 + "0" + "}" * 150),
    ("unknown: nested lists", COMPLETIONS, UNKNOWN, "[" * 150 + "]" * 150),
)


@contextmanager
def gateway() -> Iterator[tuple[str, psutil.Process]]:
    command = [sys.executable, "-m", "fastserve_backend", "gateway"]
    command += ["--port", "0", "--url", "grpc://127.0.0.1:9"]
    command += [f"--max-body-bytes={MAX_BODY_BYTES}", f"--max-held-bytes={MAX_HELD_BYTES}"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            found = re.search(r"http://\S+/v1", process.stderr.readline())
            assert found is not None
            with ThreadPoolExecutor(1) as pool:
                pool.submit(process.stderr.read)  # a full pipe would stop it
                yield found[0], psutil.Process(process.pid)
                process.terminate()
        finally:
            process.kill()


def peak_bytes(process: psutil.Process) -> int:
    with open(f"/proc/{process.pid}/status", encoding="utf-8") as status:
        (kib,) = re.findall(r"VmHWM:\s+(\d+) kB", status.read())
    return int(kib) * 1024


def main() -> None:
    table = Table("", "idle, MiB", "peak, MiB", "bytes a byte held")
    for name, route, head, part in KINDS:
        repeats = (MAX_BODY_BYTES - len(head) - 2) // (len(part) + 1)
        body = (head + ",".join([part] * repeats) + "]}").encode()
        with gateway() as (url, process), ThreadPoolExecutor(AT_ONCE) as pool:
            idle = process.memory_info().rss
            post = partial(httpx2.post, f"{url}/{route}", headers=HEADERS, timeout=300)
            for _ in range(ROUNDS):
                for sent in [pool.submit(post, content=body) for _ in range(AT_ONCE)]:
                    sent.result()
            peak = peak_bytes(process)
        ratio = (peak - idle) / MAX_HELD_BYTES
        table.add_row(name, f"{idle / MIB:.0f}", f"{peak / MIB:.0f}", f"{ratio:.0f}")
    Console().print(table)


if __name__ == "__main__":
    main()
