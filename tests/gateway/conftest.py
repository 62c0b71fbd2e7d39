from __future__ import annotations

from collections.abc import Iterator

import pytest
from openai import OpenAI
from running_gateway import RunningGateway


@pytest.fixture
def client(gateway: RunningGateway) -> Iterator[OpenAI]:
    with gateway.client() as client:
        yield client
