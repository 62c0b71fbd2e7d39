"""``fastserve bench``: load tests of running servers, over Triton's gRPC or OpenAI's API."""
