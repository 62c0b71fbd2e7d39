"""Imports go one way, and the engine's process stays free of torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import fastserve_backend
import fastserve_client
import fastserve_kernels
import pytest
from fresh_interpreter import loaded_modules

BACKEND = Path(fastserve_backend.__file__).parent
CLIENT = Path(fastserve_client.__file__).parents[1]
KERNELS = Path(fastserve_kernels.__file__).parent


def imported_names(path: Path) -> set[str]:
    """Absolute names of everything that the file imports, at any depth of its code."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: a relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def is_of(name: str, package: str) -> bool:
    return f"{name}.".startswith(f"{package}.")


def python_files(folder: Path) -> list[Path]:
    files = sorted(folder.rglob("*.py"))
    assert files
    return files


# The parts of the backend in the direction of imports: each may import later ones. All may import
# "rank_protocol" and "system".
FORBIDDEN = {
    BACKEND / "serving": ("torch", "fastserve_backend.cli", "fastserve_backend.worker",
                          "fastserve_backend.scheduler", "fastserve_backend.kv_cache",
                          "fastserve_backend.executor"),
    BACKEND / "simulation": ("torch", "fastserve_backend.serving", "fastserve_backend.worker",
                             "fastserve_backend.models", "fastserve_backend.length_prediction"),
    BACKEND / "profile": ("torch", "fastserve_backend.scheduler", "fastserve_backend.kv_cache",
                          "fastserve_backend.engine", "fastserve_backend.serving",
                          "fastserve_backend.worker", "fastserve_backend.models",
                          "fastserve_backend.simulation", "fastserve_backend.length_prediction"),
    BACKEND / "executor": ("torch", "fastserve_backend.engine", "fastserve_backend.serving",
                           "fastserve_backend.scheduler", "fastserve_backend.kv_cache",
                           "fastserve_backend.profile", "fastserve_backend.worker",
                           "fastserve_backend.models"),
    BACKEND / "scheduler": ("torch", "time", "zmq", "fastserve_backend.kv_cache",
                            "fastserve_backend.profile", "fastserve_backend.executor",
                            "fastserve_backend.engine", "fastserve_backend.serving",
                            "fastserve_backend.worker", "fastserve_backend.models",
                            "fastserve_backend.checkpoints"),
    BACKEND / "kv_cache": ("torch", "time", "zmq", "fastserve_backend.scheduler",
                           "fastserve_backend.profile", "fastserve_backend.executor",
                           "fastserve_backend.engine", "fastserve_backend.serving",
                           "fastserve_backend.worker", "fastserve_backend.models",
                           "fastserve_backend.checkpoints"),
    BACKEND / "length_prediction": ("fastserve_backend.engine", "fastserve_backend.serving",
                                    "fastserve_backend.scheduler", "fastserve_backend.kv_cache",
                                    "fastserve_backend.executor", "fastserve_backend.worker",
                                    "fastserve_backend.models"),
    BACKEND / "grammars": ("torch", "fastserve_backend.engine", "fastserve_backend.serving",
                           "fastserve_backend.scheduler", "fastserve_backend.kv_cache",
                           "fastserve_backend.executor", "fastserve_backend.worker",
                           "fastserve_backend.models", "fastserve_backend.checkpoints"),
    BACKEND / "worker": ("fastserve_backend.engine", "fastserve_backend.grammars",
                         "fastserve_backend.serving",
                         "fastserve_backend.scheduler", "fastserve_backend.kv_cache",
                         "fastserve_backend.profile", "fastserve_backend.executor"),
    BACKEND / "models": ("fastserve_backend.worker", "fastserve_backend.engine",
                         "fastserve_backend.serving", "fastserve_backend.scheduler",
                         "fastserve_backend.kv_cache", "fastserve_backend.executor"),
    BACKEND / "checkpoints": ("torch", "fastserve_backend.models", "fastserve_backend.worker",
                              "fastserve_backend.engine", "fastserve_backend.serving",
                              "fastserve_backend.scheduler", "fastserve_backend.kv_cache",
                              "fastserve_backend.executor", "fastserve_backend.profile"),
    BACKEND / "rank_protocol": ("torch", "fastserve_backend.models", "fastserve_backend.worker",
                                "fastserve_backend.engine", "fastserve_backend.executor",
                                "fastserve_backend.scheduler", "fastserve_backend.kv_cache"),
    BACKEND / "system": ("torch", "fastserve_client"),
    KERNELS: ("fastserve_backend", "fastserve_client"),
    CLIENT / "fastserve_client": ("torch", "fastserve_backend", "fastserve_kernels",
                                  "fastserve_chat", "fastserve_gateway", "fastserve_bench"),
    CLIENT / "fastserve_chat": ("torch", "fastapi", "pydantic", "fastserve_backend",
                                "fastserve_kernels", "fastserve_gateway", "fastserve_bench"),
    CLIENT / "fastserve_gateway": ("torch", "fastserve_backend", "fastserve_kernels",
                                   "fastserve_bench"),
    CLIENT / "fastserve_gateway" / "routing": ("asyncio", "time", "logging"),
    CLIENT / "fastserve_gateway" / "fleet": ("fastapi", "starlette", "fastserve_chat"),
    CLIENT / "fastserve_bench": ("torch", "fastserve_backend", "fastserve_kernels",
                                 "fastserve_gateway"),
}  # fmt: skip

# (folder, package) → the modules of the package that the folder may import.
ONLY = {
    (BACKEND / "simulation", "fastserve_backend.engine"): ("loop_setup", "delivery"),
    (BACKEND / "serving", "fastserve_client"): (
        *("protocol", "engine_state", "listening"),
        *("tracer", "tracing"),
    ),
    (CLIENT / "fastserve_gateway" / "routing", "fastserve_client"): ("engine_state",),
    (CLIENT / "fastserve_gateway" / "routing", "fastserve_gateway"): ("routing",),
    (CLIENT / "fastserve_gateway" / "fleet", "fastserve_gateway"): ("fleet", "routing"),
}


IN_GRAMMAR_PROCESS = ("compiler.py", "compilation.py", "check.py", "process.py", "__main__.py")


@pytest.mark.parametrize("folder", FORBIDDEN, ids=lambda folder: folder.name)
def test_imports_go_one_way(folder: Path) -> None:
    for path in python_files(folder):
        for name in imported_names(path):
            for forbidden in FORBIDDEN[folder]:
                assert not is_of(name, forbidden), f"{path} imports {name}"


@pytest.mark.parametrize(
    ("folder", "package"), ONLY, ids=lambda one: one if isinstance(one, str) else one.name
)
def test_a_part_of_a_package_is_imported(folder: Path, package: str) -> None:
    allowed = [f"{package}.{module}" for module in ONLY[folder, package]]
    for path in python_files(folder):
        for name in imported_names(path):
            if is_of(name, package):
                assert any(is_of(name, one) for one in allowed), f"{path} imports {name}"


def test_compiling_grammars_is_left_to_their_process() -> None:
    for path in python_files(BACKEND):
        if path.name not in IN_GRAMMAR_PROCESS:
            for name in imported_names(path):
                assert not is_of(name, "llguidance"), path
                assert not is_of(name, "fastserve_backend.grammars.compiler"), path


def test_only_serving_knows_triton() -> None:
    for path in python_files(BACKEND):
        if path.parent.name != "serving":
            for name in imported_names(path):
                assert not is_of(name, "triton_python_backend_utils"), path


@pytest.mark.slow
@pytest.mark.parametrize(
    "module",
    ["fastserve_backend.engine.engine", "fastserve_backend.cli.app", "fastserve_client",
     "fastserve_backend.serving.launch", "fastserve_backend.serving.codec"],
)  # fmt: skip
def test_the_engines_process_is_free_of_torch(module: str) -> None:
    assert "torch" not in loaded_modules(f"import {module}")


def test_reading_a_model_and_encoding_a_text_load_no_torch() -> None:
    """The engine's process does both."""
    program = """
from fastserve_backend.checkpoints.load_config import load_model_config
from fastserve_backend.checkpoints.tokenizer import load_tokenizer
config = load_model_config("opt-125m", load_format="dummy")
load_tokenizer("opt-125m", None, config).encode("a")
import fastserve_backend.checkpoints.hf_tokenizer, huggingface_hub
"""
    assert not {"torch", "transformers"} & loaded_modules(program)


def test_converting_gguf_files_loads_no_torch() -> None:
    modules = (
        "fastserve_backend.checkpoints.gguf_conversion, fastserve_backend.checkpoints.hf_tokenizer"
    )
    assert not {"torch", "transformers"} & loaded_modules(f"import {modules}")


@pytest.mark.slow
def test_a_rank_does_not_wait_for_imports_that_it_has_no_use_for() -> None:
    unused = {"pydantic", "jinja2", "tokenizers", "transformers", "typer", "rich", "gguf"}
    assert not unused & loaded_modules("import fastserve_backend.worker.worker")


def test_the_launcher_does_not_wait_for_imports_that_it_has_no_use_for() -> None:
    """Everything else of a start waits for the launcher."""
    program = """
import fastserve_backend.cli.app
import fastserve_backend.serving.launch, fastserve_backend.serving.served_models
"""
    assert not {"torch", "numpy", "rich", "psutil"} & loaded_modules(program)


def test_ranks_do_not_wait_until_the_stub_has_imported_the_engine() -> None:
    program = """
import sys
sys.modules["triton_python_backend_utils"] = object()
import fastserve_backend.serving.triton_model
"""
    later = {"fastserve_backend.engine.engine", "fastserve_backend.serving.model", "jinja2"}
    assert not later & loaded_modules(program)


@pytest.mark.slow
def test_recording_a_step_does_not_import_torchs_compiler() -> None:
    """That would take a second of each start, and 135 MB."""
    program = """
import torch
from fastserve_kernels.cpu.recording import StepRecorder
recorder = StepRecorder()
with recorder.recording():
    recorder.empty((2, 4), torch.float32)
"""
    assert "torch._dynamo" not in loaded_modules(program)


# Packages of the extra "engine": a machine with the gateway or the client alone has none of them.
ENGINE_PACKAGES = {"torch", "huggingface_hub", "tokenizers", "safetensors", "gguf", "jinja2",
                   "llguidance", "msgspec", "zmq", "platformdirs", "psutil"}  # fmt: skip


@pytest.mark.slow
def test_the_gateway_needs_nothing_of_the_engine() -> None:
    modules = "fastserve_backend.cli.app, fastserve_gateway.command, fastserve_chat.terminal_chat"
    assert not ENGINE_PACKAGES & loaded_modules(f"import {modules}")


@pytest.mark.slow
def test_a_gateway_imports_the_transport_of_its_urls_alone() -> None:
    """aiohttp takes a third of a start, and nothing uses it where all URLs are gRPC's."""
    assert not {"aiohttp", "grpc"} & loaded_modules("import fastserve_gateway.command")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "missing", "extra"),
    [
        (["generate", "Hello"], "tritonclient", "client"),
        (["chat"], "tritonclient", "client"),
        (["gateway"], "fastapi", "gateway"),
        (["bench"], "aiohttp", "bench"),
        (["serve"], "platformdirs", "server"),
        (["simulate", "opt-125m"], "platformdirs", "engine"),
        (["profile"], "platformdirs", "engine"),
    ],
)
def test_a_command_without_its_packages_says_what_to_install(
    command: list[str], missing: str, extra: str
) -> None:
    script = (
        f"import sys; sys.modules[{missing!r}] = None\n"
        "from fastserve_backend.cli.app import main; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, *command], capture_output=True, text=True, timeout=150
    )
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1, done.stderr
    assert f"fastserve {command[0]} needs: pip install '.[{extra}" in done.stderr
