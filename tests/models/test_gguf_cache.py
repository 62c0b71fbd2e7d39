"""The cache of converted GGUF files stays whole, whatever happens during a conversion."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from fastserve_backend.checkpoints.errors import ModelError
from fastserve_backend.checkpoints.gguf import converted_gguf
from fastserve_backend.checkpoints.gguf_conversion import convert
from fastserve_backend.checkpoints.load_config import load_model_config
from fastserve_backend.errors import ConfigError
from fastserve_backend.models.loader import load_model
from gguf_files import Arrays, Fields, assert_equal, bfloat16, random_llama, tensors_of, write_llama


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The directory of converted files. At the end of a test it holds only complete ones."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    directory = tmp_path / "cache" / "fastserve" / "gguf"
    yield directory
    for one in directory.glob("*"):
        assert one.name.startswith("m-")
        load_model_config(str(one), load_format="auto")


def test_two_processes_at_once_then_none(cache: Path, tmp_path: Path) -> None:
    file = write_llama(tmp_path / "m.gguf", random_llama())
    code = "import sys; from pathlib import Path\n"
    code += "from fastserve_backend.checkpoints.gguf import converted_gguf\n"
    code += "print(converted_gguf(Path(sys.argv[1])))"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(file)],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    directories = {process.communicate(timeout=120)[0].strip() for process in processes}
    assert [process.returncode for process in processes] == [0, 0]
    assert len(directories) == 1
    assert [str(one) for one in cache.iterdir()] == list(directories)
    made = Path(directories.pop())
    assert_equal(tensors_of(made), bfloat16(random_llama()))
    # A conversion is reused unchanged, whichever name leads to the file.
    (made / "mark").touch()
    (tmp_path / "link.gguf").symlink_to(file)
    assert converted_gguf(file) == made
    config = load_model_config(str(file), load_format="auto")
    assert config.directory == str(made)
    assert (made / "mark").exists()


def test_a_file_that_changed(cache: Path, tmp_path: Path) -> None:
    file = write_llama(tmp_path / "m.gguf", random_llama())
    first = converted_gguf(file)
    other = random_llama(tie_word_embeddings=True)
    second = converted_gguf(write_llama(file, other))
    assert second != first
    assert_equal(tensors_of(second), bfloat16(other))
    with pytest.raises(ModelError, match=r"m\.gguf has changed since it was described; start"):
        tensors_of(first)
    file.unlink()
    with pytest.raises(ModelError, match=r"m\.gguf cannot be read: No such file"):
        tensors_of(second)


def test_nothing_is_left_of_a_failure(cache: Path, tmp_path: Path) -> None:
    """The failure comes with the last tensor."""

    def change(fields: Fields, arrays: Arrays) -> None:
        *_, last = arrays
        arrays[last] = arrays[last].astype(np.float64)

    file = write_llama(tmp_path / "m.gguf", random_llama(), change=change)
    with pytest.raises(ModelError) as error:
        load_model_config(str(file), load_format="auto")
    last = "tensor 'blk.1.ffn_norm.weight' (F64) cannot be read"
    assert str(error.value).startswith(f"{file}: {last}")
    assert list(cache.iterdir()) == []


def test_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a_file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "a_file"))
    file = write_llama(tmp_path / "m.gguf", random_llama())
    with pytest.raises(ModelError, match="set XDG_CACHE_HOME to a directory"):
        converted_gguf(file)


@pytest.mark.usefixtures("cache")
def test_an_index_that_comes_with_a_checkpoint_does_not_count(tmp_path: Path) -> None:
    """It could name any file of the machine as its source."""
    directory = tmp_path / "model"
    convert(write_llama(tmp_path / "m.gguf", random_llama()), directory)
    with pytest.raises(ModelError, match="holds no weights"):
        load_model_config(str(directory), load_format="auto")
    random_llama().save_pretrained(directory)
    (tmp_path / "m.gguf").unlink()
    load_model(load_model_config(str(directory), load_format="auto"), torch.device("cpu"))


@pytest.mark.parametrize("which", ["fastserve", "gguf", "model"])
def test_a_conversion_that_others_can_change_is_not_used(
    cache: Path, tmp_path: Path, which: str
) -> None:
    file = write_llama(tmp_path / "m.gguf", random_llama())
    made = converted_gguf(file)
    open_to_others = {"fastserve": cache.parent, "gguf": cache, "model": made}[which]
    open_to_others.chmod(0o775)
    remedy = rf"{open_to_others} has mode 775, .* `chmod go-w {open_to_others}`, or set XDG_CACHE_"
    with pytest.raises(ConfigError, match=remedy):
        load_model_config(str(file), load_format="auto")
    open_to_others.chmod(0o755)
    assert converted_gguf(file) == made
