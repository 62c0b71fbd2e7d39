"""Rows with masks, and logits with biases."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch
from emulated_gpu import DEVICE, emulated_gpu
from fastserve_backend.rank_protocol.messages import LogitBias, Penalties, Sampling
from fastserve_backend.worker.sampler import sample as begin_to_sample
from test_sampler import EOS, LOGITS, UNIFORM, choose, sample, sampling


def mask(*rows: tuple[int, list[int]], vocab: int) -> dict[str, bytes]:
    """Rows and the tokens that each may choose."""
    bits = np.zeros((len(rows), -(-vocab // 32) * 32), dtype=np.bool_)
    for place, (_, allowed) in enumerate(rows):
        bits[place, allowed] = True
    return {
        "masked_rows": np.array([row for row, _ in rows], "i4").tobytes(),
        "masks": np.packbits(bits, axis=1, bitorder="little").tobytes(),
    }


def bias(row: int, **values: float) -> LogitBias:
    ids = [int(name.removeprefix("t")) for name in values]
    amounts = np.array(list(values.values()), "f4")
    return LogitBias(row=row, token_ids=np.array(ids, "i4").tobytes(), values=amounts.tobytes())


class TestMasks:
    def test_only_what_a_row_may_choose_is_chosen_however_unlikely(self) -> None:
        logits = torch.randn(4, 100, generator=torch.Generator().manual_seed(1))
        for how in ({}, {"temperature": 0.0}, {"top_k": 3}, {"top_p": 0.1}):
            masks = mask((1, [99]), (3, [0, 33, 64]), vocab=100)
            masked = msgspec.structs.replace(sampling(4, **how), **masks)
            chosen, free = choose(logits, masked), choose(logits, sampling(4, **how))
            assert chosen[1] == 99
            assert chosen[3] in (0, 33, 64)
            assert (chosen[0], chosen[2]) == (free[0], free[2])

    def test_it_comes_before_penalties_and_logprobs_are_of_the_unmodified_logits(self) -> None:
        masks = mask((0, [0, 1]), vocab=4)
        tokens = np.array([3], "i4").tobytes()
        liked = Penalties(0, 1.0, 0.0, -2.0, b"", tokens, False)
        how = msgspec.structs.replace(
            sampling(1, [liked], temperature=0.0, num_logprobs=2), **masks
        )
        found = sample(LOGITS, how)
        assert found.token_ids.tolist() == [1]
        assert np.frombuffer(found.logprobs, "f4") == pytest.approx([np.log(0.2)])
        assert np.frombuffer(found.top_logprobs[0].token_ids, "i4").tolist() == [3, 2]

    @pytest.mark.parametrize("vocab", [32, 50, 97])
    def test_a_gpu_does_the_same_without_a_wait(self, vocab: int) -> None:
        logits = torch.randn(3, vocab, generator=torch.Generator().manual_seed(2))
        masks = mask((0, [vocab - 1]), (2, [0, 5, 31]), vocab=vocab)
        how = msgspec.structs.replace(
            sampling(3, temperature=[0.0, 1.0, 1.0]), biases=[bias(1, t7=100.0)], **masks
        )
        expected = choose(logits, how)
        assert expected[:2] == [vocab - 1, 7]
        with emulated_gpu() as gpu:
            on_device = logits.to(DEVICE)
            gpu.waits.clear()
            found = begin_to_sample(on_device, how, EOS)
            assert gpu.waits == []
            assert found.on_host().token_ids.tolist() == expected


def test_biases_are_added_to_the_logits_of_their_row() -> None:
    logits = LOGITS.repeat(3, 1)
    how = sampling(3, temperature=0.0)
    how.biases = [bias(1, t0=100.0), bias(2, t3=-100.0, t1=0.5)]
    assert choose(logits, how) == [3, 0, 1]
    how = sampling(3, temperature=1.0, uniform=0.999)
    how.biases = [bias(1, t2=np.log(2), t3=-np.log(2))]
    assert choose(logits, how)[0] == 3
    shares = [choose(logits, _at(how, point))[1] for point in UNIFORM]
    assert np.bincount(shares, minlength=4) / 1000 == pytest.approx(
        np.array([0.1, 0.2, 0.6, 0.2]) / 1.1, abs=2e-3
    )


def _at(how: Sampling, uniform: float) -> Sampling:
    return msgspec.structs.replace(how, uniform=np.full(3, uniform).tobytes())
