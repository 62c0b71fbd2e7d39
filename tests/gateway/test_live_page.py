"""The live view in a real browser: Debian's chromium, driven by selenium.

The embedded model answers in the chat; the tiny one, whose memory is short, shows the queues.
"""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from fastserve_backend.config import EngineConfig
from fastserve_backend.serving.endpoints import Endpoints
from fastserve_backend.serving.launch import TritonServer
from fastserve_client.listening import reserve
from PIL import Image
from running_gateway import RunningGateway, running_gateway
from running_server import job_held, rank_stopped, running_server
from selenium import webdriver
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement
from serving_client import (
    GrpcStream,
    ended_jobs,
    unfinished_jobs,
    used_blocks,
    wait_until_idle,
)
from waiting import wait_for

DEADLINE_S = 120.0
MOST_BURSTS = 6
# Notes in `window.shown` what every picture shows. The callback runs before the next picture.
RECORDER = """
    window.shown = { lanes: {}, usedBlocks: 0, swapOut: [] };
    const find = (id) => document.getElementById(id);
    new MutationObserver(() => {
      const height = document.querySelector(".lane").offsetHeight;
      for (const job of document.querySelectorAll(".job:not(.gone)")) {
        const lane = Math.floor(new DOMMatrix(job.style.transform).f / height);
        const lanes = (window.shown.lanes[job.dataset.number] ??= []);
        if (!lanes.includes(lane)) lanes.push(lane);
      }
      const used = Number(find("device-bar").dataset.used ?? 0);
      window.shown.usedBlocks = Math.max(window.shown.usedBlocks, used);
      const swapOut = find("swap-out").textContent;
      if (!window.shown.swapOut.includes(swapOut)) window.shown.swapOut.push(swapOut);
    }).observe(find("lanes"), { attributeFilter: ["data-pictures"] });
"""
# Notes whether a picture has shown 64 jobs of one priority and one of another.
PRIORITIES_RECORDER = """
    window.areAllShown = false;
    new MutationObserver(() => {
      const shown = document.getElementById("unlisted").textContent;
      window.areAllShown ||= shown.includes("priority, the lowest first: 0: 64, 2: 1");
    }).observe(document.getElementById("lanes"), { attributeFilter: ["data-pictures"] });
"""
BROWSER, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
]  # fmt: skip

pytestmark = pytest.mark.skipif(
    BROWSER is None or DRIVER is None,
    reason="no browser; on Debian: apt-get install chromium chromium-driver",
)


class Page:
    """The live view in the browser."""

    def __init__(self, driver: webdriver.Chrome) -> None:
        self.driver = driver

    def open(self, gateway: RunningGateway) -> None:
        self.driver.get(f"{gateway.url.replace('0.0.0.0', '127.0.0.1')}/live")

    def find(self, element_id: str) -> WebElement:
        return self.driver.find_element(By.ID, element_id)

    def text(self, element_id: str) -> str:
        return self.find(element_id).text

    def until(self, condition: Callable[[], object], timeout_s: float = DEADLINE_S) -> None:
        try:
            wait_for(lambda: bool(condition()), timeout_s)
        except AssertionError:
            body = self.driver.find_element(By.TAG_NAME, "body").text
            raise AssertionError(f"the page shows:\n{body}") from None

    def until_live(self) -> None:
        self.until(lambda: self.text("status").startswith("live"))

    def say(self, text: str, max_tokens: int) -> None:
        tokens = self.find("chat-tokens")
        tokens.clear()
        tokens.send_keys(str(max_tokens))
        self.find("chat-input").send_keys(text + Keys.ENTER)

    def answers(self) -> list[str]:
        found = self.driver.find_elements(By.CSS_SELECTOR, ".message.assistant")
        return [element.text for element in found]

    def is_writing(self) -> bool:
        return bool(self.driver.find_elements(By.CSS_SELECTOR, "[data-writing]"))

    def lanes_of_jobs(self) -> dict[int, int]:
        """Maps job numbers to lanes, 0 the highest, by the final position of each job's block."""
        places = self.driver.execute_script(
            "return [...document.querySelectorAll('.job:not(.gone)')].map(job => "
            "[Number(job.dataset.number), new DOMMatrix(job.style.transform).f, "
            "document.querySelector('.lane').offsetHeight])"
        )
        return {number: int(y // height) for number, y, height in places}

    @contextmanager
    def running_first(self, script: str) -> Iterator[None]:
        """Runs the script in every document, before the document's own scripts."""
        command = "Page.addScriptToEvaluateOnNewDocument"
        added = self.driver.execute_cdp_cmd(command, {"source": script})
        try:
            yield
        finally:
            self.driver.execute_cdp_cmd("Page.removeScriptToEvaluateOnNewDocument", added)

    def errors(self) -> list[str]:
        """New errors and CSP violations in the console since the last call."""
        return [entry["message"] for entry in self.driver.get_log("browser")]


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[webdriver.Chrome]:
    options = webdriver.ChromeOptions()
    options.binary_location = str(BROWSER)
    for flag in [*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('browser')}"]:
        options.add_argument(flag)
    options.add_argument("--window-size=1440,900")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options, webdriver.ChromeService(str(DRIVER)))
    yield driver
    driver.quit()


@pytest.fixture
def page(driver: webdriver.Chrome) -> Iterator[Page]:
    page = Page(driver)
    yield page
    driver.get("about:blank")
    page.errors()  # errors of requests that a closed page left unfinished


def test_queues_memory_and_traffic_move_under_load(
    page: Page, gateway: RunningGateway, endpoints: Endpoints, tmp_path: Path
) -> None:
    page.open(gateway)
    page.until_live()
    assert page.text("policy").startswith("skip_join_mlfq: ")
    assert len(page.driver.find_elements(By.CSS_SELECTOR, ".lane")) >= 8
    wait_until_idle(endpoints)
    before = ended_jobs(endpoints.metrics_url, "length")
    page.driver.execute_script(RECORDER)
    for number in range(1, MOST_BURSTS + 1):
        # These sink, and hold so much KV that the burst displaces some, if it comes in time. Each
        # burst has longer ones, for machines on which few pictures show the first ones.
        long = {
            "text_input": "x" * 900, "stream": True, "max_tokens": 300 * number, "ignore_eos": True,
        }  # fmt: skip
        sinking = [GrpcStream(endpoints.grpc_url, **long) for _ in range(3)]
        for stream in sinking:
            stream.first_token()
        page.find("load").click()
        if number == 1:
            picture = tmp_path / "live_page.png"
            page.driver.save_screenshot(str(picture))
            with Image.open(picture) as image:
                assert image.size[0] >= 1000
                assert len(image.convert("RGB").getcolors(maxcolors=1 << 24)) > 100  # not blank
        page.until(lambda: page.text("load") == "Send 20 mixed requests")
        assert page.text("load-note") == ""
        for stream in sinking:
            stream.finish()
        page.until(lambda: page.text("running") == "0" and page.lanes_of_jobs() == {})
        page.until(lambda: page.text("device-text").startswith("0 of "))
        expected = before + 23 * number
        wait_for(
            lambda expected=expected: ended_jobs(endpoints.metrics_url, "length") == expected,
            DEADLINE_S,
        )
        shown = page.driver.execute_script("return window.shown")
        num_sunk = sum(len(lanes) > 1 for lanes in shown["lanes"].values())
        if set(shown["swapOut"]) > {"0 B/s"} and num_sunk >= 3:
            break
    assert num_sunk >= 3, shown
    assert shown["usedBlocks"] > 0
    assert set(shown["swapOut"]) > {"0 B/s"}
    assert page.errors() == []


def test_a_job_shows_its_service_level(
    page: Page, gateway: RunningGateway, server: TritonServer
) -> None:
    endpoints = server.endpoints
    page.open(gateway)
    page.until_live()
    wait_until_idle(endpoints)
    long = {"text_input": "a long one", "stream": True, "max_tokens": 3500, "ignore_eos": True}
    page.driver.execute_script(PRIORITIES_RECORDER)
    with rank_stopped(server.runtime):  # so none ends before all have come
        # More urgent jobs take all seats for as long as it takes, so the last one stays where it is
        before_it = [GrpcStream(endpoints.grpc_url, **long) for _ in range(64)]
        waiting = GrpcStream(
            endpoints.grpc_url,
            **long,
            priority=2,
            tenant="<b>acme</b>",
            ttft_slo_ms=0.1,
            tpot_slo_ms=60_000,
        )
        wait_for(lambda: unfinished_jobs(endpoints.metrics_url) == 65, DEADLINE_S)
    page.until(lambda: page.driver.execute_script("return window.areAllShown"))
    page.until(lambda: page.driver.find_elements(By.CSS_SELECTOR, ".job[data-late]"))
    job = page.driver.find_element(By.CSS_SELECTOR, ".job[data-late]")
    ActionChains(page.driver).move_to_element(job).perform()
    shown = page.text("job-details").splitlines()
    assert shown[4:8] == [
        "priority 2",
        "tenant <b>acme</b>",
        "wanted: first token in 0.1 ms",
        "wanted: each later token in 60 s",
    ]
    assert shown[8].startswith("next token late by ")
    for stream in (*before_it, waiting):
        stream.cancel()
    page.until(lambda: page.lanes_of_jobs() == {})
    assert page.errors() == []


def test_what_is_too_long_for_the_model_is_said_and_not_sent_again(
    page: Page, gateway: RunningGateway
) -> None:
    page.open(gateway)
    page.until_live()
    page.driver.execute_script("document.getElementById('chat-input').value = 'x'.repeat(100_000)")
    page.say("", 10)
    page.until(lambda: "maximum context length is" in page.text("chat-note"))
    page.until(lambda: page.find("chat-send").is_enabled())
    # The refused message leaves the conversation, and can be edited.
    assert page.driver.find_elements(By.CSS_SELECTOR, ".message") == []
    assert page.find("chat-input").get_attribute("value") == "x" * 100_000
    assert len(page.errors()) == 1  # one refusal


def test_a_new_chat_says_nothing_of_the_one_that_it_ends(
    page: Page, gateway: RunningGateway
) -> None:
    page.open(gateway)
    page.until_live()
    page.say("Hello", 3000)
    page.until(lambda: page.answers() and page.answers()[0])
    page.driver.execute_script("document.getElementById('chat-clear').click()")
    page.until(lambda: page.find("chat-send").is_enabled())
    assert page.text("chat-note") == ""
    assert page.find("chat-input").get_attribute("value") == ""
    assert page.driver.find_elements(By.CSS_SELECTOR, ".message") == []


def test_stop_cancels_the_job_on_the_server(
    page: Page, gateway: RunningGateway, server: TritonServer
) -> None:
    """Moreover, a model without a chat template continues the text, and its output is never
    HTML."""
    endpoints = server.endpoints
    page.open(gateway)
    page.until_live()
    wait_until_idle(endpoints)
    before = ended_jobs(endpoints.metrics_url, "cancelled")

    closed = gateway.num_requests("/v1/completions", 499)

    def start() -> None:
        page.driver.execute_script("document.getElementById('chat-clear').click()")
        page.say("<b>Hello</b>", 3000)
        page.until(lambda: page.answers() and len(page.answers()[-1]) > 20)
        assert "no chat template" in page.text("chat-note")

    with job_held(server, start):
        page.driver.execute_script("document.getElementById('chat-stop').click()")
        page.until(lambda: not page.is_writing())
        assert page.text("chat-note") == "stopped"
        wait_for(lambda: gateway.num_requests("/v1/completions", 499) > closed, DEADLINE_S)
    wait_until_idle(endpoints)
    assert ended_jobs(endpoints.metrics_url, "cancelled") == before + 1
    assert page.driver.find_element(By.CSS_SELECTOR, ".message.user").text == "<b>Hello</b>"
    wait_for(lambda: used_blocks(endpoints.metrics_url) == 0, DEADLINE_S)
    # The console shows only the refusal that led to the prompt.
    assert all("/v1/chat/completions" in line and "400" in line for line in page.errors())


def guarded_by(directory: Path, line: str = "sk-live") -> list[str]:
    """Flags of a gateway that accepts the key ``sk-live``."""
    keys = directory / "keys"
    keys.write_text(f"{line}\n", encoding="utf-8")
    return ["--api-keys-file", str(keys)]


def test_a_wrong_key_and_a_right_one(page: Page, endpoints: Endpoints, tmp_path: Path) -> None:
    flags = guarded_by(tmp_path)
    with running_gateway(endpoints.grpc_url, tmp_path / "gateway.log", *flags) as guarded:
        page.open(guarded)
        page.until(lambda: page.text("status") == "an API key is needed")
        page.find("key").send_keys("sk-wrong" + Keys.ENTER)
        page.until(lambda: page.text("status") == "the key is not valid")
        page.errors()
        page.find("key").clear()
        page.find("key").send_keys("ключ" + Keys.ENTER)
        page.until(lambda: len(page.errors()) > 0)  # of the refusal
        page.until(lambda: page.text("status") == "the key is not valid")
        page.find("key").clear()
        page.find("key").send_keys("sk-live" + Keys.ENTER)
        page.until_live()
        assert not page.find("key-form").is_displayed()
        page.open(guarded)  # this tab still has the key
        page.until_live()
        stored = page.driver.execute_script("return [localStorage.length, document.cookie]")
        assert stored == [0, ""]
        page.driver.get("about:blank")


def test_a_tenant_sees_its_jobs_and_no_rates(
    page: Page, endpoints: Endpoints, tmp_path: Path
) -> None:
    flags = guarded_by(tmp_path, "chat:sk-live")
    with running_gateway(endpoints.grpc_url, tmp_path / "gateway.log", *flags) as guarded:
        page.open(guarded)
        page.until(lambda: page.text("status") == "an API key is needed")
        page.errors()
        page.find("key").send_keys("sk-live" + Keys.ENTER)
        page.until(lambda: page.text("running") == "0")
        assert page.text("tokens-rate") == "–"
        assert page.errors() == []
        page.driver.get("about:blank")


def test_a_key_that_is_given_while_the_gateway_is_away(
    page: Page, endpoints: Endpoints, tmp_path: Path
) -> None:
    with reserve("127.0.0.1", 0) as reserved:  # else others could get the port meanwhile
        flags = [*guarded_by(tmp_path), "--port", str(reserved.getsockname()[1])]
        with running_gateway(endpoints.grpc_url, tmp_path / "first.log", *flags) as gateway:
            page.open(gateway)
            page.until(lambda: page.text("status") == "an API key is needed")
        page.find("key").send_keys("sk-live" + Keys.ENTER)
        page.until(lambda: page.text("status") == "no gateway; trying again")
        with running_gateway(endpoints.grpc_url, tmp_path / "second.log", *flags):
            page.until_live()
            page.driver.get("about:blank")


def test_a_hidden_tab_does_not_connect(page: Page, gateway: RunningGateway) -> None:
    script = """
        window.isHidden = true;
        Object.defineProperty(document, "hidden", { get: () => window.isHidden });
        window.requests = [];
        const fetched = window.fetch;
        window.fetch = (path, options) => {
          window.requests.push(path);
          return fetched(path, options);
        };
    """
    with page.running_first(script):
        page.open(gateway)
        page.until(lambda: page.text("status") == "paused")
        assert page.driver.execute_script("return window.requests") == []
        page.driver.execute_script(
            "window.isHidden = false; document.dispatchEvent(new Event('visibilitychange'))"
        )
        page.until_live()


def test_a_gateway_that_falls_silent_is_left(
    page: Page, endpoints: Endpoints, tmp_path: Path
) -> None:
    """So behaves a gateway whose host has vanished."""
    script = """
        const now = performance.now.bind(performance);
        window.aheadMs = 0;
        performance.now = () => now() + window.aheadMs;
    """
    with (
        running_gateway(endpoints.grpc_url, tmp_path / "gateway.log") as gateway,
        page.running_first(script),
    ):
        page.open(gateway)
        page.until_live()
        gateway.process.send_signal(signal.SIGSTOP)
        try:
            page.driver.execute_script("window.aheadMs += 16_000")
            page.until(lambda: page.text("status") == "no gateway; trying again")
        finally:
            gateway.process.send_signal(signal.SIGCONT)
        page.until_live()
        page.driver.get("about:blank")


def test_an_error_of_a_proxy_is_shown_by_its_status(page: Page, gateway: RunningGateway) -> None:
    script = """
        const fetched = window.fetch;
        window.answer = '{"message": "upstream is away"}';
        window.fetch = (path, options) => path !== "/live/events" ? fetched(path, options) :
          Promise.resolve(new Response(window.answer, {status: 502, statusText: "Bad Gateway"}));
    """
    with page.running_first(script):
        page.open(gateway)
        page.until(lambda: page.text("status") == "502 Bad Gateway")


def test_only_what_is_news_is_read_out(page: Page, gateway: RunningGateway) -> None:
    """Screen readers read news, but no numbers that change ten times a second."""
    page.open(gateway)
    page.until_live()
    tree = page.driver.execute_cdp_cmd("Accessibility.getFullAXTree", {})["nodes"]
    announced = set()
    for node in tree:
        if node.get("role", {}).get("value") in ("alert", "log", "status"):
            of_node = {"backendNodeId": node["backendDOMNodeId"]}
            attributes = page.driver.execute_cdp_cmd("DOM.describeNode", of_node)["node"][
                "attributes"
            ]
            announced.add(attributes[attributes.index("id") + 1])
    assert "status" in announced
    assert announced <= {"status", "chat-log", "chat-note", "load-note"}


def test_chat_and_its_tools(page: Page, chat_gateway: RunningGateway) -> None:
    page.open(chat_gateway)
    page.until_live()
    page.say("What is the capital of France?", 24)
    page.until(lambda: page.answers() and not page.is_writing())
    assert len(page.answers()[0]) > 3
    assert page.text("chat-note") == ""
    page.find("chat-tools").click()
    page.say("What is 12 * 34?", 64)
    # Two requests, both with the description of all tools.
    page.until(lambda: len(page.answers()) == 2 and not page.is_writing(), 3 * DEADLINE_S)
    assert "408" in page.answers()[1]
    [call] = page.driver.find_elements(By.CSS_SELECTOR, ".message.call")
    assert call.text == "calculator: 12 * 34 = 408"
    page.find("chat-tools").click()
    assert page.errors() == []


def test_a_chat_goes_on_when_the_server_was_restarted(
    page: Page, tiny_config: EngineConfig, tmp_path: Path
) -> None:
    with (
        running_server(tiny_config, tmp_path / "server.log") as server,
        running_gateway(server.endpoints.grpc_url, tmp_path / "gateway.log") as gateway,
    ):
        page.open(gateway)
        page.until_live()
        page.say("Hello", 8)
        page.until(lambda: page.answers() and not page.is_writing())
        pid = server.runtime.stub_pid()
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        page.until(lambda: page.text("status").startswith("the model server"))
        page.until_live()  # the server was restarted, and the page has found it again
        page.say("Hello again", 8)
        page.until(lambda: len(page.answers()) == 2 and not page.is_writing())


def test_a_phone_has_all_of_it_in_one_column(page: Page, gateway: RunningGateway) -> None:
    size = {"width": 390, "height": 844, "deviceScaleFactor": 1, "mobile": True}
    page.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    try:
        page.open(gateway)
        page.until_live()
        width = "return document.documentElement.scrollWidth"
        assert page.driver.execute_script(width) <= 390
        panels = page.driver.find_elements(By.CSS_SELECTOR, ".panel")
        assert len({panel.rect["x"] for panel in panels}) == 1
        assert page.errors() == []
    finally:
        page.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
