"""Chooses each row's next token without a sort, in three launches.

`_find_largest` and `_sum_weights` share a row out among programs. `_choose` has one for each row.
It looks for the score of the last kept token by bisection: a pass compares the candidates with a
score, and the next one lists those on the side where the last kept token is. So passes get shorter.

Scores are compared as whole numbers in the same order (`_key`). Weights are whole numbers, too: the
exponential of a score, relative to the row's largest, in units of 2^-42. So sums are exact. They do
not depend on the order of addition, nor on what else is in the batch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastserve_kernels.gpu.launch_parameters import cdiv, next_power_of_2

RULE_WORDS = 5
_TILE = 4096  # tokens of a program
_LANES, _NUM_WARPS = 2048, 16  # see `_pass`: four lanes for each thread

_WORDS = tl.constexpr(RULE_WORDS)
# Units of a weight: 2^42 = the largest score's. Sums fit in 63 bits up to two million tokens.
_UNIT = tl.constexpr(4398046511104.0)
_NAN_KEY = tl.constexpr(0x7FFFFFFF)
_INF_KEY = tl.constexpr(0x7F800000)
_NEGATIVE_INF_KEY = tl.constexpr(-0x7F800000)
_LOWEST_KEY = tl.constexpr(-0x80000000)
_LOWEST_BEST = tl.constexpr(-0x7FFFFFFFFFFFFFFF)


def choose_tokens(
    scores: Tensor, rules: Tensor, *, filters: bool, no_token: int
) -> tuple[Tensor, Tensor]:
    """Choose a token for each row, greedily or at random.

    At random: a token is kept if it passes all filters, which count in this order.

    - A token's score is at least the row's largest plus ``depth``.
    - It is among the ``top_k`` with the largest scores. Of equal scores the first ones count as
      larger.
    - Those with larger scores have less than ``top_p`` of the weight of what is kept so far. The
      first always stays.

    The choice is the first token, in the order of their numbers, up to which the kept ones have
    more than ``uniform`` of their weight. A weight is exp2(scale · (score - largest)).

    Args:
        scores: [R, vocab] of any float type of 16 or 32 bits, rows contiguous.
        rules: int64 [R, RULE_WORDS], contiguous: for each row ``uniform`` and ``top_p`` in units of
            2^-64, unsigned; ``top_k``, 0 for all; the bits of the float32 numbers ``scale``, 0 for
            a greedy choice, and ``depth``, at most 0.
        filters: whether a row has a top_k, or a top_p other than 2^64 - 1.
        no_token: what the second result has for rows without a choice: a greedy row with a NaN, or
            a random one with a NaN, with an infinite score, or without any that is finite.

    Returns two int64 [R]: tokens, all in the vocabulary, and the same with ``no_token``.
    Grids: (R, tiles of the vocabulary) twice, and (R,).
    """
    rows, vocab = scores.shape
    token_ids, answers = scores.new_empty((2, rows), dtype=torch.int64)
    if not rows:
        return token_ids, answers
    tiles = cdiv(vocab, _TILE)
    largest, weights = scores.new_empty((2, rows, tiles), dtype=torch.int64)
    candidates = scores.new_empty((rows, tiles, _TILE) if filters else (1,), dtype=torch.int32)
    sizes = {"TILES": next_power_of_2(tiles), "TILE": _TILE}
    _find_largest[(rows, tiles)](scores, largest, scores.stride(0), vocab, TILE=_TILE, num_warps=8)
    _sum_weights[(rows, tiles)](
        scores, rules, largest, weights, scores.stride(0), vocab, **sizes, num_warps=8
    )
    _choose[(rows,)](
        scores, rules, largest, weights, candidates, token_ids, answers, scores.stride(0), vocab,
        no_token, **sizes, LANES=_LANES, num_warps=_NUM_WARPS,
    )  # fmt: skip
    return token_ids, answers


@triton.jit
def _find_largest(scores, largest, stride, vocab, TILE: tl.constexpr):
    """The key of each tile's largest score in the upper half of a word, and in the lower half the
    number of its first token, counted down."""
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    ids = tile * TILE + tl.arange(0, TILE)
    inside = ids < vocab
    score = tl.load(scores + row * stride + ids, inside, other=0.0).to(tl.float32)
    both = (_key(score).to(tl.int64) << 32) | (0x7FFFFFFF - ids).to(tl.int64)
    best = tl.max(tl.where(inside, both, _LOWEST_BEST), 0)
    tl.store(largest + row * tl.num_programs(1) + tile, best)


# Do not specialise on places that depend on the number of rows: serving must not wait for a
# compiler.
@triton.jit(do_not_specialize_on_alignment=["weights"])
def _sum_weights(
    scores, rules, largest, weights, stride, vocab, TILES: tl.constexpr, TILE: tl.constexpr
):
    """The weight of each tile's tokens within `depth`, of random rows without top_k."""
    row, tile, tiles = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    top_key, _best = _best_of_row(largest + row * tiles, tiles, TILES)
    rule = rules + row * _WORDS
    scale, depth, top_k = _float(rule + 3), _float(rule + 4), tl.load(rule + 2)
    if (scale != 0.0) & (top_k == 0) & _is_finite(top_key):
        top, least = _score(top_key), _key(_score(top_key) + depth)
        _keys, weight = _keys_and_weights(
            scores + row * stride, vocab, tile * TILE, least - 1, top, scale, TILE
        )
        tl.store(weights + row * tiles + tile, tl.sum(weight, 0))


@triton.jit(do_not_specialize_on_alignment=["weights", "answers"])
def _choose(
    scores, rules, largest, weights, candidates, token_ids, answers, stride, vocab, no_token,
    TILES: tl.constexpr, TILE: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    row, tiles = tl.program_id(0).to(tl.int64), (vocab + TILE - 1) // TILE
    top_key, token = _best_of_row(largest + row * tiles, tiles, TILES)
    rule = rules + row * _WORDS
    scale = _float(rule + 3)
    is_valid = top_key != _NAN_KEY
    if scale != 0.0:
        is_valid = _is_finite(top_key)
        if is_valid:
            of_row = scores + row * stride
            top = _score(top_key)
            # Kept are the tokens with larger keys than this, and the first `ties` with this key.
            key, ties = _key(top + _float(rule + 4)), vocab
            # The weight of all of them. With a top_k it is unknown, and not used.
            total = tl.sum(_weights_by_tile(weights + row * tiles, tiles, TILES), 0)
            by_count = (tl.load(rule + 2) > 0).to(tl.int32)
            filters = by_count + (tl.load(rule + 1) != -1).to(tl.int32)
            is_filtered = filters > 0
            while filters > 0:
                wanted = tl.maximum(_share(tl.load(rule + 1), total, True), 1)
                # Tokens of this weight or less have, all together, no more than top_p leaves.
                light = tl.where(by_count != 0, 0, total - wanted).to(tl.float32) / vocab
                lowest = tl.maximum(_key(top - _depth_below(light, scale)), key)
                key, ties, total = _find_last(
                    of_row, candidates + row * tiles * TILE, vocab, lowest, top_key, top, scale,
                    tl.load(rule + 2).to(tl.int32) * by_count, wanted, LANES,
                )  # fmt: skip
                by_count = 0
                filters -= 1
            rest = _share(tl.load(rule), total, False)
            begin = 0
            if is_filtered == 0:
                by_tile = _weights_by_tile(weights + row * tiles, tiles, TILES)
                is_passed = tl.cumsum(by_tile, 0) <= rest
                rest -= tl.sum(tl.where(is_passed, by_tile, 0), 0)
                begin = tl.sum(is_passed.to(tl.int32), 0) * TILE
            token = _token_at(of_row, vocab, begin, key, ties, top, scale, rest, TILE)
    tl.store(token_ids + row, token.to(tl.int64))
    tl.store(answers + row, tl.where(is_valid, token, no_token).to(tl.int64))


@triton.jit
def _find_last(
    scores, candidates, vocab, low, high, top, scale, wanted_count, wanted_weight,
    LANES: tl.constexpr,
):  # fmt: skip
    """Of the tokens with keys from `low` to `high`, the largest one, find the fewest with the
    largest scores that are as many as wanted. If that is 0: that have the wanted weight.

    Returns the key of the last one, how many with this key are among them, and their weight.
    """
    # Of the tokens with keys above `high`.
    count_above, weight_above = tl.zeros([], tl.int32), tl.zeros([], tl.int64)
    middle = _middle(low, high)
    lengths = (vocab - tl.arange(0, LANES) + LANES - 1) // LANES
    lengths, count, weight, next_up, next_down = _pass(
        scores, candidates, lengths, low, high, middle, top, scale, False, LANES
    )
    while low < high:
        is_enough = tl.where(
            wanted_count > 0,
            count_above + count >= wanted_count,
            weight_above + weight >= wanted_weight,
        )
        count_above += tl.where(is_enough, 0, count)
        weight_above += tl.where(is_enough, 0, weight)
        high = tl.where(is_enough, high, tl.maximum(next_down, low))
        low = tl.where(is_enough, next_up, low)
        middle = _middle(low, high)
        lengths, count, weight, next_up, next_down = _pass(
            candidates, candidates, lengths, low, high, middle, top, scale, True, LANES
        )
    # The last pass counted the tokens with the one key left.
    of_one = _weight(_score(low), top, scale)
    by_weight = (wanted_weight - weight_above + of_one - 1) // tl.maximum(of_one, 1)
    ties = tl.where(wanted_count > 0, (wanted_count - count_above).to(tl.int64), by_weight)
    ties = tl.minimum(ties, count.to(tl.int64))
    return low, ties.to(tl.int32), weight_above + ties * of_one


@triton.jit
def _pass(
    source, target, lengths, low, high, middle, top, scale, IS_LIST: tl.constexpr,
    LANES: tl.constexpr,
):  # fmt: skip
    """List the keys from `low` to `high` at `target`. `source` has scores, or is that list itself.

    Every LANES-th place belongs to one lane. Each lane makes a list of its own, so threads need not
    wait for each other, and none overwrites what it has yet to read.

    Args:
        lengths: int32 [LANES], how many scores or keys each lane has.

    Returns the new lengths; of the keys from `middle` on the count and the weight; the least key
    from `middle` on, and the largest below, `low` - 1 if there is none.
    """
    lanes = tl.arange(0, LANES)
    found = tl.zeros([LANES], tl.int32)
    count, weight = tl.zeros([LANES], tl.int32), tl.zeros([LANES], tl.int64)
    next_up = tl.full([LANES], _NAN_KEY, tl.int32)
    next_down = tl.full([LANES], _LOWEST_KEY, tl.int32)
    longest = tl.max(lengths, 0)
    ahead = tl.load(source + tl.max_contiguous(lanes, [1]), lengths > 0, other=0)
    for slot in range(longest):
        values, inside = ahead, slot < lengths
        next_places = tl.max_contiguous((slot + 1) * LANES + lanes, [1])
        ahead = tl.load(source + next_places, slot + 1 < lengths, other=0)
        key = values if IS_LIST else _key(values.to(tl.float32))
        inside &= (key >= low) & (key <= high)
        tl.store(target + found * LANES + lanes, key, inside)
        found += inside.to(tl.int32)
        key = tl.where(inside, key, low - 1)
        is_above = key >= middle
        count += is_above.to(tl.int32)
        weight += tl.where(is_above, _weight(_score(key), top, scale), 0)
        next_up = tl.minimum(next_up, tl.where(is_above, key, _NAN_KEY))
        next_down = tl.maximum(next_down, tl.where(is_above, _LOWEST_KEY, key))
    tl.debug_barrier()  # the next pass may read a lane by other threads
    return (
        found, tl.sum(count, 0), tl.sum(weight, 0), tl.min(next_up, 0), tl.max(next_down, 0)
    )  # fmt: skip


@triton.jit
def _token_at(scores, vocab, begin, key, ties, top, scale, rest, TILE: tl.constexpr):
    """The first kept token, from `begin` on, up to which the kept ones have more than this
    weight."""
    of_tie = _weight(_score(key), top, scale)
    weight, ties_here = rest * 0, 0
    begin -= TILE
    while (weight <= rest) & (begin + TILE < vocab):
        rest -= weight
        ties -= ties_here
        begin += TILE
        of_token, above = _keys_and_weights(scores, vocab, begin, key, top, scale, TILE)
        ties_here = tl.minimum(tl.sum((of_token == key).to(tl.int32), 0), ties)
        weight = tl.sum(above, 0) + ties_here * of_tie
    of_token, above = _keys_and_weights(scores, vocab, begin, key, top, scale, TILE)
    is_tie = of_token == key
    is_kept_tie = is_tie & (tl.cumsum(is_tie.to(tl.int32), 0) <= ties)
    up_to = tl.cumsum(above + tl.where(is_kept_tie, of_tie, 0), 0)
    return tl.minimum(begin + tl.sum((up_to <= rest).to(tl.int32), 0), vocab - 1)


@triton.jit
def _keys_and_weights(scores, vocab, begin, key, top, scale, TILE: tl.constexpr):
    """Of a tile's tokens: their keys, and their weights if their keys are larger than this one."""
    places = begin + tl.arange(0, TILE)
    score = tl.load(scores + places, places < vocab, other=-float("inf")).to(tl.float32)
    of_token = _key(score)
    return of_token, tl.where(of_token > key, _weight(score, top, scale), 0)


@triton.jit
def _best_of_row(largest, tiles, TILES: tl.constexpr):
    """Key and number of a row's first token with the largest score."""
    index = tl.arange(0, TILES)
    best = tl.max(tl.load(largest + index, index < tiles, other=_LOWEST_BEST), 0)
    return (best >> 32).to(tl.int32), 0x7FFFFFFF - (best & 0x7FFFFFFF).to(tl.int32)


@triton.jit
def _weights_by_tile(weights, tiles, TILES: tl.constexpr):
    index = tl.arange(0, TILES)
    return tl.load(weights + index, index < tiles, other=0)


@triton.jit
def _float(word):
    """The float32 number whose bits an int64 at this place holds."""
    return tl.load(word).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def _key(score):
    """int32, in the order of the scores. NaN is the largest, and -0 equals 0."""
    bits = score.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    key = tl.where(bits < 0, -size, size)
    return tl.where(size > _INF_KEY, _NAN_KEY, key)


@triton.jit
def _is_finite(key):
    return (key > _NEGATIVE_INF_KEY) & (key < _INF_KEY)


@triton.jit
def _score(key):
    return tl.where(key < 0, -key | -0x80000000, key).to(tl.float32, bitcast=True)


@triton.jit
def _weight(score, top, scale):
    return (tl.exp2((score - top) * scale) * _UNIT).to(tl.int64)


@triton.jit
def _middle(low, high):
    """A key above `low` and up to `high`, if these differ: that of the mean score, if possible."""
    of_mean = _key((_score(low) + _score(high)) * 0.5)
    between = ((low.to(tl.int64) + high.to(tl.int64) + 1) >> 1).to(tl.int32)
    return tl.where((of_mean > low) & (of_mean <= high), of_mean, between)


@triton.jit
def _depth_below(weight, scale):
    """How far below the largest score every weight is less than this, or rounds to 0."""
    exponent = (tl.maximum(weight, 1.0).to(tl.int32, bitcast=True) >> 23) - 127
    return (43 - exponent).to(tl.float32) / scale  # one octave more than 42, for rounding


@triton.jit
def _share(fraction, total, rounds_up: tl.constexpr):
    """The fraction of a total: int64 that counts units of 2^-64, unsigned."""
    wide = fraction.to(tl.uint64, bitcast=True)
    share = tl.umulhi(wide, total.to(tl.uint64, bitcast=True)).to(tl.int64, bitcast=True)
    if rounds_up:
        share += (fraction * total != 0).to(tl.int64)
    return share
