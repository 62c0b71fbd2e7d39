"""The predictor's process and its client without an engine: its files and its failures."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import psutil
import pytest
from fastserve_backend.config import EngineConfig
from fastserve_backend.errors import ConfigError
from fastserve_backend.length_prediction import settings
from fastserve_backend.length_prediction.client import PredictorClient
from fastserve_backend.length_prediction.messages import Predicted
from fastserve_backend.length_prediction.settings import PredictorSettings, default_directory
from fastserve_backend.system import helper_process
from no_home import leave_without_home
from started_processes import has_ended, noting_processes
from waiting import PREDICTOR_LOAD_S, wait_for

PREDICTOR = "fastserve_backend.length_prediction"
CAPACITY = 1000
# Words that no file of the predictor has any reason to hold.
WORDS = ("xylophone", "quicksilver", "marmalade", "zeppelin")
LESSONS = [(f"Write {n} lines about a {WORDS[n % 4]}.", 20 + 10 * (n % 4)) for n in range(40)]
QUESTION, LENGTH = LESSONS[1]


class Answers:
    """The answers to each question."""

    def __init__(self) -> None:
        self._answers: dict[int, Predicted] = {}
        self._news = threading.Condition()

    def __call__(self, answer: Predicted) -> None:
        with self._news:
            assert answer.number not in self._answers, "a second answer"
            self._answers[answer.number] = answer
            self._news.notify_all()

    def wait(self, number: int) -> Predicted:
        with self._news:
            assert self._news.wait_for(lambda: number in self._answers, PREDICTOR_LOAD_S)
            return self._answers[number]


@contextmanager
def running(directory: Path) -> Iterator[tuple[PredictorClient, Answers]]:
    answers = Answers()
    arguments = PredictorSettings(directory, CAPACITY).arguments()
    client = PredictorClient(arguments, answers)
    try:
        yield client, answers
    finally:
        client.close()


@pytest.fixture(scope="module")
def taught(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a predictor that has learned ``LESSONS`` and ended."""
    directory = tmp_path_factory.mktemp("lengths")
    with running(directory) as (client, answers):
        wait_for(lambda: client.is_loaded, PREDICTOR_LOAD_S)
        for number, (text, length) in enumerate(LESSONS):
            client.ask(number, text)
            client.tell_end(number, length)
        assert answers.wait(0) == Predicted(0, None, "cold")
        client.ask(100, "Nobody tells how long this was.")
        client.tell_end(100, None)
        client.tell_end(101, 7)  # a job that nobody asked about
        wait_for(lambda: client.num_entries == len(LESSONS), PREDICTOR_LOAD_S)
        client.ask(102, QUESTION)
        assert answers.wait(102).num_tokens is not None
    return directory


def test_what_jobs_came_to_is_learned_though_the_process_could_not_take_it_then(
    tmp_path: Path,
) -> None:
    with noting_processes() as started, running(tmp_path) as (client, answers):
        wait_for(lambda: client.is_loaded, PREDICTOR_LOAD_S)
        (process,) = started.of(PREDICTOR)
        process.suspend()
        for number, (text, _) in enumerate(LESSONS):
            client.ask(number, text)
        for number in range(1000, 1300):
            client.ask(number, "Fill the socket.")
        assert answers.wait(1299) == Predicted(1299, None, "slow")
        for number, (_, length) in enumerate(LESSONS):
            client.tell_end(number, length)
        process.resume()
        wait_for(lambda: client.num_entries == len(LESSONS), PREDICTOR_LOAD_S)


HOST = """
import sys, threading
from fastserve_backend.length_prediction.client import PredictorClient
never = threading.Event()
def on_answer(answer):
    print(answer.num_tokens, client.num_entries, flush=True)
client = PredictorClient(sys.argv[2:], on_answer)
while not client.is_loaded:
    never.wait(0.01)
client.ask(0, sys.argv[1])
never.wait()
"""


def test_the_next_process_knows_what_was_learned_and_ends_with_its_engine(taught: Path) -> None:
    arguments = PredictorSettings(taught, CAPACITY).arguments()
    command = [sys.executable, "-c", HOST, QUESTION, *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as host:
        assert host.stdout is not None
        predicted, entries = map(int, host.stdout.readline().split())
        assert entries == len(LESSONS)
        assert predicted == pytest.approx(LENGTH, rel=0.5)
        # It has answered, so it has long become this program.
        [predictor] = [
            one for one in psutil.Process(host.pid).children() if PREDICTOR in one.cmdline()
        ]
        assert predictor.nice() > psutil.Process(host.pid).nice()
        os.kill(host.pid, signal.SIGKILL)
    wait_for(partial(has_ended, predictor))


def test_no_word_of_a_prompt_is_on_disk(taught: Path) -> None:
    files = [path for path in taught.rglob("*") if path.is_file()]
    assert files
    for path in files:
        content = path.read_bytes().lower()
        assert not [word for word in WORDS if word.encode() in content], path


def test_a_process_that_cannot_run_is_given_up_after_some_tries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(helper_process, "python_executable", lambda: "/bin/false")
    with running(tmp_path) as (client, answers):
        wait_for(
            lambda: "there were 3 restarts in 10 minutes already" in caplog.text, PREDICTOR_LOAD_S
        )
        client.ask(0, QUESTION)
        assert answers.wait(0) == Predicted(0, None, "down")
        client.tell_end(0, 5)
    assert caplog.text.count("ended with exit code 1; jobs run without predictions") == 4


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(settings._PACKAGES, "no_such_module", "no-such-package")
    config = EngineConfig().with_keys(length_prediction="on")
    with pytest.raises(ConfigError, match=r"length_prediction: got 'on', but no-such-package is"):
        PredictorSettings.of(config)
    config = EngineConfig().with_keys(policy="speculative")
    with pytest.raises(ConfigError, match=r"policy: got 'speculative'.*pip install"):
        PredictorSettings.of(config)
    assert PredictorSettings.of(EngineConfig()) is None


def test_where_it_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    chosen = EngineConfig().with_keys(
        length_prediction="on", length_prediction_dir=str(tmp_path / "x")
    )
    made = PredictorSettings.of(chosen)
    assert made == PredictorSettings(tmp_path / "x", 20000)
    assert stat.S_IMODE((tmp_path / "x").stat().st_mode) == 0o700
    unusable = chosen.with_keys(length_prediction_dir=str(tmp_path / "file"))
    with pytest.raises(ConfigError, match=r"length_prediction_dir: got '.*file'; File exists"):
        PredictorSettings.of(unusable)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "link").symlink_to(tmp_path / "x")
    directories = {
        default_directory(EngineConfig().with_keys(model=model, load_format=load).model)
        for model, load in (
            ("opt-125m", "dummy"),
            ("facebook/opt-125m", "auto"),
            ("facebook/opt-125m", "dummy"),
            (str(tmp_path / "x"), "auto"),
            (str(tmp_path / "link"), "auto"),  # the same model
        )
    }
    assert len(directories) == 4
    assert {path.parent for path in directories} == {
        tmp_path / "cache" / "fastserve" / "length_prediction"
    }
    # The default directory is no mistake of the user.
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    default = EngineConfig().with_keys(length_prediction="on")
    assert PredictorSettings.of(default) == PredictorSettings(None, 20000)


def test_a_user_without_a_home_keeps_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    leave_without_home(monkeypatch)
    default = EngineConfig().with_keys(length_prediction="on")
    assert PredictorSettings.of(default) == PredictorSettings(None, 20000)
    assert "lengths is not kept: no cache directory: got HOME None" in caplog.text
