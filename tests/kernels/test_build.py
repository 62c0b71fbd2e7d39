from __future__ import annotations

import ctypes
import errno
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import fastserve_kernels
import kernel_reference
import pytest
import torch
from fastserve_backend.system.cache_directory import cache_directory
from fastserve_kernels import ops
from fastserve_kernels.cpu import builder
from no_home import leave_without_home
from torch_threads import torch_threads

DEADLINE_S = builder.COMPILE_TIMEOUT_S
PATHS = [
    str(Path(fastserve_kernels.__file__).parents[1]),
    str(Path(kernel_reference.__file__).parent),
]
BUILD_ONE_FUNCTION = """
import sys
from pathlib import Path
from fastserve_kernels.cpu import builder
builder.SOURCE_DIR = Path(sys.argv[1])
print(builder.build())
"""
MULTIPLY_WITHOUT_AMX = """
import torch
import kernel_reference as reference
from fastserve_kernels import ops
from fastserve_kernels.cpu import builder
if builder.may_use_amx():  # else the library is that of all other tests
    builder.may_use_amx = lambda: False
    # A build of its own, which takes half of the time with fewer optimizations.
    builder.COMPILE_FLAGS = tuple(flag.replace("-O3", "-O1") for flag in builder.COMPILE_FLAGS)
ops.set_cpu_backend("compiled")
weight, x = torch.randn(40, 48).bfloat16(), torch.randn(33, 48).bfloat16()
expected = reference.linear(x, weight, None, False).bfloat16()
torch.testing.assert_close(ops.PackedLinear(weight)(x), expected)
kv, table = torch.randn(3, 1, 2, 2, 16, 48).bfloat16(), torch.arange(3, dtype=torch.int32)
query, context = torch.randn(40, 2, 48).bfloat16(), torch.tensor([40], dtype=torch.int32)
table_starts, starts = torch.zeros(40).int(), torch.tensor([0, 40], dtype=torch.int32)
rule = ops.AttentionRule(0.1)
out = ops.paged_prefill(query, kv, 0, table, table_starts[:1], context, starts, rule)
lengths = torch.arange(1, 41)
expected = reference.paged_attention(query, kv, 0, table, table_starts, lengths, rule, 48)
torch.testing.assert_close(out, expected.bfloat16(), atol=0.02, rtol=0.02)
"""
PRINT_BACKEND = """
from fastserve_kernels import ops
print(ops.cpu_backend())
"""
PRINT_OPENMP_LIBRARIES = """
import torch
from fastserve_kernels import ops
ops.set_cpu_backend("compiled")
ops.greedy_tokens(torch.randn(64, 1024))
torch.randn(512, 512) @ torch.randn(512, 512)
lines = open("/proc/self/maps").read().splitlines()
print(len({line.split()[-1] for line in lines if "gomp" in line.lower()}))
"""


def start(code: str, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    paths = os.pathsep.join([*PATHS, os.environ.get("PYTHONPATH", "")])
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        env={**os.environ, "PYTHONPATH": paths, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> tuple[str, str]:
    out, errors = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, errors
    return out.strip(), errors


@pytest.fixture
def kernels_again(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Restores the kernels after tests that break the build."""
    before = ops.cpu_backend()
    yield
    monkeypatch.undo()
    ops.set_cpu_backend(before)


@pytest.fixture
def one_function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """The folder of a source with one function, which the builder uses, and its empty cache."""
    source, cache = tmp_path / "src", tmp_path / "cache"
    source.mkdir()
    (source / "one.cpp").write_text('extern "C" int one() { return 1; }\n')
    monkeypatch.setattr(builder, "SOURCE_DIR", source)
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    return source, cache


def test_one_of_two_processes_builds(
    one_function: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, cache = one_function
    compiler, log = tmp_path / "logging-c++", tmp_path / "log"
    compiler.write_text(f'#!/bin/sh\necho "$@" >> {log}\nexec {builder.find_compiler()} "$@"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    both = [start(BUILD_ONE_FUNCTION, str(source), XDG_CACHE_HOME=str(cache)) for _ in range(2)]
    first, second = (Path(finish(process)[0]) for process in both)
    assert first == second
    assert log.read_text().count("-shared ") == 1, "the other one waits"
    assert list(first.parent.iterdir()) == [first], "one library, and no build folder left"
    assert first.parent.stat().st_mode & 0o777 == 0o700
    assert ctypes.CDLL(str(first)).one() == 1

    built = first.stat().st_mtime_ns
    assert builder.build() == first
    assert first.stat().st_mtime_ns == built, "a cached library is not built again"
    (source / "one.cpp").write_text('extern "C" int one() { return 2; }\n')
    assert builder.build() != first


@pytest.mark.usefixtures("one_function")
def test_what_killed_builds_left_goes() -> None:
    library = builder.build()
    old, running = library.with_name("build-old"), library.with_name("build-running")
    for folder in (old, running):
        folder.mkdir()
        (folder / "one.o").touch()
    long_ago = time.time() - builder.COMPILE_TIMEOUT_S - 10
    os.utime(old, (long_ago, long_ago))
    assert builder.build() == library
    assert sorted(library.parent.iterdir()) == [running, library]


@pytest.mark.usefixtures("kernels_again")
def test_no_compiler_falls_back_with_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    assert ops.set_cpu_backend("auto") == "torch"
    assert "no C++ compiler found: install g++" in caplog.text
    with pytest.raises(builder.BuildError):
        ops.set_cpu_backend("compiled")
    assert ops.PackedLinear(torch.ones(2, 2).half()).path == "torch"


def test_without_leave_to_use_amx_nothing_does() -> None:
    """An AMX instruction would end the process by a signal."""
    finish(start(MULTIPLY_WITHOUT_AMX))


@pytest.mark.usefixtures("kernels_again")
def test_failing_compiler_falls_back_with_its_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    compiler = tmp_path / "broken-c++"
    compiler.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && exit 0\necho no such flag >&2\nexit 1\n'
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", str(compiler))
    assert ops.set_cpu_backend("auto") == "torch"
    assert "no such flag" in caplog.text
    assert not list((tmp_path / "fastserve" / "kernels").iterdir())


@pytest.mark.usefixtures("kernels_again")
@pytest.mark.parametrize("broken", ["mkdtemp", "fsync", "replace"])
def test_a_cache_that_takes_no_more_falls_back_with_a_reason(
    one_function: tuple[Path, Path],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    broken: str,
) -> None:
    """The cache's folder exists and is the user's own, but is read-only or over its quota."""

    def fail(*arguments: object, **options: object) -> None:
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    _, cache = one_function
    monkeypatch.setattr(tempfile if broken == "mkdtemp" else os, broken, fail)
    assert ops.set_cpu_backend("auto") == "torch"
    assert "Disk quota exceeded; set XDG_CACHE_HOME to a directory" in caplog.text
    assert not list((cache / "fastserve" / "kernels").iterdir())


@pytest.mark.usefixtures("kernels_again")
@pytest.mark.parametrize("mended", [True, False])
def test_a_damaged_library_is_built_once_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mended: bool
) -> None:
    made = tmp_path / "made.so"
    made.write_bytes(builder.build().read_bytes() if mended else b"no library")
    compiler = tmp_path / "copying-c++"
    compiler.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && exit 0\n'
        f'while [ "$1" != -o ]; do shift; done\ncp {made} "$2"\n'
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", str(compiler))
    library = builder.build()
    library.write_bytes(b"")
    if mended:
        assert ops.set_cpu_backend("compiled") == "compiled"
    else:
        with pytest.raises(builder.BuildError, match="cannot be loaded"):
            ops.set_cpu_backend("compiled")
    assert library.read_bytes() == made.read_bytes()


@pytest.mark.parametrize("name", ["fastserve", "fastserve/kernels"])
def test_a_cache_that_others_can_write_to_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    folder = tmp_path / name
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(builder.BuildError, match=f"writable by you only; run `chmod go-w {folder}"):
        builder.build()


@pytest.mark.usefixtures("one_function")
def test_a_library_that_others_can_write_to_is_built_again() -> None:
    library = builder.build()
    made = library.read_bytes()
    assert library.stat().st_mode & 0o777 == 0o700
    library.write_bytes(b"of another user")
    library.chmod(0o722)
    assert builder.build() == library
    assert library.read_bytes() == made


@pytest.mark.usefixtures("kernels_again")
def test_a_user_without_a_home_has_no_compiled_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    leave_without_home(monkeypatch)
    monkeypatch.chdir(tmp_path)
    assert ops.set_cpu_backend("auto") == "torch"
    assert "set HOME or XDG_CACHE_HOME to an absolute path" in caplog.text
    assert list(tmp_path.iterdir()) == [], "what lies in the working directory is not loaded"


@pytest.mark.parametrize("home", [None, "", "relative", "/absolute"])
@pytest.mark.parametrize("cache", [None, "", "relative", "/absolute"])
def test_the_engine_and_the_kernels_know_one_cache(
    monkeypatch: pytest.MonkeyPatch, home: str | None, cache: str | None
) -> None:
    for variable, value in (("HOME", home), ("XDG_CACHE_HOME", cache)):
        monkeypatch.delenv(variable, raising=False)
        if value is not None:
            monkeypatch.setenv(variable, value)
    assert builder.user_cache() / "fastserve" / "kernels" == cache_directory("kernels")


def test_environment_forces_the_fallback() -> None:
    out, errors = finish(start(PRINT_BACKEND, FASTSERVE_CPU_KERNELS="torch"))
    assert (out, errors) == ("torch", "")


def test_unknown_choice_is_refused() -> None:
    with pytest.raises(ValueError, match="'auto', 'compiled', 'torch' or 'triton'"):
        ops.set_cpu_backend("numba")  # type: ignore[arg-type]


def test_one_openmp_runtime_in_the_process() -> None:
    assert finish(start(PRINT_OPENMP_LIBRARIES))[0] == "1"


def test_kernels_run_on_torch_threads() -> None:
    """Results do not depend on torch's number of threads."""
    ops.set_cpu_backend("compiled")
    linear = ops.PackedLinear(torch.randn(256, 128))
    x = torch.randn(20, 128)
    with torch_threads(1):
        alone = linear(x)
    assert torch.equal(alone, linear(x))
