"""Fitting and keeping iteration times."""

from __future__ import annotations

from pathlib import Path

import pytest
from fastserve_backend.profile.latency import DecodeSample, LatencyProfile, PrefillSample, fit


def true_profile() -> LatencyProfile:
    return LatencyProfile("key", 0.004, 5e-5, 3e-9, 0.005, 2e-4, 1e-7)


def test_a_fit_recovers_the_times_it_was_made_from() -> None:
    truth = true_profile()
    prefills = [PrefillSample(n, truth.prefill_s(n)) for n in (8, 32, 128, 512, 2000)]
    decodes = [
        DecodeSample(b, b * c, 0.005 + 2e-4 * b + 1e-7 * b * c)
        for b in (1, 4, 16)
        for c in (16, 500)
    ]
    fitted = fit("key", prefills, decodes)
    for n in (10, 100, 1000):
        assert fitted.prefill_s(n) == pytest.approx(truth.prefill_s(n), rel=1e-6)
        assert fitted.decode_s(n) == pytest.approx(truth.decode_s(n), rel=1e-6)


def test_noise_never_gives_a_negative_or_falling_prediction() -> None:
    prefills = [PrefillSample(8, 0.02), PrefillSample(64, 0.01), PrefillSample(512, 0.015)]
    decodes = [DecodeSample(1, 16, 0.02), DecodeSample(4, 64, 0.01), DecodeSample(16, 256, 0.005)]
    fitted = fit("key", prefills, decodes)
    times = [fitted.prefill_s(n) for n in (1, 10, 100, 1000, 10000)]
    assert times == sorted(times)
    assert times[0] > 0
    assert fitted.decode_s(1) > 0


def test_too_few_samples_are_refused() -> None:
    with pytest.raises(ValueError, match="3 samples"):
        fit("key", [PrefillSample(1, 1.0)], [])


def test_a_profile_survives_the_disk_and_only_for_its_key(tmp_path: Path) -> None:
    path = tmp_path / "sub" / "profile.json"
    true_profile().save(path)
    assert LatencyProfile.load(path, "key") == true_profile()
    assert LatencyProfile.load(path, "another machine") is None


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"format": 1, "key": "key"}', "\x00"])
def test_a_damaged_profile_is_ignored(tmp_path: Path, content: str) -> None:
    path = tmp_path / "profile.json"
    path.write_text(content)
    assert LatencyProfile.load(path, "key") is None
    assert LatencyProfile.load(tmp_path / "missing.json", "key") is None
