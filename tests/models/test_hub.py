"""Models by hub id: without network, from the cache, and from a server that imitates the hub."""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from fastserve_backend.checkpoints.architectures import ARCHITECTURES
from fastserve_backend.checkpoints.errors import ModelError
from fastserve_backend.checkpoints.hub import at_commit
from fastserve_backend.checkpoints.load_config import load_model_config
from fastserve_backend.config import EngineConfig
from fastserve_backend.rank_protocol.messages import Setup
from gguf_files import byte_level_bpe, random_llama
from paged_executor import load
from transformers import LlamaForCausalLM
from waiting import POLL_S

REPOSITORY = "owner/tiny"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
NEXT_COMMIT = "89abcdef0123456789abcdef0123456789abcdef"
SNAPSHOT = f"/cache/snapshots/{COMMIT}"
TIMEOUT_S = 150.0


MOST_PAUSES_S = 5.0
# Prints the model's directory, and a prompt by its tokenizer and chat template; to stderr, the
# seconds for which a client that tries again has paused.
PROGRAM = """
import sys
import time
pauses_s = []
sleep = time.sleep
time.sleep = lambda seconds: (pauses_s.append(seconds), sleep(seconds))
from fastserve_backend.config import EngineConfig
from fastserve_backend.checkpoints import hub
from fastserve_backend.checkpoints.load_config import load_model_config
from fastserve_backend.checkpoints.errors import ModelError
from fastserve_backend.checkpoints.tokenizer import load_tokenizer
hub._TIMEOUT_S = 60.0  # the test's server may stand still
model, load_format = sys.argv[1:]
try:
    config = load_model_config(model, load_format=load_format)
    tokenizer = load_tokenizer(model, None, config)
    text = tokenizer.render_chat([{"role": "user", "content": "Hello"}])
    chat = tokenizer.decode(tokenizer.encode(text))
    print(config.directory, chat, sep="|", end="")
except ModelError as error:
    print("ModelError:", error, end="")
print("paused for", sum(pauses_s), "s", file=sys.stderr)
"""


def run(
    home: Path, endpoint: str | None, load_format: str = "auto", model: str = REPOSITORY
) -> str:
    """What PROGRAM prints to stdout."""
    return run_program(home, endpoint, load_format, model).stdout


def run_program(
    home: Path, endpoint: str | None, load_format: str, model: str = REPOSITORY
) -> subprocess.CompletedProcess[str]:
    """In a process of its own: the hub client reads its environment once."""
    ignored = ("hf_", "huggingface_", "http_proxy", "https_proxy", "all_proxy")
    environment = {k: v for k, v in os.environ.items() if not k.lower().startswith(ignored)}
    environment |= {"HF_HUB_ETAG_TIMEOUT": "60", "HF_HUB_DOWNLOAD_TIMEOUT": "60"}
    environment |= {"HF_HOME": str(home), "PYTHONPATH": os.pathsep.join(sys.path)}
    environment |= {"HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
    # Port 9 (discard) has no server: refused at once, also where there is a network.
    environment["HF_ENDPOINT"] = endpoint or "http://127.0.0.1:9"
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, model, load_format],
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stderr
    return done


class Hub:
    """The requests of the hub client for one repository, answered from memory."""

    def __init__(self, files: dict[str, bytes]) -> None:
        self.files = files
        """Of the main branch and of each commit."""
        self.head = COMMIT
        self.fetched: list[str] = []
        self.cut: str | None = None
        """A file whose connection ends halfway."""
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_HEAD(self) -> None:
                hub.answer(self, body=False)

            def do_GET(self) -> None:
                hub.answer(self, body=True)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(POLL_S,))
        self._thread.start()
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def answer(self, request: BaseHTTPRequestHandler, *, body: bool) -> None:
        path = request.path.partition("?")[0]
        repository, resolve = f"/api/models/{REPOSITORY}", f"/{REPOSITORY}/resolve/"
        if path.startswith(f"{repository}/tree/"):
            self._send(request, body, json.dumps([self._entry(name) for name in self.files]))
        elif path == repository or path.startswith(f"{repository}/revision/"):
            siblings = [{"rfilename": name} for name in self.files]
            revision = path.rpartition("/revision/")[-1] if "/revision/" in path else "main"
            commit = {"main": self.head, "v1": COMMIT}.get(revision, revision)
            info = {"id": REPOSITORY, "sha": commit, "siblings": siblings, "private": False}
            self._send(request, body, json.dumps(info))
        elif path.startswith(resolve) and path.split("/", 5)[-1] in self.files:
            self._send_file(request, body, path.split("/", 5)[-1])
        else:
            request.send_response(404)
            request.send_header("X-Error-Code", "RepoNotFound")
            request.send_header("Content-Length", "0")
            request.end_headers()

    def _entry(self, name: str) -> dict[str, object]:
        content = self.files[name]
        return {
            "type": "file",
            "path": name,
            "size": len(content),
            "oid": hashlib.sha1(content).hexdigest(),
        }

    def _send(self, request: BaseHTTPRequestHandler, body: bool, text: str) -> None:
        request.send_response(200)
        request.send_header("Content-Type", "application/json")
        request.send_header("Content-Length", str(len(text.encode())))
        request.end_headers()
        if body:
            request.wfile.write(text.encode())

    def _send_file(self, request: BaseHTTPRequestHandler, body: bool, name: str) -> None:
        content = self.files[name]
        start = 0
        if (wanted := request.headers.get("Range")) is not None:
            start = int(wanted.removeprefix("bytes=").partition("-")[0])
        part = content[start:]
        request.send_response(206 if start else 200)
        request.send_header("ETag", f'"{hashlib.sha1(content).hexdigest()}"')
        request.send_header("X-Repo-Commit", request.path.split("/")[4])
        request.send_header("Accept-Ranges", "bytes")
        if start:
            end = len(content) - 1
            request.send_header("Content-Range", f"bytes {start}-{end}/{len(content)}")
        request.send_header("Content-Length", str(len(part)))
        request.end_headers()
        if not body:
            return
        self.fetched.append(name)
        if name == self.cut:
            request.wfile.write(part[: len(part) // 2])
            request.close_connection = True
        else:
            request.wfile.write(part)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """A repository's files as transformers saves them, with other files that the hub's pages
    have."""
    directory = tmp_path_factory.mktemp("repository")
    model: LlamaForCausalLM = random_llama()
    model.save_pretrained(directory)
    byte_level_bpe().save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text('{"bos_token": "<|begin|>"}')
    (directory / "chat_template.jinja").write_text("{{ messages[0].content }} world")
    files = {file.name: file.read_bytes() for file in directory.iterdir()}
    extra = {"README.md": b"# Tiny", ".gitattributes": b"", "original/consolidated.00.pth": b"x"}
    return files | extra


@pytest.fixture
def hub(checkpoint: dict[str, bytes]) -> Iterator[Hub]:
    hub = Hub(dict(checkpoint))
    yield hub
    hub.close()


def parts(output: str) -> tuple[Path, str]:
    assert not output.startswith("ModelError"), output
    directory, chat = output.split("|")
    return Path(directory), chat


def test_download_then_the_cache_alone(hub: Hub, tmp_path: Path) -> None:
    directory, chat = parts(run(tmp_path, hub.endpoint))
    assert directory.is_relative_to(tmp_path)
    assert chat == "Hello world"
    load(directory)
    wanted = {"config.json", "generation_config.json", "model.safetensors"}
    wanted |= {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
    assert set(hub.fetched) == wanted
    hub.fetched.clear()
    assert parts(run(tmp_path, hub.endpoint)) == (directory, chat)
    assert hub.fetched == []
    assert parts(run(tmp_path, None)) == (directory, chat)


def test_revisions(hub: Hub, tmp_path: Path) -> None:
    first, _ = parts(run(tmp_path, hub.endpoint))
    hub.head = NEXT_COMMIT
    hub.files["chat_template.jinja"] = b"{{ messages[0].content }} again"
    second, chat = parts(run(tmp_path, hub.endpoint))
    assert (first.name, second.name, chat) == (COMMIT, NEXT_COMMIT, "Hello again")
    # The first of several hosts tells the others the commit, whatever is pushed meanwhile.
    pinned = at_commit(REPOSITORY, str(first))
    for endpoint in (hub.endpoint, None):
        assert parts(run(tmp_path, endpoint, model=pinned)) == (first, "Hello world")
    for endpoint in (hub.endpoint, None):
        assert parts(run(tmp_path, endpoint, model=f"{REPOSITORY}@v1")) == (first, "Hello world")


def test_which_names_are_pinned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert at_commit("owner/tiny", SNAPSHOT) == f"owner/tiny@{COMMIT}"
    assert at_commit("owner/tiny@main", SNAPSHOT) == f"owner/tiny@{COMMIT}"
    assert at_commit("/models/tiny", "/models/tiny") == "/models/tiny"
    assert at_commit("opt-125m", None) == "opt-125m"
    monkeypatch.chdir(tmp_path)
    Path("owner/tiny").mkdir(parents=True)
    assert at_commit("owner/tiny", "owner/tiny") == "owner/tiny"


@pytest.mark.parametrize(("nnodes", "loads"), [(1, SNAPSHOT), (2, f"{REPOSITORY}@{COMMIT}")])
def test_what_ranks_load(nnodes: int, loads: str) -> None:
    config = EngineConfig(
        model={"model": REPOSITORY}, parallel={"tensor_parallel_size": 2, "nnodes": nnodes}
    )
    assert Setup.of(config, SNAPSHOT).model == loads


def test_random_weights_need_no_weights(hub: Hub, tmp_path: Path) -> None:
    parts(run(tmp_path, hub.endpoint, "dummy"))
    assert "config.json" in hub.fetched
    assert "model.safetensors" not in hub.fetched
    parts(run(tmp_path, None, "dummy"))
    # Without network the weights are unavailable: the error is not that of a broken file.
    assert "cannot be fetched from the Hugging Face hub (ConnectError" in run(tmp_path, None)


def test_safetensors_before_pytorch_model_bin(hub: Hub, tmp_path: Path) -> None:
    hub.files["pytorch_model.bin"] = b"never read"
    hub.files["model.fp16.safetensors"] = b"never read"
    load(parts(run(tmp_path, hub.endpoint))[0])
    assert weights(hub.fetched) == {"model.safetensors"}


def divided(directory: Path, name: str) -> dict[str, bytes]:
    """An index, and files whose names begin with `name`."""
    random_llama().save_pretrained(directory, max_shard_size="50KB")
    index = directory / "model.safetensors.index.json"
    index.write_text(index.read_text().replace("model-", name))
    files = {file.name.replace("model-", name): file for file in directory.glob("model*")}
    return {shown: file.read_bytes() for shown, file in files.items()}


@pytest.mark.parametrize("name", ["model-", "language_model-", "text/part-"])
def test_safetensors_of_several_files(hub: Hub, tmp_path: Path, name: str) -> None:
    del hub.files["model.safetensors"]
    shards = divided(tmp_path / "saved", name)
    hub.files |= shards | {"other-00001.safetensors": b"never read"}
    directory, chat = parts(run(tmp_path, hub.endpoint))
    load(directory)
    assert weights(hub.fetched) == shards.keys() - {"model.safetensors.index.json"}
    assert parts(run(tmp_path, None)) == (directory, chat)


@pytest.mark.parametrize("other", ["adapter_model.safetensors", "model.fp16.safetensors"])
def test_safetensors_that_are_not_the_models(hub: Hub, tmp_path: Path, other: str) -> None:
    """If these are of an adapter or of a variant that is not read, pytorch_model.bin is used, with
    and without network."""
    hub.files[other] = b"never read"
    del hub.files["model.safetensors"]
    state = io.BytesIO()
    torch.save(random_llama().state_dict(), state)
    hub.files["pytorch_model.bin"] = state.getvalue()
    directory, chat = parts(run(tmp_path, hub.endpoint))
    load(directory)
    assert weights(hub.fetched) == {"pytorch_model.bin"}
    assert parts(run(tmp_path, None)) == (directory, chat)


def weights(fetched: list[str]) -> set[str]:
    return {name for name in fetched if name.endswith((".bin", ".safetensors"))}


def test_interrupted_download_goes_on(hub: Hub, tmp_path: Path) -> None:
    hub.cut = "model.safetensors"
    output = run(tmp_path, hub.endpoint)
    assert output.startswith(f"ModelError: model '{REPOSITORY}' is no local directory and cannot")
    assert "\n" not in output
    hub.cut = None
    hub.fetched.clear()
    load(parts(run(tmp_path, hub.endpoint))[0])
    assert set(hub.fetched) == {"model.safetensors"}


def test_no_such_repository(hub: Hub, tmp_path: Path) -> None:
    output = run(tmp_path, hub.endpoint, model="owner/nothing")
    assert "model 'owner/nothing' is no local directory and cannot be fetched" in output
    assert "check the name and the network, or give a local directory" in output
    assert "\n" not in output


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_without_network_the_error_comes_soon(tmp_path: Path, load_format: str) -> None:
    done = run_program(tmp_path, None, load_format)
    (paused_s,) = re.findall(r"^paused for (.*) s$", done.stderr, re.MULTILINE)
    assert float(paused_s) <= MOST_PAUSES_S
    output = done.stdout
    assert output.startswith(f"ModelError: model '{REPOSITORY}' is no local directory and cannot")
    assert output.endswith("check the name and the network, or give a local directory")
    assert "\n" not in output


@pytest.mark.parametrize("is_linked", [False, True])
@pytest.mark.parametrize("name", [None, "overlay-"])
def test_cache_of_another_program(
    checkpoint: dict[str, bytes], tmp_path: Path, name: str | None, is_linked: bool
) -> None:
    """A snapshot on disk as an older client left it, without a list of what it should hold; with
    links to blobs, in a cache that is a link itself, or with files."""
    files = {name: content for name, content in checkpoint.items() if "/" not in name}
    if name is not None:
        del files["model.safetensors"]
        files |= divided(tmp_path / "saved", name)
    if is_linked:
        (tmp_path / "disk").mkdir()
        (tmp_path / "hub").symlink_to(tmp_path / "disk", target_is_directory=True)
    repository = tmp_path / "hub" / "models--owner--tiny"
    snapshot = repository / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    (repository / "blobs").mkdir()
    for file, content in files.items():
        if is_linked:
            blob = repository / "blobs" / hashlib.sha1(content).hexdigest()
            blob.write_bytes(content)
            (snapshot / file).symlink_to(Path("../../blobs") / blob.name)
        else:
            (snapshot / file).write_bytes(content)
    assert parts(run(tmp_path, None)) == (snapshot.resolve(), "Hello world")
    load(snapshot)


def test_unknown_architecture_lists_the_known(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "mamba"}')
    known = f"'mamba', expected one of {', '.join(sorted(ARCHITECTURES)[:5])}, "
    with pytest.raises(ModelError, match=known):
        load_model_config(str(tmp_path), load_format="dummy")


@pytest.mark.parametrize(
    "name",
    ["owner/name/more", "owner/", "ow ner/name", "-a/b", "a/b@", "a/b@v1/../c", "a/b@c@d"],
)
def test_no_hub_id(name: str) -> None:
    with pytest.raises(ModelError, match=r"no Hugging Face id \(owner/name or owner/name@revision"):
        load_model_config(name, load_format="auto")


@pytest.mark.parametrize("name", ["/name", "./owner/name", "~/name"])
def test_a_path_that_is_not_there_is_no_hub_id(name: str) -> None:
    with pytest.raises(ModelError, match="there is no such directory or file"):
        load_model_config(name, load_format="auto")
