// One query's attention over its context, a chunk of positions after the other.
#pragma once

#include <algorithm>
#include <cmath>

#include "vec.h"

namespace fastserve {

constexpr float LOG2E = 1.44269504088896340736f;

// Positions that share one softmax update, at most.
constexpr int CHUNK = 64;

struct Query {
    float* acc;  // [pairs * PAIR], unnormalised output in Pair order
    float max, sum;
    float rescale;  // of acc and sum, by the current chunk
    // Scores in the log2 domain, then softmax weights, of the current chunk.
    alignas(64) float weights[CHUNK];

    void begin(float* memory, int pairs) {
        acc = memory;
        max = -INFINITY;
        sum = 0.f;
        std::fill(acc, acc + pairs * PAIR, 0.f);
    }

    // From the first `count` scores to weights; those after them to the next multiple of W are 0.
    void softmax(int count) {
        const int padded = (count + W - 1) / W * W;
        for (int i = count; i < padded; ++i) weights[i] = -INFINITY;
        vf high = splat(max);
        for (int i = 0; i < padded; i += W) high = vmax(*(const vf_mem*)(weights + i), high);
        const float highest = hmax(high);
        rescale = highest == max ? 1.f : std::exp2(max - highest);
        max = highest;
        vf total = {};
        for (int i = 0; i < padded; i += W) {
            vf e = exp2_nonpositive(*(const vf_mem*)(weights + i) - max);
            if (i + W > count)
                for (int j = count - i; j < W; ++j) e[j] = 0.f;
            total += e;
            *(vf_mem*)(weights + i) = e;
        }
        sum = sum * rescale + hsum(total);
    }

    // Of `size` elements.
    template <typename T>
    void finish(T* target, int size) const {
        const float inverse = sum == 0.f ? 0.f : 1.f / sum;  // of a NaN score, NaN
        for (int i = 0; i < size; i += PAIR) {
            const Pair x = {*(const vf_mem*)(acc + i) * inverse,
                            *(const vf_mem*)(acc + i + W) * inverse};
            store_pair_n(target + i, x, std::min(PAIR, size - i));
        }
    }
};

}  // namespace fastserve
