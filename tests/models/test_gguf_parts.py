"""A GGUF model in several files, as llama.cpp's gguf-split writes it."""

from __future__ import annotations

from pathlib import Path

import pytest
from fastserve_backend.checkpoints.errors import ModelError
from fastserve_backend.checkpoints.gguf import converted_gguf
from fastserve_backend.checkpoints.gguf_conversion import convert
from gguf_files import (
    Fields,
    assert_equal,
    bfloat16,
    metadata,
    random_llama,
    tensors,
    tensors_of,
    write_gguf,
)

NUM_PARTS = 3
MODEL = random_llama()


def write_parts(directory: Path) -> list[Path]:
    names = list(tensors(MODEL))
    paths = []
    for part in range(NUM_PARTS):
        fields: Fields = {"split.no": part, "split.count": NUM_PARTS}
        arrays = {name: tensors(MODEL)[name] for name in names[part::NUM_PARTS]}
        path = directory / f"m-{part + 1:05}-of-{NUM_PARTS:05}.gguf"
        paths.append(
            write_gguf(path, fields | (metadata(MODEL.config) if part == 0 else {}), arrays)
        )
    return paths


def message(file: Path, directory: Path) -> str:
    with pytest.raises(ModelError) as caught:
        convert(file, directory / "out")
    return str(caught.value)


@pytest.mark.usefixtures("conversions_anywhere")
def test_the_parts_are_one_model(tmp_path: Path) -> None:
    convert(write_parts(tmp_path)[0], tmp_path / "out")
    assert_equal(tensors_of(tmp_path / "out"), bfloat16(MODEL))


def test_links_to_parts_with_other_names_are_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hugging Face's cache keeps files under the names of their hashes."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    links = tmp_path / "links"
    links.mkdir()
    for number, path in enumerate(write_parts(tmp_path)):
        (links / path.name).symlink_to(path.rename(tmp_path / f"hash{number}"))
    first = next(path for path in sorted(links.iterdir()))
    assert_equal(tensors_of(converted_gguf(first)), bfloat16(MODEL))


def test_another_part_than_the_first_names_the_mistake(tmp_path: Path) -> None:
    second = write_parts(tmp_path)[1]
    assert "part 2 of a model in several files; give the first one" in message(second, tmp_path)


def test_a_first_part_with_another_name_is_refused(tmp_path: Path) -> None:
    renamed = write_parts(tmp_path)[0].rename(tmp_path / "m.gguf")
    assert "give the first one, whose name ends in -00001-of-00003.gguf" in message(
        renamed, tmp_path
    )


def test_a_missing_part_is_named(tmp_path: Path) -> None:
    first, _, third = write_parts(tmp_path)
    third.unlink()
    assert f"{third.name}, beside it, cannot be read: No such file" in message(first, tmp_path)


def test_a_part_of_another_model_is_refused(tmp_path: Path) -> None:
    first, second, third = write_parts(tmp_path)
    second.replace(third)
    write_parts(tmp_path)[2].replace(second)
    assert f"{second.name}, beside it, is no part of the same model" in message(first, tmp_path)


@pytest.mark.usefixtures("conversions_anywhere")
def test_a_part_that_changes_later_is_noticed(tmp_path: Path) -> None:
    paths = write_parts(tmp_path)
    convert(paths[0], tmp_path / "out")
    paths[1].touch()
    with pytest.raises(ModelError, match=f"{paths[1].name} has changed since it was described"):
        tensors_of(tmp_path / "out")


@pytest.mark.parametrize("count", [0, 10**6, "2"])
def test_an_implausible_number_of_parts_is_refused(tmp_path: Path, count: object) -> None:
    fields = metadata(MODEL.config) | {"split.count": count}
    file = write_gguf(tmp_path / "m.gguf", fields, tensors(MODEL))
    assert "split.count" in message(file, tmp_path)
