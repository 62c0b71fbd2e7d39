// The live view: receives pictures of the engine and shows the latest.

import { ApiError, apiKey, events, request } from "/live/api.js";
import { Chart, Rates } from "/live/charts.js";
import { Chat } from "/live/chat.js";
import { Load } from "/live/load.js";
import { Memory } from "/live/memory.js";
import { Queues } from "/live/queues.js";
import { Servers } from "/live/servers.js";

const FIRST_RETRY_MS = 500;
const MAX_RETRY_MS = 4000;
const LATE_MS = 3000;
const SILENT_MS = 15000; // three times the gateway's interval between signs of life
const DESCRIBE_MS = 2000;

const find = (id) => document.getElementById(id);

const rates = new Rates(["generation_tokens", "iterations", "preemptions", "swap_out_bytes", "swap_in_bytes"]);
const charts = [
  new Chart(find("tokens-chart"), rates, [{ name: "generation_tokens", colour: "--accent", sign: 1 }]),
  new Chart(
    find("swap-chart"),
    rates,
    [
      { name: "swap_out_bytes", colour: "--preempted", sign: 1 },
      { name: "swap_in_bytes", colour: "--accent", sign: -1 },
    ],
    { unit: perSecond },
  ),
];
const queues = new Queues(find("lanes"), find("job-details"), find("unlisted"));
const memory = new Memory(find);
const servers = new Servers(find("server"), () => stream?.abort());
const modelName = () => servers.model();
new Chat(find, modelName);
new Load(find("load"), find("load-note"), modelName);

// --- Drawing ------------------------------------------------------------------------------------

let latest = null;
let latestMs = 0;
let described = 0;

function take(state) {
  const isFirst = latest === null;
  latest = state;
  latestMs = performance.now();
  if (isFirst) requestAnimationFrame(draw);
}

// Draws at most once a frame. Of pictures that come faster only the rates count.
function draw() {
  const state = latest;
  latest = null;
  if (state.totals) drawRates(rates.add(state.time_s, state.totals)); // a tenant gets none
  queues.show(state);
  memory.show(state);
  text("policy", state.policy_description);
  text("running", state.running);
  text("waiting", state.waiting - state.swapped);
  text("swapped", state.swapped);
  if (latestMs - described > DESCRIBE_MS) {
    described = latestMs;
    queues.describe(state);
  }
}

function drawRates(rate) {
  for (const chart of charts) chart.draw();
  text("tokens-rate", number(rate.generation_tokens));
  text("iterations-rate", number(rate.iterations));
  text("preemptions-rate", number(rate.preemptions));
  text("swap-out", perSecond(rate.swap_out_bytes));
  text("swap-in", perSecond(rate.swap_in_bytes));
}

function text(id, value) {
  const element = find(id);
  if (element.textContent !== String(value)) element.textContent = value;
}

function number(value) {
  return value >= 10 || value === 0 ? value.toFixed(0) : value.toFixed(1);
}

function perSecond(bytes) {
  for (const unit of ["B", "KiB", "MiB"]) {
    if (bytes < 1000) return `${number(bytes)} ${unit}/s`;
    bytes /= 1024;
  }
  return `${number(bytes)} GiB/s`;
}

// --- Receiving ----------------------------------------------------------------------------------

let stream = null; // AbortController of the open stream
let heardMs = 0; // when it was opened or last sent something
let wake = null; // ends the pause between two attempts

function status(state, message) {
  const pill = find("status");
  pill.dataset.state = state;
  text("status", message);
}

async function readPictures(signal) {
  const response = await request(servers.eventsPath(), { signal });
  find("key-form").hidden = true;
  servers.list().catch(() => {}); // the next stream tries again
  const onBytes = () => (heardMs = performance.now());
  for await (const data of events(response, onBytes)) {
    const state = JSON.parse(data);
    if (state.error) {
      status("lost", `${state.error.message}; trying again`);
      continue;
    }
    status("live", "live");
    take(state);
  }
}

async function follow() {
  let delayMs = FIRST_RETRY_MS;
  for (;;) {
    while (document.hidden) {
      status("connecting", "paused");
      await pause(0);
    }
    stream = new AbortController();
    let isRefused = false;
    const startedMs = performance.now();
    heardMs = startedMs;
    try {
      await readPictures(stream.signal);
      status("lost", "the gateway ended; trying again");
    } catch (error) {
      if (error.name === "AbortError") status("connecting", "paused");
      else if (error instanceof ApiError && error.status === 401) {
        isRefused = true;
        askForKey();
      } else if (error instanceof ApiError) status("lost", error.message);
      else status("lost", "no gateway; trying again");
    }
    if (latestMs > startedMs) delayMs = FIRST_RETRY_MS;
    await pause(isRefused ? null : delayMs); // the same key would be refused again
    delayMs = Math.min(2 * delayMs, MAX_RETRY_MS);
  }
}

// Waits for the time, or for a change. Without a time, or in a hidden tab, waits for a change.
function pause(delayMs) {
  return new Promise((resolve) => {
    const isTimed = delayMs !== null && !document.hidden;
    const timer = isTimed ? setTimeout(resolve, delayMs) : 0;
    wake = () => {
      clearTimeout(timer);
      resolve();
    };
  });
}

function askForKey() {
  status("lost", apiKey.value ? "the key is not valid" : "an API key is needed");
  const form = find("key-form");
  if (form.hidden) {
    form.hidden = false;
    find("key").focus();
  }
}

find("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  apiKey.set(find("key").value.trim());
  status("connecting", "connecting…");
  wake?.();
});

document.addEventListener("visibilitychange", () => {
  if (document.hidden) stream?.abort();
  else wake?.();
});

setInterval(() => {
  const nowMs = performance.now();
  // A host that has vanished closes no connection.
  if (nowMs - heardMs > SILENT_MS) stream?.abort(new Error("silent"));
  const isLate = nowMs - latestMs > LATE_MS;
  if (isLate && find("status").dataset.state === "live") status("live", "live, waiting for a long iteration");
}, 1000);

follow();
