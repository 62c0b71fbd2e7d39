"""The sizes to which steps on a GPU are padded. There is a CUDA graph for each."""

from __future__ import annotations

from dataclasses import dataclass

_SIZES_AN_OCTAVE = 4

# Which steps with prompts need graphs. Launching a layer kernel by kernel takes the host some 93 µs
# of Python (measured with launches that do nothing). An H100 read 3.06 TB/s and made 361 T
# multiply-adds a second. The host keeps ahead with ease if it takes at most 70% of the GPU's time.
_LAYER_S = 93e-6 / 0.7
_READ_BYTES_A_SECOND = 3.06e12
_MULTIPLY_ADDS_A_SECOND = 361e12
_MOST_TOKENS = 2048
"""Small models need more, by the numbers above. But then attention and norms, which they leave out,
keep the GPU busy; and graphs take memory."""
_MULTIPLE = 64
"""Of tokens. Fewer would take the GPU as long, because it reads the weights."""
_FEW_PROMPTS, _TOKENS_A_PROMPT = 8, 32
"""A step has room for a few prompts, and for more if they have on average so many tokens. Room for
every step would be room for prompts of one token: most programs of attention would have no work."""


@dataclass(frozen=True)
class GraphSize:
    """What a step has room for that is padded to this size.

    num_jobs: prompts and decodes. Only the first so many rows may decode.
    num_prompts: whole ones and chunks; 0 is a step of decodes alone.
    """

    num_tokens: int
    num_jobs: int
    num_prompts: int = 0


def decode_sizes(max_jobs: int) -> list[GraphSize]:
    """Sizes for steps of decodes alone, ascending. At most a fourth is padding."""
    return [GraphSize(size, size) for size in batch_sizes(max_jobs)]


def mixed_sizes(max_tokens: int, max_jobs: int) -> list[GraphSize]:
    """Sizes for steps with prompts, ascending, up to ``max_tokens``. 0: there are none.

    All ranks must choose the same size for a step, because they add up its rows. So sizes do not
    depend on the GPU.
    """
    if max_tokens == 0:
        return []
    sizes = []
    for multiple in batch_sizes(-(-max_tokens // _MULTIPLE)):
        tokens = min(multiple * _MULTIPLE, max_tokens)
        jobs = min(tokens, max_jobs)
        prompts = min(jobs, _FEW_PROMPTS + tokens // _TOKENS_A_PROMPT)
        sizes.append(GraphSize(tokens, jobs, prompts))
    return sizes


def most_host_bound_tokens(layer_parameters: int, element_bytes: float) -> int:
    """The most tokens of a step with prompts for which the host would take longer to launch a layer
    than a GPU to compute it, or nearly so. Larger steps gain nothing from a graph, and padding
    would cost them time.

    Args:
        layer_parameters: elements of a layer's weights on this rank that a token uses.
        element_bytes: bytes of each.
    """
    if layer_parameters * element_bytes / _READ_BYTES_A_SECOND >= _LAYER_S:
        return 0
    tokens = int(_LAYER_S * _MULTIPLY_ADDS_A_SECOND / layer_parameters)
    return min(_MOST_TOKENS, tokens // _MULTIPLE * _MULTIPLE)


def batch_sizes(most: int) -> list[int]:
    """Every number up to 8, then four an octave, up to ``most``."""
    sizes = set(range(1, 2 * _SIZES_AN_OCTAVE))
    step = 2
    while 4 * step < most:
        sizes |= {step * n for n in range(_SIZES_AN_OCTAVE, 2 * _SIZES_AN_OCTAVE)}
        step *= 2
    return sorted({size for size in sizes if size < most} | {most})
