"""Clients of the running server, on tritonclient and plain HTTP, not on the project's client."""

from __future__ import annotations

import json
import queue
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx2
import numpy as np
import tritonclient.grpc as grpcclient
from fastserve_backend.serving.endpoints import Endpoints
from fastserve_client import protocol
from tritonclient.utils import InferenceServerException
from waiting import wait_for

_DTYPES: dict[str, Any] = {
    "BYTES": np.object_,
    "BOOL": np.bool_,
    "INT32": np.int32,
    "UINT64": np.uint64,
    "FP32": np.float32,
}
_SPECS = {spec.name: spec for spec in protocol.INPUTS}
GENERATE = f"/v2/models/{protocol.MODEL_NAME}/generate"
GENERATE_STREAM = f"/v2/models/{protocol.MODEL_NAME}/generate_stream"

ANSWER_TIMEOUT_S = 60.0

# The messages of a gRPC stream carry no code; with this header the call ends with a status.
STATUS_HEADER = {"triton_grpc_error": "true"}


def tensors(module: Any = grpcclient, **values: Any) -> list[Any]:
    """``InferInput`` of ``module`` for each value; strings and bytes become BYTES tensors."""
    return [_tensor(module, name, value) for name, value in values.items()]


def _tensor(module: Any, name: str, value: Any) -> Any:
    spec = _SPECS[name]
    items = list(value) if spec.variable_length else [value]
    if spec.datatype == "BYTES":
        items = [item.encode() if isinstance(item, str) else item for item in items]
        array = np.empty(len(items), np.object_)
        array[:] = items
    else:
        array = np.array(items, _DTYPES[spec.datatype])
    tensor = module.InferInput(name, list(array.shape), spec.datatype)
    tensor.set_data_from_numpy(array)
    return tensor


@dataclass
class Answer:
    """Everything that a server returned for one request."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    outputs: dict[str, Any] = field(default_factory=dict)
    """Last value of each other output."""
    num_responses: int = 0
    num_finals: int = 0
    error: InferenceServerException | None = None

    def add(self, result: Any) -> None:
        message = result.get_response()
        self.num_finals += message.parameters["triton_final_response"].bool_param
        if not message.outputs:
            return  # the bare FINAL after an error
        self.num_responses += 1
        self.text += result.as_numpy(protocol.TEXT_OUTPUT)[0].decode()
        self.token_ids += result.as_numpy(protocol.OUTPUT_IDS).tolist()
        for output in message.outputs:
            if output.name not in (protocol.TEXT_OUTPUT, protocol.OUTPUT_IDS):
                self.outputs[output.name] = result.as_numpy(output.name)[0]


class GrpcStream:
    """One request on a gRPC stream of its own."""

    def __init__(
        self,
        url: str,
        parameters: dict[str, Any] | None = None,
        request_id: str = "",
        raw_inputs: list[Any] | None = None,
        headers: dict[str, str] | None = None,
        **inputs: Any,
    ) -> None:
        self._client = grpcclient.InferenceServerClient(url)
        self._events: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
        self.answer = Answer()
        self._client.start_stream(
            lambda result, error: self._events.put((result, error)), headers=headers
        )
        self._client.async_stream_infer(
            protocol.MODEL_NAME,
            [*tensors(**inputs), *(raw_inputs or [])],
            request_id=request_id,
            enable_empty_final_response=True,
            parameters=parameters,
        )

    def step(self, timeout_s: float = ANSWER_TIMEOUT_S) -> None:
        """Takes one response."""
        result, error = self._events.get(timeout=timeout_s)
        if error is not None:
            self.answer.error = error
        else:
            self.answer.add(result)

    def first_token(self) -> None:
        while not self.answer.token_ids:
            self.step()
            assert self.answer.error is None, self.answer.error

    def finish(self) -> Answer:
        """Reads to FINAL, then closes the stream and counts late responses."""
        while not self.answer.num_finals:
            self.step()
        self._client.stop_stream()
        while not self._events.empty():
            self.step()
        self._client.close()
        return self.answer

    def until_error(self, timeout_s: float = ANSWER_TIMEOUT_S) -> InferenceServerException:
        """Reads to an error, for streams whose server ends without a FINAL."""
        deadline = time.monotonic() + timeout_s
        while self.answer.error is None:
            self.step(max(0.0, deadline - time.monotonic()))
        return self.answer.error

    def pending(self) -> int:
        """Takes all responses so far; returns the number of tokens."""
        while not self._events.empty():
            self.step()
        return len(self.answer.token_ids)

    def cancel(self) -> None:
        self._client.stop_stream(cancel_requests=True)
        self._client.close()


def generate(url: str, **request: Any) -> Answer:
    """Runs one request over gRPC to its end."""
    return GrpcStream(url, **request).finish()


def post(base_url: str, path: str, body: Any) -> httpx2.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    return httpx2.post(base_url + path, content=content, headers=headers, timeout=ANSWER_TIMEOUT_S)


def server_sent_events(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    for line in lines:
        if line.startswith("data: "):
            yield json.loads(line.removeprefix("data: "))


@contextmanager
def http_stream(base_url: str, body: Any) -> Iterator[Iterator[dict[str, Any]]]:
    """``generate_stream``; leaving the context closes the connection."""
    url = base_url + GENERATE_STREAM
    with httpx2.stream("POST", url, json=body, timeout=ANSWER_TIMEOUT_S) as response:
        assert response.status_code == 200, response.read()
        yield server_sent_events(response.iter_lines())


def metric(url: str, name: str, **labels: str) -> float:
    for line in httpx2.get(url, timeout=ANSWER_TIMEOUT_S).text.splitlines():
        family, _, rest = line.partition("{")
        described, _, value = rest.rpartition("} ")
        if family == name and all(f'{key}="{text}"' in described for key, text in labels.items()):
            return float(value)
    raise KeyError(name, labels)


def used_blocks(metrics_url: str) -> float:
    return metric(metrics_url, "fastserve_kv_blocks", tier="device", state="used")


def unfinished_jobs(metrics_url: str) -> float:
    states = ("running", "waiting", "swapped")
    return sum(metric(metrics_url, "fastserve_jobs", state=state) for state in states)


def ended_jobs(metrics_url: str, finish_reason: str) -> float:
    return metric(metrics_url, "fastserve_requests_total", finish_reason=finish_reason)


SETTLE_REFUSALS = 2
"""Requests that ``settle`` has refused."""


def settle(endpoints: Endpoints) -> None:
    """Returns when the metrics count all that had ended before the call, including the token that a
    start generates. Metrics are published every half second, so they may be old before.

    Refused requests are read last, so the second publication to count one more has begun after the
    call.
    """
    for _ in range(SETTLE_REFUSALS):
        before = _refused(endpoints.metrics_url)
        answer = post(endpoints.http_url, GENERATE, {"text_input": "a", "max_tokens": 0})
        assert answer.status_code == 400, answer.text
        wait_for(lambda: _refused(endpoints.metrics_url) > before)  # noqa: B023


def wait_until_idle(endpoints: Endpoints) -> None:
    """Returns when no job is left, not even of earlier tests, and the metrics count all of them."""
    url = endpoints.metrics_url
    settle(endpoints)
    # Between the steps of two jobs no block is in use, though the second job waits.
    wait_for(lambda: unfinished_jobs(url) == 0 and used_blocks(url) == 0)
    settle(endpoints)


def _refused(metrics_url: str) -> float:
    try:
        return metric(metrics_url, "fastserve_requests_rejected_total")
    except KeyError:  # nothing was published yet
        return 0.0
