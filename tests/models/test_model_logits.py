"""Our models give transformers' logits in float32 at every position, under any schedule."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

import pytest
from decoder_checkpoints import VARIANTS as DECODER_VARIANTS
from fastserve_backend.models.causal_lm import CausalLM
from opt_checkpoints import VARIANTS as OPT_VARIANTS
from opt_checkpoints import random_opt
from paged_executor import PagedExecutor, check, load, prompts
from rotary_checkpoints import VARIANTS as ROTARY_VARIANTS
from rotary_checkpoints import random_model
from transformers import PreTrainedModel

MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    f"opt_{name}": partial(random_opt, **changes) for name, changes in OPT_VARIANTS.items()
}
MODELS |= {
    name: partial(random_model, config)
    for name, config in (ROTARY_VARIANTS | DECODER_VARIANTS).items()
}


@pytest.fixture(scope="module", params=MODELS)
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[PreTrainedModel, CausalLM]:
    """The same random weights in transformers' model and in ours."""
    directory = tmp_path_factory.mktemp(request.param)
    theirs = MODELS[request.param]()
    theirs.save_pretrained(directory)
    return theirs, load(directory)


def test_whole_prompts_batched(pair: tuple[PreTrainedModel, CausalLM]) -> None:
    theirs, ours = pair
    executor = PagedExecutor(ours, theirs.config, prompts(1, 7, 48, 4, 5), seed=1)
    work = [(i, len(job.tokens)) for i, job in enumerate(executor.jobs)]
    executor.step(work, padding=3)
    check(theirs, executor)


@pytest.mark.repeated  # the next test decodes, too
def test_decode_one_by_one(pair: tuple[PreTrainedModel, CausalLM]) -> None:
    theirs, ours = pair
    executor = PagedExecutor(ours, theirs.config, prompts(20, 20), seed=2)
    executor.step([(0, 5)])
    executor.step([(1, 9)])
    for _ in range(11):
        executor.step([(0, 1), (1, 1)], padding=1)
    for _ in range(4):
        executor.step([(0, 1)])
    check(theirs, executor)


@pytest.mark.one_of("seed")
@pytest.mark.parametrize("seed", [3, 4])
def test_any_schedule(pair: tuple[PreTrainedModel, CausalLM], seed: int) -> None:
    """Chunks, decodes and whole prompts of several jobs mixed in any way give the same logits."""
    theirs, ours = pair
    chooser = random.Random(seed)
    executor = PagedExecutor(ours, theirs.config, prompts(48, 3, 17, 30, 11), seed=seed)
    while remaining := [i for i, job in enumerate(executor.jobs) if job.done < len(job.tokens)]:
        work = []
        for index in chooser.sample(remaining, chooser.randint(1, len(remaining))):
            left = len(executor.jobs[index].tokens) - executor.jobs[index].done
            work.append((index, chooser.choice([1, min(left, chooser.randint(1, 13)), left])))
        executor.step(work, padding=chooser.randint(0, 2))
    check(theirs, executor)
