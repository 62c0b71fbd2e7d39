"""Job lengths like those of public data sets and traces, without their files.

Each kind of length is log-normal and truncated. Its two parameters are fitted to two numbers. One
is the mean that the vLLM paper reports (Kwon et al. 2023, §6.1; FastServe §6.1 follows it). The
other is the spread (standard deviation of the logarithm) of public lengths:

=========  ======  ==============  ======  ====================================================
data set   kind    published mean  spread  spread counted in
=========  ======  ==============  ======  ====================================================
sharegpt   prompt          161.31   1.400  the 11,129 ShareGPT turns within the authors' limits
sharegpt   output          337.99   1.095  among those that Sarathi-Serve publishes
alpaca     prompt           19.31   0.496  the 5,095 records of alpaca-libre, one token per
alpaca     output           58.45   1.220  4 bytes
=========  ======  ==============  ======  ====================================================

Both numbers hold *after* truncation and rounding: mu and sigma were found by nested bisection.

Prompts and outputs of these two end at 1024 tokens. So every pair meets the authors' limits (prompt
at most 1024, together at most 2048), and lengths can be paired at random. (In the ShareGPT turns
their logarithms correlate by only -0.03.)

Today's prompts are longer. Three more data sets are fitted to the mean and the median:

============  ======  =====  ======  ==========================================================
data set      kind     mean  median  like
============  ======  =====  ======  ==========================================================
chat          prompt   1155    1020  the conversations of Azure's LLM inference trace of 2023
chat          output    211     129  (Patel et al., Splitwise, ISCA 2024)
code          prompt   2048    1500  code completion in the same trace
code          output     28      13
long-context  prompt  12000   10576  documents, as in Mooncake's trace (Qin et al., FAST 2025)
long-context  output    343     251
============  ======  =====  ======  ==========================================================
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

# So many that the longest 1% are still a hundred different jobs.
_NUM_JOBS = 10_000
# Seed of the pairing of prompts and outputs. Fixed, so that a name means the same jobs everywhere.
_PAIRING_SEED = 0


@dataclass(frozen=True, slots=True)
class _LogNormal:
    mu: float
    sigma: float
    max_tokens: int = 1024

    def quantiles(self, count: int) -> NDArray[np.int64]:
        """``count`` lengths, ascending, at evenly spaced probabilities: no sampling error."""
        normal = NormalDist(self.mu, self.sigma)
        below_limit = normal.cdf(math.log(self.max_tokens))
        logs = [normal.inv_cdf((i + 0.5) / count * below_limit) for i in range(count)]
        lengths: NDArray[np.int64] = np.maximum(1, np.rint(np.exp(logs))).astype(np.int64)
        return lengths


_PROMPTS_AND_OUTPUTS: Mapping[str, tuple[_LogNormal, _LogNormal]] = {
    "sharegpt": (_LogNormal(4.4952, 1.5850), _LogNormal(6.2792, 1.6138)),
    "alpaca": (_LogNormal(2.8377, 0.4958), _LogNormal(3.3569, 1.2310)),
    "chat": (_LogNormal(6.9277, 0.50, 6144), _LogNormal(4.9857, 1.34)),
    "code": (_LogNormal(7.4596, 1.14, 7424), _LogNormal(2.5844, 1.26, 512)),
    "long-context": (_LogNormal(9.3339, 0.70, 30720), _LogNormal(5.556, 0.92, 1536)),
}

SYNTHETIC_DATASETS = tuple(_PROMPTS_AND_OUTPUTS)


@lru_cache
def synthetic_lengths(name: str) -> tuple[tuple[int, int], ...]:
    """(prompt tokens, output tokens) of the 10,000 jobs of one of ``SYNTHETIC_DATASETS``."""
    prompts, outputs = (kind.quantiles(_NUM_JOBS) for kind in _PROMPTS_AND_OUTPUTS[name])
    rng = np.random.default_rng(_PAIRING_SEED)
    # Shuffle both, so that any part of the set is like the whole.
    pairs = zip(rng.permutation(prompts).tolist(), rng.permutation(outputs).tolist(), strict=True)
    return tuple(pairs)
