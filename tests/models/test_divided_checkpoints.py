"""Checkpoints of several files: the index decides which file's tensor counts."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from fastserve_backend.checkpoints.errors import ModelError
from opt_checkpoints import random_opt, save_sharded_bin, save_sharded_safetensors
from paged_executor import PagedExecutor, check, load, prompts
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import OPTForCausalLM

Tensors = dict[str, Tensor]


class Checkpoint:
    """A divided checkpoint whose files a test changes."""

    def __init__(self, directory: Path, ending: str) -> None:
        self.directory = directory
        self.index = next(directory.glob("*.index.json"))
        self.ending = ending
        self.files: dict[str, str] = json.loads(self.index.read_text())["weight_map"]
        """By tensor."""

    def read(self, name: str) -> Tensors:
        file = self.directory / name
        if self.ending == "safetensors":
            return load_file(file)
        loaded: Tensors = torch.load(file, weights_only=True)
        return loaded

    def write(self, name: str, tensors: Tensors) -> None:
        file = self.directory / name
        file.parent.mkdir(exist_ok=True)
        if self.ending == "safetensors":
            save_file(tensors, file, metadata={"format": "pt"})
        else:
            torch.save(tensors, file)

    def write_index(self) -> None:
        self.index.write_text(json.dumps({"weight_map": self.files}))


@pytest.fixture
def theirs() -> OPTForCausalLM:
    return random_opt()


@pytest.fixture(params=["safetensors", "bin"])
def checkpoint(
    theirs: OPTForCausalLM, tmp_path: Path, request: pytest.FixtureRequest
) -> Checkpoint:
    save: Callable[[OPTForCausalLM, Path], None] = (
        save_sharded_safetensors if request.param == "safetensors" else save_sharded_bin
    )
    save(theirs, tmp_path)
    found = Checkpoint(tmp_path, request.param)
    assert len(set(found.files.values())) > 2
    return found


def check_loaded(theirs: OPTForCausalLM, directory: Path) -> None:
    executor = PagedExecutor(load(directory), theirs.config, prompts(9), seed=5)
    executor.step([(0, 9)])
    check(theirs, executor)


def stale(tensor: Tensor) -> Tensor:
    return torch.full_like(tensor, math.nan)


def test_stale_duplicates_do_not_count(theirs: OPTForCausalLM, checkpoint: Checkpoint) -> None:
    """Every file has all tensors, but the right values only where the index points."""
    contents = {name: checkpoint.read(name) for name in set(checkpoint.files.values())}
    for name, own in contents.items():
        others = {
            tensor: stale(contents[file][tensor]) for tensor, file in checkpoint.files.items()
        }
        checkpoint.write(name, {**others, **own})
    check_loaded(theirs, checkpoint.directory)


@pytest.mark.parametrize("name", ["overlay", "overlay/part"])
def test_an_overlay_replaces_what_its_entries_say(
    theirs: OPTForCausalLM, checkpoint: Checkpoint, name: str
) -> None:
    overlay = f"{name}.{checkpoint.ending}"
    replaced = {}
    for file in set(checkpoint.files.values()):
        tensors = checkpoint.read(file)
        taken = sorted(tensors)[0]
        replaced[taken] = tensors[taken].clone()
        checkpoint.write(file, tensors | {taken: stale(tensors[taken])})
    # The file has this tensor, too, but the index names another file for it.
    other = next(one for one in checkpoint.files if one not in replaced)
    value = checkpoint.read(checkpoint.files[other])[other]
    checkpoint.write(overlay, replaced | {other: stale(value)})
    checkpoint.files |= dict.fromkeys(replaced, overlay)
    checkpoint.write_index()
    check_loaded(theirs, checkpoint.directory)


def test_a_head_without_an_entry_is_none(theirs: OPTForCausalLM, checkpoint: Checkpoint) -> None:
    """The model is tied. A head would replace the embedding's table."""
    name = next(iter(checkpoint.files.values()))
    table = theirs.get_input_embeddings().weight.detach()
    checkpoint.write(name, checkpoint.read(name) | {"lm_head.weight": torch.ones_like(table)})
    checkpoint.files.pop("lm_head.weight", None)
    checkpoint.write_index()
    check_loaded(theirs, checkpoint.directory)


def test_a_tensor_in_another_file_than_its_entry_says_is_missing(checkpoint: Checkpoint) -> None:
    tensor = "model.decoder.layers.1.fc1.bias"
    checkpoint.files[tensor] = next(
        file for file in checkpoint.files.values() if file != checkpoint.files[tensor]
    )
    checkpoint.write_index()
    with pytest.raises(ModelError, match=r"lacks layers\.1\.fc1\.bias"):
        load(checkpoint.directory)


@pytest.mark.parametrize("file", ["/outside.bin", "a/../../outside.bin", "..", ""])
def test_files_outside_of_the_directory_are_refused(checkpoint: Checkpoint, file: str) -> None:
    checkpoint.files["model.decoder.layers.1.fc1.bias"] = file
    checkpoint.write_index()
    with pytest.raises(ModelError, match="which is no file beside it"):
        load(checkpoint.directory)


def test_links_to_files_of_other_names(
    theirs: OPTForCausalLM, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    """In the hub's cache all files of a snapshot are links to blobs."""
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    for number, file in enumerate(one for one in tmp_path.iterdir() if one.is_file()):
        blob = file.rename(blobs / str(number))
        file.symlink_to(Path("blobs") / blob.name)
    link = tmp_path / "link"
    link.symlink_to(tmp_path, target_is_directory=True)
    check_loaded(theirs, link)
