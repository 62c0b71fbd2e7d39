// Rows that are rounded to 8 bits. 64 neighbours share a scale, or 32 where a group of the weight has no more
// columns.
#pragma once

#include <algorithm>
#include <cstring>
#include <limits>

#include "int8_tokens.h"
#include "panels.h"

namespace fastserve {

constexpr int64_t BLOCK = 16;  // neighbours of a column of a weight, or of a row
// Blocks of a rounded row that share a scale: many, or few where a group of the weight is small.
constexpr int MANY_BLOCKS = 4, FEW_BLOCKS = 2;

// Neighbours of a row.
template <int BLOCKS>
struct RoundedGroup {
    static constexpr int SIZE = BLOCKS * (int)BLOCK;
    int8_t codes[SIZE];  // zeros past the end of the row
    float scale;
    int32_t sum;   // of the codes
    float scaled;  // their sum, times the scale
};

// The largest of the bits of floats without a sign, as a float.
template <int DISTANCE = W / 2>
static inline float hmax_bits(vu x) {
    vi place;
    for (int i = 0; i < W; ++i) place[i] = i ^ DISTANCE;
    const vu other = __builtin_shuffle(x, place);
    x = x > other ? x : other;
    if constexpr (DISTANCE > 1) return hmax_bits<DISTANCE / 2>(x);
    return ((vf)x)[0];
}

template <int DISTANCE = W / 2>
static inline int32_t hsum(vi x) {
    vi place;
    for (int i = 0; i < W; ++i) place[i] = i ^ DISTANCE;
    x += __builtin_shuffle(x, place);
    if constexpr (DISTANCE > 1) return hsum<DISTANCE / 2>(x);
    return x[0];
}

// The first `count` elements of a group, or all. One that is infinite or NaN makes it NaN.
template <int BLOCKS>
static inline void round_group(const bf16* x, int64_t count, RoundedGroup<BLOCKS>* to) {
    constexpr int PAIRS = RoundedGroup<BLOCKS>::SIZE / PAIR;
    Pair pairs[PAIRS];
    vu largest = {};  // bits of magnitudes, whose order is that of the numbers; a NaN is above all
    for (int p = 0; p < PAIRS; ++p) {
        const int64_t n = std::min<int64_t>(PAIR, count - p * PAIR);
        pairs[p] = n > 0 ? load_pair_n(x + p * PAIR, (int)n) : Pair{};
        const vu a = (vu)magnitude(pairs[p].a), b = (vu)magnitude(pairs[p].b);
        const vu larger = a > b ? a : b;
        largest = largest > larger ? largest : larger;
    }
    const float most = hmax_bits(largest);
    // The reciprocal of a smaller number would be infinite. A NaN is no larger, and its codes are 0.
    constexpr float SMALLEST = 1e-30f;
    const bool is_finite = most <= std::numeric_limits<float>::max();
    const vf steps = splat(is_finite && most > SMALLEST ? MOST_CODE / most : 0.f);
    const vf magic = splat(12582912.f);  // 1.5 * 2^23: no fraction is left, and codes are the last bits
    to->scale = is_finite ? most / MOST_CODE : std::numeric_limits<float>::quiet_NaN();
    vi sums = {};
    for (int p = 0; p < PAIRS; ++p) {
        const Pair of = is_finite ? pairs[p] : Pair{};
        const vu even = (vu)(of.a * steps + magic), odd = (vu)(of.b * steps + magic);
        typedef uint16_t narrow __attribute__((vector_size(W * 2)));
        const narrow codes = __builtin_convertvector((even & 0xffu) | (odd & 0xffu) << 8, narrow);
        std::memcpy(to->codes + p * PAIR, &codes, sizeof codes);
        sums += (vi)(even + odd - 2 * (vu)magic);
    }
    to->sum = hsum(sums);
    to->scaled = to->scale * (float)to->sum;
}

}  // namespace fastserve
