"""Jobs with other salts never use each other's KV, and those with the same salt do."""

from __future__ import annotations

from array import array
from dataclasses import replace
from hashlib import blake2b
from itertools import takewhile

import pytest
from fastserve_backend.config_sections import KVCacheSection
from fastserve_backend.job import FinishReason, Job
from fastserve_backend.kv_cache.prefixes import PrefixKeys
from hypothesis import given
from hypothesis import strategies as st
from jobs import make_job
from kv_desk import Desk
from matrices import random_examples

BLOCK_SIZE = 2
SALTS = st.sampled_from(["", "a", "b", "aa", "long"])
PROMPTS = st.lists(st.integers(0, 1), max_size=8)


def salted(job: Job, salt: str, session_id: str = "") -> Job:
    job.service = replace(job.service, cache_salt=salt, session_id=session_id)
    return job


def keys_of(salt: str, tokens: list[int], rotary_switch: int | None) -> list[bytes]:
    job = salted(make_job(0, 0), salt)
    job.prompt_ids = array("i", [*tokens, 7])
    return list(PrefixKeys(KVCacheSection(), BLOCK_SIZE, rotary_switch).of_prefill(job))


def num_common(first: list[int], second: list[int]) -> int:
    pairs = zip(first, second, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


@random_examples(600)
@given(SALTS, SALTS, PROMPTS, PROMPTS, st.sampled_from([None, 4]))
def test_keys_are_equal_for_equal_salts_and_beginnings_alone(
    salt: str, other_salt: str, tokens: list[int], other: list[int], rotary_switch: int | None
) -> None:
    found = keys_of(salt, tokens, rotary_switch), keys_of(other_salt, other, rotary_switch)
    is_long = [rotary_switch is not None and len(one) >= rotary_switch for one in (tokens, other)]
    alike = salt == other_salt and is_long[0] == is_long[1]
    num_blocks = num_common(tokens, other) // BLOCK_SIZE if alike else 0
    assert found[0][:num_blocks] == found[1][:num_blocks]
    assert len(set(found[0]) & set(found[1])) == num_blocks


def test_a_salt_that_spells_the_tokens_of_a_prompt_continues_it_no_more_than_others() -> None:
    """Else its key would be that of the prompt, whose blocks it could then go on from."""
    tokens = [0x61616161, 0x62626262]  # "aaaabbbb"
    salt = array("i", tokens).tobytes().decode()
    (first_key,) = keys_of("", tokens, None)
    assert blake2b(salt.encode(), digest_size=32).digest() == first_key
    more = [3, 4]
    assert keys_of("", [*tokens, *more], None)[1] not in keys_of(salt, more, None)


@pytest.fixture(params=["kept blocks", "blocks of a running job"])
def desk(request: pytest.FixtureRequest) -> Desk:
    """Someone with the salt "a" has computed 64 tokens."""
    desk = Desk(40, prefix_caching=True)
    earlier = salted(make_job(0, 65), "a")
    desk.run(earlier)
    if request.param == "kept blocks":
        earlier.finish_reason = FinishReason.STOP
        desk.manager.release(earlier, desk.now)
    return desk


@pytest.mark.parametrize(("salt", "num_shared"), [("a", 64), ("b", 0), ("", 0)])
def test_a_job_finds_only_blocks_of_its_salt(desk: Desk, salt: str, num_shared: int) -> None:
    job = salted(make_job(1, 65), salt)
    desk.manager.on_arrival(job, desk.now)
    assert job.num_ready == num_shared
    desk.run(job)
    assert desk.counters.prefix_cached_tokens == num_shared


def test_a_job_does_not_wait_for_what_a_job_with_another_salt_computes() -> None:
    desk = Desk(40, prefix_caching=True)
    jobs = [salted(make_job(number, 65), salt) for number, salt in enumerate("ab")]
    desk.run(*jobs)
    assert desk.counters.prefix_cached_tokens == 0


@pytest.mark.parametrize(("salt", "num_held"), [("a", 65), ("b", 0), ("", 0)])
def test_a_session_goes_on_only_with_its_salt(salt: str, num_held: int) -> None:
    desk = Desk(10)
    first = salted(make_job(0, 65), "a", "s")
    desk.run(first)
    first.finish_reason = FinishReason.STOP
    desk.manager.release(first, desk.now)
    turn = salted(make_job(1, 100), salt, "s")
    desk.manager.on_arrival(turn, desk.now)
    assert turn.num_computed == num_held
