from __future__ import annotations

import pytest
from fastserve_backend.errors import ContextLengthError, InvalidRequestError, TenantLimitError
from fastserve_client.errors import (
    ClientError,
    ConnectionFailed,
    ContextLengthExceeded,
    InvalidRequest,
    ModelLost,
    RequestCancelled,
    RequestTimeout,
    ServerError,
    ServerFailed,
    ServerOverloaded,
    ServerUnavailable,
    error_from_http,
    error_from_message,
    error_from_status,
)
from fastserve_client.exchange import Exchange
from fastserve_client.request import InferRequest
from fastserve_client.retry import RetryPolicy


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        # The first ones are the server's own words.
        (str(InvalidRequestError("max_tokens", -1, "must be an integer, 1 to 9")), InvalidRequest),
        (str(InvalidRequestError("stop_words", "shutting down", "too long")), InvalidRequest),
        (
            str(InvalidRequestError("text_input, input_ids", "both", "exactly one is required")),
            InvalidRequest,
        ),
        (str(InvalidRequestError("messages", "1 message", "no template")), InvalidRequest),
        (str(InvalidRequestError("messages[0].content", 1, "must be a string")), InvalidRequest),
        (
            str(ContextLengthError("text_input", "9 tokens", 8, "so at most 7")),
            ContextLengthExceeded,
        ),
        (str(ContextLengthError("max_tokens", 9, 8, "so at most 7")), ContextLengthExceeded),
        (
            # Text that a user wrote does not decide the error's class.
            str(
                InvalidRequestError(
                    "stop_words",
                    "9 words'; This model's maximum context length is 8 tokens",
                    "too long",
                )
            ),
            InvalidRequest,
        ),
        ("4096 requests are queued already; try again later", ServerOverloaded),
        ("8 others watch already; try again later", ServerOverloaded),
        ("Stub process 'fastserve_0_0' is not healthy.", ModelLost),
        ("the server is shutting down and takes no new requests", ServerUnavailable),
        # Triton's words since release 25.05.
        ("GRPC server is shutting down and has stopped accepting new requests.", ServerUnavailable),
        ("the job was cancelled", RequestCancelled),
        ("rank 0 died (signal 9)", ServerError),
        (
            "the model's processes failed: model.device: got 'cuda'; no CUDA device is usable "
            "here, use cpu or auto; given up after 3 restarts in 10 minutes",
            ServerFailed,
        ),
        ("internal error in the engine; see the server's log", ServerFailed),
        # The rest are Triton's.
        ("unexpected inference input 'bogus' for model 'fastserve'", InvalidRequest),
        (
            "[request id: 7] unexpected shape for input 'seed' for model 'fastserve'. "
            "Expected [1], got [2]",
            InvalidRequest,
        ),
        (
            "inference input 'seed' data-type is 'INT32', but model 'fastserve' expects 'UINT64'",
            InvalidRequest,
        ),
        ("", ServerError),
    ],
)
def test_the_text_of_a_stream_error_decides_its_type(message: str, kind: type[ClientError]) -> None:
    error = error_from_message(message)
    assert type(error) is kind
    assert str(error) == message


def test_the_end_of_a_tenants_refusal_says_when_to_come_back() -> None:
    refusal = TenantLimitError("b; try again in 9 s", "has used its 5 tokens a minute", 2.2)
    error = error_from_message(str(refusal))
    assert type(error) is ServerOverloaded
    assert error.retry_after_s == 3
    full = error_from_message("4096 requests are queued already; try again later")
    assert isinstance(full, ServerOverloaded)
    assert full.retry_after_s is None


def test_a_retry_waits_as_long_as_the_server_says() -> None:
    limited = ServerOverloaded("tenant 'b' has used its 5 tokens a minute; try again in 7 s")
    exchange = Exchange(InferRequest("fastserve", {}), "grpc://h:1", None, RetryPolicy(3))
    assert exchange.retry_delay_s(ServerUnavailable("the server is shutting down")) == 0.1
    assert exchange.retry_delay_s(limited) == 7
    hasty = Exchange(InferRequest("fastserve", {}), "grpc://h:1", 5.0, RetryPolicy(3))
    assert hasty.retry_delay_s(limited) is None


def test_an_error_is_one_line() -> None:
    assert str(error_from_message("in the\n  backend\n")) == "in the backend"
    assert "\n" not in str(error_from_status("grpc://h:1", "UNKNOWN", "first\nsecond"))


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("UNAVAILABLE", ConnectionFailed),
        ("DEADLINE_EXCEEDED", RequestTimeout),
        ("CANCELLED", RequestCancelled),
        ("INVALID_ARGUMENT", InvalidRequest),
        ("RESOURCE_EXHAUSTED", InvalidRequest),
        ("UNIMPLEMENTED", ServerError),
        ("INTERNAL", ServerError),
    ],
)
def test_a_status_maps_to_a_type_and_names_the_url(code: str, kind: type[ClientError]) -> None:
    error = error_from_status("grpc://127.0.0.1:8001", code, "some details")
    assert type(error) is kind
    assert "grpc://127.0.0.1:8001" in str(error)


@pytest.mark.parametrize(
    ("details", "reason"),
    [
        ("Socket closed", "Socket closed"),
        (
            "failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:1: "
            "Failed to connect to remote host: Connection refused",
            "Connection refused",
        ),
        (
            "failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:1: "
            "Tls handshake failed (TSI_PROTOCOL_FAILURE): SSL_ERROR_SSL: error:1000007d:"
            "SSL routines:OPENSSL_internal:CERTIFICATE_VERIFY_FAILED: self signed certificate: OK",
            "self signed certificate",
        ),
    ],
)
def test_a_lost_connection_says_why_and_what_to_do(details: str, reason: str) -> None:
    error = error_from_status("grpc://h:1", "UNAVAILABLE", details)
    assert isinstance(error, ServerUnavailable)
    assert str(error).startswith(f"no server at grpc://h:1 ({reason}); start one with 'fastserve ")


@pytest.mark.parametrize("reason", ["has no available versions", "is not found"])
def test_an_unknown_model_comes_with_the_remedy(reason: str) -> None:
    """Triton's words for a model that it does not have, now or ever."""
    message = f"Request for unknown model: 'nosuch' {reason}"
    for error in (error_from_message(message), error_from_http("http://h:1", 404, message)):
        assert type(error) is ServerUnavailable
        remedy = "give the name of a model that the server has loaded, as --model or model="
        assert str(error) == f"{message}; {remedy}"


@pytest.mark.parametrize(
    ("status", "message", "kind"),
    [
        (400, "max_tokens: got -1; must be an integer, 1 to 9", InvalidRequest),
        (400, "something of Triton's own", InvalidRequest),
        (404, "something of Triton's own", ServerError),
        (500, "failed to parse the request JSON buffer: Invalid value. at 0", ServerError),
        (500, "rank 0 died (signal 9)", ServerError),
        (503, "4096 requests are queued already; try again later", ServerOverloaded),
        (503, "the server is shutting down and takes no new requests", ServerUnavailable),
        (503, "something of Triton's own", ServerUnavailable),
    ],
)
def test_an_http_status_counts_where_the_text_says_nothing(
    status: int, message: str, kind: type[ClientError]
) -> None:
    error = error_from_http("http://h:1", status, message)
    assert type(error) is kind
    assert str(error) == message


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (502, ServerUnavailable),
        (503, ServerUnavailable),
        (504, ServerUnavailable),
        (413, InvalidRequest),
        (301, ServerError),
        (401, ServerError),
        (404, ServerError),
    ],
)
def test_an_answer_that_is_not_tritons_names_the_url(status: int, kind: type[ClientError]) -> None:
    error = error_from_http("http://h:1", status, None)
    assert type(error) is kind
    assert str(error).startswith(f"http://h:1 answered with the HTTP status {status}")
