from __future__ import annotations

from pathlib import Path

import pytest
from fastserve_client.key_file import KeyFileError, NamedKey, read_key_file


def read(tmp_path: Path, text: str) -> list[NamedKey]:
    file = tmp_path / "keys"
    file.write_text(text, encoding="utf-8")
    return read_key_file(file)


def test_each_form_of_a_line(tmp_path: Path) -> None:
    text = "\ufeffsk-bare\n\nchat:sk-1\r\n batch : 0.5 : sk-2 \nops:2:sk-3:-5\n:sk-4:5:6\n"
    assert read(tmp_path, text) == [
        NamedKey("", 1.0, "sk-bare", None),
        NamedKey("chat", 1.0, "sk-1", None),
        NamedKey("batch", 0.5, "sk-2", None),
        NamedKey("ops", 2.0, "sk-3", -5),
        NamedKey("", 1.0, "sk-4:5:6", None),
    ]


def test_a_tenant_may_have_several_keys_that_are_alike(tmp_path: Path) -> None:
    assert [one.key for one in read(tmp_path, "a:2:new\na:2:old\na:2:new\n")] == ["new", "old"]
    for other in ("a:3:old", "a:2:old:0"):
        with pytest.raises(KeyFileError, match="line 2 gives 'a' another weight or most urgent"):
            read(tmp_path, f"a:2:new\n{other}\n")


def test_a_key_belongs_to_one_tenant(tmp_path: Path) -> None:
    with pytest.raises(KeyFileError, match="line 3 has the key of an earlier line"):
        read(tmp_path, "a:secret\n\nb:secret\n")


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("a:0:secret", "a weight above 0"),
        ("a:-1:secret", "a weight above 0"),
        ("a:nan:secret", "a weight above 0"),
        ("a:inf:secret", "a weight above 0"),
        ("a:secret:x", "a weight above 0"),
        ("a:1:secret:high", "a whole number"),
        (":", "has no key"),
        ("a:", "must be key, name:key"),
        # Keys with colons, and a key in the place of its name.
        ("sk-1:secret", "has a name that is none: .* without 'sk-' in front; a line is key, name"),
        ("k/1:secret", "has a name that is none"),
        ("a" * 65 + ":secret", "has a name that is none"),
        ("a:1:secret:0:0", "must be key, name:key"),
        ("a\tb:secret", "has a name that is none"),
        ("secret\u00e9", "not ASCII"),
    ],
)
def test_a_wrong_line_is_named_but_never_quoted(tmp_path: Path, line: str, reason: str) -> None:
    with pytest.raises(KeyFileError, match=reason) as caught:
        read(tmp_path, f"fine\n{line}\n")
    assert "keys'; its line 2 " in str(caught.value)
    assert "secret" not in str(caught.value)


def test_a_file_without_keys(tmp_path: Path) -> None:
    with pytest.raises(KeyFileError, match="it has no key, one a line"):
        read(tmp_path, "\n\n")
    with pytest.raises(KeyFileError, match="No such file"):
        read_key_file(tmp_path / "missing")
