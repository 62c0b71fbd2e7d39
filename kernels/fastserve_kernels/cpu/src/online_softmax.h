// One query's attention over its context, a chunk of positions after the other.
#pragma once

#include <algorithm>
#include <cmath>

#include "vec.h"

namespace fastserve {

constexpr float LOG2E = 1.44269504088896340736f;

// With up to CHUNK positions that share one softmax update.
template <int CHUNK>
struct Query {
    float* acc;  // [pairs * PAIR], unnormalised output in Pair order
    float max;
    float rescale;  // of acc and sums, by the current chunk
    vf sums;        // of weights
    // Scores in the log2 domain, then softmax weights, of the current chunk.
    alignas(64) float weights[CHUNK];

    void begin(float* memory, int pairs) {
        acc = memory;
        max = -INFINITY;
        sums = vf{};
        std::fill(acc, acc + pairs * PAIR, 0.f);
    }

    // From the first `count` scores, in Pairs of T and still without their scale, to weights; those after
    // them to the next multiple of PAIR are 0.
    template <typename T>
    void softmax(int count, float scale) {
        const int padded = (count + PAIR - 1) / PAIR * PAIR;
        vf high = splat(max);
        for (int i = 0; i < padded; i += W) {
            vf score = *(const vf_mem*)(weights + i) * scale;
            if (i / PAIR * PAIR + PAIR > count)
                score = positions<T>(i) < count ? score : splat(-INFINITY);
            *(vf_mem*)(weights + i) = score;
            high = vmax(score, high);
        }
        const float highest = hmax(high);
        // Always computed: whether it is 1 cannot be predicted.
        const float less = exp2_nonpositive(splat(max - highest))[0];
        rescale = highest == max ? 1.f : less;
        max = highest;
        vf total = sums * rescale;
        for (int i = 0; i < padded; i += W) {
            vf e = exp2_nonpositive(*(const vf_mem*)(weights + i) - max);
            if (i / PAIR * PAIR + PAIR > count) e = positions<T>(i) < count ? e : vf{};
            total += e;
            *(vf_mem*)(weights + i) = e;
        }
        sums = total;
    }

    // Of the scores from `first` on, a multiple of W, that are kept in Pairs of T.
    template <typename T>
    static vi positions(int first) {
        const int pair = first / PAIR * PAIR, second = first % PAIR / W;
        vi lanes;
        for (int i = 0; i < W; ++i)
            lanes[i] = sizeof(T) == sizeof(float) ? first + i : pair + 2 * i + second;
        return lanes;
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
