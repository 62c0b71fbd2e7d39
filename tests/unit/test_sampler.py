"""The sampler's distributions, filters and penalties, and its independence from the batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from case_shapes import but_dtype
from choice_cases import cases
from emulated_gpu import DEVICE, emulated_gpu
from fastserve_backend.rank_protocol.messages import NO_TOKEN, Penalties, Sampling
from fastserve_backend.worker.sampler import ChosenTokens, _penalise
from fastserve_backend.worker.sampler import sample as begin_to_sample
from fastserve_backend.worker.staging import Uploads
from kernel_cases import Case
from transformers import MinPLogitsWarper

EOS = (2,)


def sampling(rows: int, penalties: list[Penalties] | None = None, **values: Any) -> Sampling:
    def column(name: str, default: Any, dtype: str) -> bytes:
        return np.broadcast_to(np.array(values.get(name, default), dtype), rows).tobytes()

    return Sampling(
        temperature=column("temperature", 1.0, "f4"),
        top_k=column("top_k", 0, "i4"),
        top_p=column("top_p", 1.0, "f4"),
        uniform=column("uniform", 0.5, "f8"),
        no_eos=column("no_eos", False, "?"),
        num_logprobs=column("num_logprobs", -1, "i4"),
        penalties=penalties or [],
        min_p=column("min_p", 0.0, "f4") if "min_p" in values else b"",
    )


def sample(
    logits: torch.Tensor, how: Sampling | None, input_ids: torch.Tensor | None = None
) -> ChosenTokens:
    return begin_to_sample(logits, how, EOS, input_ids).on_host()


def choose(
    logits: torch.Tensor, how: Sampling | None, input_ids: torch.Tensor | None = None
) -> list[int]:
    return sample(logits, how, input_ids).token_ids.tolist()


LOGITS = torch.log(torch.tensor([[0.1, 0.2, 0.3, 0.4]]))
UNIFORM = (np.arange(1000) + 0.5) / 1000


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [0.1, 0.2, 0.3, 0.4]),
        ({"top_k": 2}, [0, 0, 3 / 7, 4 / 7]),
        ({"top_p": 0.35}, [0, 0, 0, 1]),
        ({"top_p": 0.41}, [0, 0, 3 / 7, 4 / 7]),
        ({"top_p": 0.8}, [0, 2 / 9, 3 / 9, 4 / 9]),
        ({"top_k": 3, "top_p": 0.5}, [0, 0, 3 / 7, 4 / 7]),
        ({"temperature": 0.5}, [1 / 30, 4 / 30, 9 / 30, 16 / 30]),
        ({"temperature": 0.0}, [0, 0, 0, 1]),
        ({"no_eos": True}, [1 / 7, 2 / 7, 0, 4 / 7]),
        ({"top_k": 100, "top_p": 0.999999}, [0.1, 0.2, 0.3, 0.4]),
        ({"min_p": 0.0}, [0.1, 0.2, 0.3, 0.4]),
        ({"min_p": 0.3}, [0, 2 / 9, 3 / 9, 4 / 9]),
        ({"min_p": 0.3, "temperature": 0.5}, [0, 0, 9 / 25, 16 / 25]),
        ({"min_p": 1.0}, [0, 0, 0, 1]),
        ({"min_p": 1.0, "temperature": 0.0}, [0, 0, 0, 1]),
        ({"min_p": 0.3, "top_k": 2}, [0, 0, 3 / 7, 4 / 7]),
        # top_p is the share of what min_p leaves.
        ({"min_p": 0.6, "top_p": 0.5}, [0, 0, 0, 1]),
        ({"min_p": 0.6, "top_p": 0.6}, [0, 0, 3 / 7, 4 / 7]),
        ({"min_p": 0.3, "top_p": 0.75}, [0, 0, 3 / 7, 4 / 7]),
        ({"min_p": 0.3, "no_eos": True}, [0, 2 / 6, 0, 4 / 6]),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_frequencies_are_the_distributions(
    options: dict[str, Any], expected: list[float], dtype: torch.dtype
) -> None:
    logits = LOGITS.to(dtype).expand(1000, -1).contiguous()
    tokens = choose(logits, sampling(1000, uniform=UNIFORM, **options))
    frequency = np.bincount(tokens, minlength=4) / 1000
    assert frequency == pytest.approx(expected, abs=0.006)


@pytest.mark.parametrize("min_p", [0.01, 0.1, 0.5])
@pytest.mark.parametrize("temperature", [0.7, 1.5])
def test_min_p_leaves_what_transformers_leaves(min_p: float, temperature: float) -> None:
    logits = 2 * torch.randn(1, 200, generator=torch.Generator().manual_seed(5))
    warped = MinPLogitsWarper(min_p)(torch.empty(0), logits / temperature)
    expected = torch.softmax(warped, -1)[0].numpy()
    how = sampling(4000, uniform=(np.arange(4000) + 0.5) / 4000, min_p=min_p,
                   temperature=temperature)  # fmt: skip
    frequency = np.bincount(choose(logits.expand(4000, -1), how), minlength=200) / 4000
    assert frequency == pytest.approx(expected, abs=3e-4)
    assert np.count_nonzero(expected) < 200


def test_none_means_greedy_for_all() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0], [5.0, 3.0, 1.0]])
    assert choose(logits, None) == [1, 0]


def test_a_row_is_chosen_as_if_it_were_alone() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(12, 500, generator=generator)
    options = {
        "temperature": [0, 0.7, 1, 1.3] * 3,
        "top_k": [0, 0, 40, 3] * 3,
        "top_p": [1, 0.9, 0.5, 1] * 3,
        "min_p": [0.2] * 3 + [0.0] * 4 + [0.05] * 5,
        "uniform": np.linspace(0.01, 0.99, 12),
    }
    together = choose(logits, sampling(12, **options))
    for row in range(12):
        alone = sampling(1, **{name: values[row] for name, values in options.items()})
        assert choose(logits[row : row + 1], alone) == [together[row]]


@pytest.mark.parametrize("other", [{"top_k": 300}, {"top_p": 0.9}, {"top_p": 0.9, "top_k": 60}])
def test_which_of_equal_tokens_are_the_first_depends_on_no_other_row(other: dict[str, Any]) -> None:
    """In bfloat16 most logits equal some other one."""
    logits = torch.randn(40, 5000, generator=torch.Generator().manual_seed(1)).bfloat16()
    uniform = np.linspace(0.01, 0.99, 40)
    alone = choose(logits, sampling(40, uniform=uniform, top_k=50))
    values = {"top_k": 0, "top_p": 1.0} | other
    beside = sampling(
        41,
        uniform=[*uniform, 0.5],
        top_k=[50] * 40 + [values["top_k"]],
        top_p=[1.0] * 40 + [values["top_p"]],
    )
    assert choose(torch.cat([logits, logits[:1]]), beside)[:40] == alone


@pytest.mark.parametrize("top_p", [1e-30, 1e-40, 1e-46])
def test_a_top_p_too_small_for_its_type_leaves_the_likeliest(top_p: float) -> None:
    assert choose(LOGITS, sampling(1, top_p=top_p, uniform=0.99)) == [3]


@pytest.mark.parametrize(
    "how",
    [
        None,
        sampling(2, temperature=0.0, no_eos=True),
        sampling(2),
        sampling(2, top_k=[2, 0], top_p=0.9),
        sampling(2, num_logprobs=1),
        sampling(2, min_p=0.5),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_of_nan_has_no_token(how: Sampling | None, dtype: torch.dtype) -> None:
    logits = torch.cat([torch.full((1, 4), float("nan")), LOGITS]).to(dtype)
    tokens = begin_to_sample(logits, how, EOS)
    missing, chosen = tokens.on_host().token_ids.tolist()
    assert missing == NO_TOKEN
    assert 0 <= chosen < 4
    # The next step's token must be in the vocabulary.
    assert tokens.token_ids.min() >= 0


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("values", [{}, {"top_k": 2}, {"top_p": 0.9}, {"min_p": 0.5}], ids=str)
def test_one_bad_logit_spoils_all_probabilities(bad: float, values: dict[str, Any]) -> None:
    logits = torch.cat([LOGITS, LOGITS])
    logits[0, 1] = bad
    missing, chosen = choose(logits, sampling(2, **values))
    assert missing == NO_TOKEN
    assert 0 <= chosen < 4


@pytest.mark.one_of("case", key=but_dtype)
@pytest.mark.parametrize("case", list(cases()), ids=str)
def test_the_choice_is_that_of_the_reference(case: Case) -> None:
    for comparison in case.run(torch.device("cpu")):
        assert comparison.error <= comparison.limit, comparison.what


def test_extreme_uniform_numbers_stay_in_the_vocabulary() -> None:
    logits = torch.zeros(2, 7)
    for value in (0.0, 1 - 2**-53):
        tokens = choose(logits, sampling(2, uniform=value, top_k=[0, 3]))
        assert all(0 <= token < 7 for token in tokens)
    certain = torch.full((1, 7), -torch.inf)
    certain[0, 4] = 0.0
    assert choose(certain, sampling(1, uniform=0.0)) == [4]


def ids(*values: int) -> bytes:
    return np.array(values, dtype=np.int32).tobytes()


@pytest.mark.parametrize(
    ("penalties", "expected"),
    [
        (Penalties(0, 1.0, 0.5, 0.25, ids(0, 3), ids(1, 1), False), [1.0, 1.0, -1.0, 3.0]),
        (Penalties(0, 2.0, 0.0, 0.0, ids(0, 2), ids(1), False), [0.5, 1.0, -2.0, 3.0]),
        (Penalties(0, 1.0, 0.0, 1.0, ids(), ids(), False), [1.0, 2.0, -1.0, 3.0]),
    ],
)
def test_penalties(penalties: Penalties, expected: list[float]) -> None:
    """The repetition penalty counts prompt and output, presence and frequency penalties the output
    alone."""
    logits = torch.tensor([[1.0, 2.0, -1.0, 3.0]])
    wanted = torch.log_softmax(torch.tensor(expected), 0)
    for uniform in (0.02, 0.2, 0.4, 0.6, 0.8):
        with_penalty = choose(logits, sampling(1, [penalties], uniform=uniform))
        assert with_penalty == choose(wanted[None], sampling(1, uniform=uniform))
    assert logits.tolist() == [[1.0, 2.0, -1.0, 3.0]]


@pytest.mark.parametrize("newest", [1, 3, 5, 8])
def test_a_token_that_only_the_ranks_know_counts_as_one_of_the_output(newest: int) -> None:
    """Scores are equal to the last bit, whether the token is already in the output, in the prompt,
    in both, or new."""
    logits = torch.randn(3, 9, generator=torch.Generator().manual_seed(4))
    prompt, output = ids(3, 5, 5), ids(1, 5, 1)
    known = Penalties(1, 1.7, 0.3, 0.7, prompt, output + ids(newest), False)
    pending = Penalties(1, 1.7, 0.3, 0.7, prompt, output, True)
    scores = [logits.clone(), logits.clone()]
    _penalise(scores[0], [known], None, Uploads(torch.device("cpu")))
    newest_ids = torch.tensor([2, newest, 4, 6])
    _penalise(scores[1], [pending], newest_ids, Uploads(torch.device("cpu")))
    assert torch.equal(*scores)
    assert torch.equal(scores[0][::2], logits[::2])
    assert scores[0][1, newest] != logits[1, newest]


def test_logprobs_are_of_the_unmodified_distribution() -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(1))
    how = sampling(
        3, [Penalties(1, 3.0, 1.0, 1.0, ids(1), ids(2), False)],
        temperature=[0, 2.0, 1.0], num_logprobs=[0, 5, -1],
    )  # fmt: skip
    result = sample(logits, how)
    reference = torch.log_softmax(logits, -1)
    own = np.frombuffer(result.logprobs, np.float32)
    for row in (0, 1):
        token = int(result.token_ids[row])
        assert own[row] == pytest.approx(float(reference[row, token]), abs=1e-5)
    (top,) = result.top_logprobs
    assert top.row == 1
    assert np.frombuffer(top.token_ids, np.int32).tolist() == reference[1].topk(5).indices.tolist()


INPUT_IDS = torch.arange(100, 112)


def everything_at_once() -> Sampling:
    """Twelve rows with different sampling parameters."""
    penalties = [
        Penalties(1, 1.7, 0.5, 0.25, ids(0, 3, 3), ids(1, 1), False),
        Penalties(4, 1.0, 1.0, 0.0, ids(), ids(7), True),
        Penalties(7, 0.6, 0.0, -0.5, ids(9), ids(), False),
        Penalties(11, 2.0, 0.3, 0.1, ids(499), ids(0, 499), False),
    ]
    return sampling(
        12, penalties,
        temperature=[0, 0.7, 1, 1.3] * 3, top_k=[0, 0, 40, 3] * 3, top_p=[1, 0.9, 0.5, 1] * 3,
        uniform=np.linspace(0.01, 0.99, 12), no_eos=[True, False, False] * 4,
        num_logprobs=[-1, 0, 3, 5, 3, -1] * 2, min_p=[0.0] * 5 + [0.1, 0.02] * 3 + [0.3],
    )  # fmt: skip


def one_row(how: Sampling, row: int) -> Sampling:
    columns = {
        name: np.frombuffer(getattr(how, name), dtype)[row]
        for name, dtype in [
            ("temperature", "f4"), ("top_k", "i4"), ("top_p", "f4"), ("uniform", "f8"),
            ("no_eos", "?"), ("num_logprobs", "i4"), ("min_p", "f4"),
        ]
    }  # fmt: skip
    of_row = [penalties for penalties in how.penalties if penalties.row == row]
    for penalties in of_row:
        penalties.row = 0
    return sampling(1, of_row, **columns)


def test_rows_that_want_different_things_do_not_mix() -> None:
    logits = torch.randn(12, 500, generator=torch.Generator().manual_seed(2)) * 3
    together = sample(logits, everything_at_once(), INPUT_IDS)
    own = np.frombuffer(together.logprobs, np.float32)
    top = {entry.row: entry for entry in together.top_logprobs}
    assert [entry.row for entry in together.top_logprobs] == [2, 3, 4, 8, 9, 10]
    for row in range(12):
        how, own_input = one_row(everything_at_once(), row), INPUT_IDS[row : row + 1]
        alone = sample(logits[row : row + 1], how, own_input)
        assert together.token_ids[row] == alone.token_ids[0]
        wants_logprobs = row % 6 not in (0, 5)
        assert bool(alone.logprobs) == wants_logprobs
        if wants_logprobs:
            assert own[row] == np.frombuffer(alone.logprobs, np.float32)[0]
        for entry in alone.top_logprobs:
            assert top[row].token_ids == entry.token_ids
            assert top[row].logprobs == entry.logprobs


@pytest.mark.slow
def test_the_host_waits_for_no_gpu_before_the_tokens() -> None:
    logits = torch.randn(12, 500, generator=torch.Generator().manual_seed(3))
    with emulated_gpu() as gpu:
        on_device, input_ids = logits.to(DEVICE), INPUT_IDS.to(DEVICE)
        gpu.waits.clear()
        every = begin_to_sample(on_device, everything_at_once(), EOS, input_ids)
        top = begin_to_sample(on_device[:1], sampling(1, top_k=5), EOS)
        assert gpu.waits == []
        chosen = choose(logits, everything_at_once(), INPUT_IDS)
        assert every.on_host().token_ids.tolist() == chosen
        assert top.on_host().token_ids.tolist() == choose(logits[:1], sampling(1, top_k=5))
