"""HTTP requests as bytes, for clients that do with their connection what no library would do."""

from __future__ import annotations


def http_post(path: str, body: bytes, headers: str = "") -> bytes:
    """``headers``: further ones, each with its line's end."""
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}{headers}Content-Length: {len(body)}\r\n\r\n".encode() + body
