// One query's attention over its context, a chunk of positions after the other.
#pragma once

#include <algorithm>
#include <cmath>
#include <type_traits>

#include "attention_rule.h"
#include "vec.h"

namespace fastserve {

using FromStart = std::integral_constant<int, 0>;

// With up to CHUNK positions that share one softmax update.
template <int CHUNK>
struct Query {
    float* acc;  // [pairs * PAIR], unnormalised output in Pair order
    float max;
    float rescale;  // of acc and sums, by the current chunk
    vf sums;        // of weights
    // Scores in the log2 domain, then softmax weights, of the current chunk.
    alignas(64) float weights[CHUNK];

    // sink: a score without a value, in the log2 domain; -INFINITY: there is none.
    void begin(float* memory, int pairs, float sink) {
        acc = memory;
        max = sink;
        sums = vf{};
        if (sink != -INFINITY) sums[0] = 1.f;
        std::fill(acc, acc + pairs * PAIR, 0.f);
    }

    // From the scores [first, end), and the others of their Pairs, to their tanh.
    void cap(int first, int end, float in_tanh) {
        for (int i = first / PAIR * PAIR; i < (end + PAIR - 1) / PAIR * PAIR; i += W)
            *(vf_mem*)(weights + i) = tanh(*(const vf_mem*)(weights + i) * in_tanh);
    }

    // From the scores [begin, end), in Pairs of T and still without their scale, to weights; the others of
    // their Pairs are 0. `begin` is an int, or a FromStart, with which there is less to compute.
    template <typename T, typename Begin>
    void softmax(Begin begin, int end, float scale) {
        const int first = begin / PAIR * PAIR, padded = (end + PAIR - 1) / PAIR * PAIR;
        const auto is_whole = [&](int pair) { return begin <= pair && pair + PAIR <= end; };
        // A Pair at a time: the processor computes both halves at once.
        vf high = splat(max);
        for (int i = first; i < padded; i += PAIR) {
            vf a = *(const vf_mem*)(weights + i) * scale, b = *(const vf_mem*)(weights + i + W) * scale;
            if (!is_whole(i)) {
                a = is_within<T>(i, begin, end) ? a : splat(-INFINITY);
                b = is_within<T>(i + W, begin, end) ? b : splat(-INFINITY);
            }
            store_pair(weights + i, {a, b});
            high = vmax(b, vmax(a, high));
        }
        const float highest = hmax(high);
        // Always computed: whether it is 1 cannot be predicted.
        const float less = exp2_nonpositive(splat(max - highest))[0];
        rescale = highest == max ? 1.f : less;
        max = highest;
        vf total = sums * rescale;
        for (int i = first; i < padded; i += PAIR) {
            vf a = exp2_nonpositive(*(const vf_mem*)(weights + i) - max);
            vf b = exp2_nonpositive(*(const vf_mem*)(weights + i + W) - max);
            if (!is_whole(i)) {
                a = is_within<T>(i, begin, end) ? a : vf{};
                b = is_within<T>(i + W, begin, end) ? b : vf{};
            }
            total += a;
            total += b;
            store_pair(weights + i, {a, b});
        }
        sums = total;
    }

    // Whether the scores from `first` on, a multiple of W, are of [begin, end). They are in Pairs of T.
    template <typename T, typename Begin>
    static vi is_within(int first, Begin begin, int end) {
        const int pair = first / PAIR * PAIR, second = first % PAIR / W;
        vi lanes;
        for (int i = 0; i < W; ++i)
            lanes[i] = sizeof(T) == sizeof(float) ? first + i : pair + 2 * i + second;
        if constexpr (std::is_same_v<Begin, FromStart>) return lanes < end;
        return (lanes >= (int)begin) & (lanes < end);
    }

    // Of `size` elements.
    template <typename T>
    void finish(T* target, int size) const {
        const float sum = hsum(sums);
        const float inverse = sum == 0.f ? 0.f : 1.f / sum;  // of a NaN score, NaN
        for (int i = 0; i < size; i += PAIR) {
            const Pair x = {*(const vf_mem*)(acc + i) * inverse,
                            *(const vf_mem*)(acc + i + W) * inverse};
            store_pair_n(target + i, x, std::min(PAIR, size - i));
        }
    }
};

}  // namespace fastserve
