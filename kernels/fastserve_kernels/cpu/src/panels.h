// Matrix products of a few rows with panels: x W^T, of which every element is one sum in ascending
// order whatever the number of rows.
//
// A panel holds PAIR rows of W, a step of the sum after the other. The rows of x are packed likewise,
// a tile of them at a time. Sums are in fp32; bfloat16 is widened or, where the processor has the
// instruction, multiplied by dot products of pairs.
#pragma once

#include <algorithm>
#include <cstring>
#include <type_traits>

#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

#include "vec.h"

namespace fastserve {

#if defined(__AVX512F__)
constexpr int TILE_ROWS = 12;  // 24 of 32 registers accumulate
#else
constexpr int TILE_ROWS = 6;  // 12 of 16 registers accumulate
#endif
// Steps of all rows of a tile that are packed before the next ones, so that they stay in the
// first-level cache.
constexpr int64_t PACK_STEPS = 64;

// One step of the sum: DEPTH neighbours along `in`, of a row as an X, of PAIR outputs as a Weights.
template <typename T>
struct Dot {
    static constexpr int DEPTH = 1;
    using X = float;
    using Weights = Pair;

    // `left`: elements from x to the end of its row.
    static X pack(const T* x, int64_t) { return to_float(*x); }
    // Of an output's DEPTH elements in each step of its panel.
    static int place(int output) { return output; }
    static inline Weights load(const T* panel) { return load_pair(panel); }
    static inline void add(Pair& sum, const Weights& w, X x) {
        const vf value = splat(x);
        sum.a += value * w.a;
        sum.b += value * w.b;
    }
};

#if defined(__AVX512BF16__)
template <>
struct Dot<bf16> {
    static constexpr int DEPTH = 2;
    using X = uint32_t;
    struct Weights {
        __m512bh a, b;
    };

    static X pack(const bf16* x, int64_t left) {
        X pair = 0;
        std::memcpy(&pair, x, left > 1 ? 4 : 2);
        return pair;
    }
    // Even outputs in the first vector, odd ones in the second, as in a Pair of bf16.
    static int place(int output) { return (output % 2 * W + output / 2) * 2; }
    static inline Weights load(const bf16* panel) {
        return {(__m512bh)_mm512_loadu_si512(panel), (__m512bh)_mm512_loadu_si512(panel + 2 * W)};
    }
    static inline void add(Pair& sum, const Weights& w, X x) {
        const __m512bh value = (__m512bh)_mm512_set1_epi32((int)x);
        sum.a = (vf)_mm512_dpbf16_ps((__m512)sum.a, w.a, value);
        sum.b = (vf)_mm512_dpbf16_ps((__m512)sum.b, w.b, value);
    }
};
#endif

template <typename T>
static int64_t steps_of(int64_t in) {
    return (in + Dot<T>::DEPTH - 1) / Dot<T>::DEPTH;
}
template <typename T>
constexpr int64_t STEP_SIZE = PAIR * Dot<T>::DEPTH;  // elements of a panel

// The packed form of `count` rows of W, up to PAIR of them: [steps][PAIR, with DEPTH neighbours each],
// zeros past the ends. row_of(n) is row n, of `in` elements.
template <typename T, typename F>
static void pack_panel(const F& row_of, int64_t count, int64_t in, T* panel) {
    constexpr int DEPTH = Dot<T>::DEPTH;
    const int64_t steps = steps_of<T>(in), whole = in / DEPTH;
    if (count < PAIR || whole < steps) std::fill(panel, panel + steps * STEP_SIZE<T>, T{});
    for (int n = 0; n < std::min<int64_t>(count, PAIR); ++n) {
        const T* row = row_of(n);
        T* target = panel + Dot<T>::place(n);
        for (int64_t k = 0; k < whole; ++k)
            std::memcpy(target + k * STEP_SIZE<T>, row + k * DEPTH, DEPTH * sizeof(T));
        if (whole < steps)
            std::memcpy(target + whole * STEP_SIZE<T>, row + whole * DEPTH,
                        (in - whole * DEPTH) * sizeof(T));
    }
}

// The packed form of a tile: [steps][height]. row_of(m) is row m, of `in` elements.
template <typename T, typename F>
static void pack_tile(const F& row_of, int64_t height, int64_t in, typename Dot<T>::X* tile) {
    const int64_t steps = steps_of<T>(in);
    for (int64_t begin = 0; begin < steps; begin += PACK_STEPS) {
        const int64_t end = std::min(steps, begin + PACK_STEPS);
        for (int64_t m = 0; m < height; ++m) {
            const T* row = row_of(m);
            for (int64_t k = begin; k < end; ++k) {
                const int64_t at = k * Dot<T>::DEPTH;
                tile[k * height + m] = Dot<T>::pack(row + at, in - at);
            }
        }
    }
}

// What is fetched during a pass over a panel: in each step the lines from there on.
struct Ahead {
    const char* first;
    int64_t stride;  // bytes
};

// The panel behind it, in equal parts by all passes: from memory up to a third faster than without.
template <typename T>
static inline Ahead next_panel(const T* panel, int64_t steps, int64_t pass, int64_t passes) {
    constexpr int64_t STEP_BYTES = STEP_SIZE<T> * sizeof(T);
    const int64_t bytes = steps * STEP_BYTES;
    return {(const char*)panel + bytes + pass * bytes / passes, STEP_BYTES / passes};
}

// Adds the products of a tile of M rows with a panel.
template <typename T, int M>
static inline void add_products(Pair (&sums)[M], const typename Dot<T>::X* x, const T* panel,
                                int64_t steps, Ahead ahead) {
#pragma GCC unroll 4
    for (int64_t k = 0; k < steps; ++k) {
        for (int64_t line = 0; line < STEP_SIZE<T> * (int64_t)sizeof(T); line += 64)
            __builtin_prefetch(ahead.first + k * ahead.stride + line);
        const auto weights = Dot<T>::load(panel + k * STEP_SIZE<T>);
        for (int m = 0; m < M; ++m) Dot<T>::add(sums[m], weights, x[k * M + m]);
    }
}

// f(a constant equal to `rows`), which is at most M.
template <int M, typename F>
static void with_rows(int64_t rows, const F& f) {
    if (rows == M) return f(std::integral_constant<int, M>());
    if constexpr (M > 1) with_rows<M - 1>(rows, f);
}

}  // namespace fastserve
