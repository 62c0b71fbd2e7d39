// Products of a query with rows of keys, and of weights with rows of values.
#pragma once

#include <cstdint>

#include "panels.h"
#include "vec.h"

namespace fastserve {

// Sums of neighbours of x and y; `step` lanes count as one element. Step 1 stays within 128-bit
// lanes (one cheap shuffle), step 4 moves whole ones.
template <int STEP>
static inline vf add_neighbours(vf x, vf y) {
    vi even, odd;
    for (int i = 0; i < W; ++i) {
        if (STEP == 1) {
            even[i] = i / 4 * 4 + i % 2 * 2 + (i % 4 / 2) * W;
        } else {
            const int lane = i / 4 * 2;  // counted over x and y together
            even[i] = lane * 4 + i % 4;
        }
        odd[i] = even[i] + STEP;
    }
    return __builtin_shuffle(x, y, even) + __builtin_shuffle(x, y, odd);
}

// Lane i of result q is the sum over the lanes of vector i of q, if COUNT is W. make(x, first) makes four of
// each, from `first` on, as late as possible, so that all vectors stay in registers.
template <int Q>
struct Vectors {
    vf of[Q];
};
template <int Q, int COUNT = W, typename F>
__attribute__((always_inline)) static inline Vectors<Q> transpose_sums(const F& make, int first = 0) {
    Vectors<Q> sums;
    if constexpr (COUNT > 4) {
        const auto low = transpose_sums<Q, COUNT / 2>(make, first);
        const auto high = transpose_sums<Q, COUNT / 2>(make, first + COUNT / 2);
        for (int q = 0; q < Q; ++q) sums.of[q] = add_neighbours<4>(low.of[q], high.of[q]);
    } else {
        vf x[Q][4] = {};
        make(x, first);
        for (int q = 0; q < Q; ++q)
            sums.of[q] = add_neighbours<1>(add_neighbours<1>(x[q][0], x[q][1]),
                                           add_neighbours<1>(x[q][2], x[q][3]));
    }
    return sums;
}

// A query's part of a score: PAIR elements, times those of a key.
template <typename T>
struct QueryPart {
    static constexpr int FLOATS = PAIR;  // that it takes
    using Elements = Pair;

    static void keep(float* part, const T* source, int n) {
        store_pair(part, load_pair_n(source, n));
    }
    static inline Pair load(const float* part) { return load_pair(part); }
    static inline Pair read(const T* key, int n) { return load_pair_n(key, n); }
    static inline void add_product(vf& sum, const Pair& q, const Pair& key) {
        sum += q.a * key.a;
        sum += q.b * key.b;
    }
};

// How rows of values are added, DEPTH at a time, times weights.
template <typename T>
struct ValueRows {
    static constexpr int DEPTH = 1;
    using X = float;  // the weights of DEPTH rows

    static void pack(float*, int) {}
    static inline Pair load(const T* const* rows, int64_t offset, int n) {
        return load_pair_n(rows[0] + offset, n);
    }
    static inline void add(Pair& sum, const Pair& values, X weight) {
        sum.a += weight * values.a;
        sum.b += weight * values.b;
    }
};

#if defined(__AVX512BF16__)
// By dot products of bfloat16 pairs, without widening.
template <>
struct QueryPart<bf16> {
    static constexpr int FLOATS = W;
    using Elements = vu;

    static void keep(float* part, const bf16* source, int n) { *(vu_mem*)part = read(source, n); }
    static inline vu load(const float* part) { return *(const vu_mem*)part; }
    static inline void add_product(vf& sum, vu q, vu key) {
        sum = (vf)_mm512_dpbf16_ps((__m512)sum, (__m512bh)q, (__m512bh)key);
    }
    static inline vu read(const bf16* p, int n) {
        if (n == PAIR) return *(const vu_mem*)p;
        return (vu)_mm512_maskz_loadu_epi16((__mmask32)((1u << n) - 1), p);
    }
};

// With weights in bfloat16, as in prompts.
template <>
struct ValueRows<bf16> : Dot<bf16> {
    // In place. Beyond `count` they are 0.
    static void pack(float* weights, int count) {
        for (int i = 0; i < count; i += PAIR)
            store_ordered((bf16*)weights + i, load_pair(weights + i));
    }
    static inline Weights load(const bf16* const* rows, int64_t offset, int n) {
        using Part = QueryPart<bf16>;
        return of_rows(Part::read(rows[0] + offset, n), Part::read(rows[1] + offset, n));
    }
};
#endif

}  // namespace fastserve
