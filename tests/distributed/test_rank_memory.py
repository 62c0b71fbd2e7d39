"""Each rank takes host memory for its part of the model, and its share of the rest for blocks."""

from __future__ import annotations

import platform
from pathlib import Path

import huge_pages
import noting_rank
import psutil
import pytest
import torch
from engine_ranks import ranks_of
from parallel_models import run_ranks_by, started_ranks
from transformers import LlamaConfig, LlamaForCausalLM

MIB = 2**20
has_huge_pages = (
    huge_pages.are_allowed()
    and platform.libc_ver()[0] == "glibc"
    and tuple(map(int, platform.libc_ver()[1].split("."))) >= (2, 35)
)
# Allows for growth of the interpreter and of torch between two starts, and for single tensors.
SLACK_BYTES = 120 * MIB


@pytest.fixture(scope="module")
def large_llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """A model that is large beside torch itself, and its size in bytes."""
    config = LlamaConfig(
        vocab_size=8192,
        hidden_size=1024,
        num_hidden_layers=8,
        intermediate_size=4096,
        num_attention_heads=8,
        num_key_value_heads=8,
        max_position_embeddings=128,
        tie_word_embeddings=False,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model = model.to_empty(device="cpu")
    directory = tmp_path_factory.mktemp("large")
    model.save_pretrained(directory)
    return directory, sum(4 * one.numel() for one in model.parameters())


def peak_bytes(model: Path, tensor_size: int, num_stages: int) -> list[int]:
    """Each rank's peak resident memory while it loaded."""
    with started_ranks(
        model,
        tensor_parallel_size=tensor_size,
        pipeline_parallel_size=num_stages,
        device_blocks=8,
        swap_space_gib=0,
    ) as (executor, _):
        return [_peak_bytes(rank) for rank in ranks_of(executor)]


def _peak_bytes(rank: psutil.Process) -> int:
    status = Path(f"/proc/{rank.pid}/status").read_text()
    (line,) = [line for line in status.splitlines() if line.startswith("VmHWM:")]
    return int(line.split()[1]) * 1024


@pytest.mark.usefixtures("forked_ranks_here")
def test_peak_memory_is_that_of_the_part(large_llama: tuple[Path, int], small_opt: Path) -> None:
    directory, model_bytes = large_llama
    assert model_bytes > 450 * MIB
    (without,) = peak_bytes(small_opt, 1, 1)
    (whole,) = peak_bytes(directory, 1, 1)
    assert whole - without > model_bytes  # a whole model would show in the measurement
    for tensor_size, num_stages in ((2, 1), (2, 2)):
        part = model_bytes / (tensor_size * num_stages)
        for peak in peak_bytes(directory, tensor_size, num_stages):
            assert peak - without < part + SLACK_BYTES


@pytest.mark.skipif(not has_huge_pages, reason="this system has no huge pages, or an older glibc")
def test_weights_are_in_huge_pages(
    large_llama: tuple[Path, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, model_bytes = large_llama
    if not huge_pages.are_free(model_bytes):
        pytest.skip("this machine's free memory has too few huge pages")
    options = {"device_blocks": 8, "swap_space_gib": 0}
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    with started_ranks(directory, **options) as (executor, _):
        (rank,) = ranks_of(executor)
        # Linux may lack some that are free.
        assert huge_pages.huge_page_bytes(rank.pid) > model_bytes / 2
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.hugetlb=0")  # the user's own choice
    with started_ranks(directory, **options) as (executor, _):
        (rank,) = ranks_of(executor)
        assert huge_pages.huge_page_bytes(rank.pid) < model_bytes / 2


def test_no_rank_takes_memory_before_all_have_seen_what_is_free(
    small_opt: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes = tmp_path / "notes"
    monkeypatch.setenv(noting_rank.NOTES, str(notes))
    run_ranks_by(noting_rank, tmp_path, monkeypatch)
    with started_ranks(small_opt, pipeline_parallel_size=3, device_blocks=8, swap_space_gib=0.001):
        noted = notes.read_text().split()
    # One rank may allocate blocks while another still loads.
    for what in ("weights", "blocks"):
        of_this = [note for note in noted if note.endswith(what)]
        assert of_this == [f"looks-for-{what}"] * 3 + [f"takes-for-{what}"] * 3
    assert len(noted) == 12
