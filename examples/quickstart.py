"""Start a real tritonserver with the embedded model, stream one answer from it, stop it."""

import sys
import tempfile
import time
from pathlib import Path

from fastserve_backend.checkpoints.embedded import EMBEDDED_MODEL
from fastserve_backend.config import EngineConfig
from fastserve_backend.serving.launch import TritonServer
from fastserve_client.terminal import generate_to_terminal

QUESTION = "Why is the sky blue?"


def main() -> int:
    config = EngineConfig().with_keys(model=EMBEDDED_MODEL)
    print(f"Starting tritonserver with {EMBEDDED_MODEL} …", file=sys.stderr)
    started = time.monotonic()
    with (
        tempfile.TemporaryDirectory() as logs,
        TritonServer(
            config, http_port=0, grpc_port=0, metrics_port=0, log_path=Path(logs) / "server.log"
        ) as server,
    ):
        print(f"Ready after {time.monotonic() - started:.1f} s.", file=sys.stderr)
        print(f"> {QUESTION}")
        return int(
            generate_to_terminal(
                [{"role": "user", "content": QUESTION}],
                url=server.endpoints.grpc_url,
                max_tokens=200,
                temperature=0,
            )
        )


if __name__ == "__main__":
    sys.exit(main())
