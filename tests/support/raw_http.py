"""HTTP requests as bytes, for clients that misuse their connection as no library would."""

from __future__ import annotations


def http_post(path: str, body: bytes, headers: str = "") -> bytes:
    """``headers`` are additional headers, each with its line end."""
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}{headers}Content-Length: {len(body)}\r\n\r\n".encode() + body
