"""``fastserve bench``: load tests of running servers, Triton's gRPC or OpenAI's HTTP API."""
