// Products of tiles of rows with panels. Every element is one sum, in an order that depends neither on
// the number of rows nor on the other ones.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "panels.h"

namespace fastserve {

// f(a constant equal to `rows`), which is at most M.
template <int M, typename F>
static void with_rows(int64_t rows, const F& f) {
    if (rows == M) return f(std::integral_constant<int, M>());
    if constexpr (M > 1) with_rows<M - 1>(rows, f);
}

// By vector instructions.
template <typename T>
struct Product {
#if defined(__AVX512F__)
    static constexpr int ROWS = 12;  // of a tile at most: 24 of 32 registers accumulate
#else
    static constexpr int ROWS = 6;  // 12 of 16 registers accumulate
#endif
    // Steps of all rows of a tile that are packed before the next ones, so that they stay in the
    // first-level cache.
    static constexpr int64_t PACK_STEPS = 64;
    // Steps of a panel that many tiles are multiplied with before its next ones.
    static constexpr int64_t PASS_STEPS = std::numeric_limits<int64_t>::max();
    using X = typename Dot<T>::X;

    // What a thread holds while it multiplies.
    struct Unit {};

    static int64_t steps(int64_t in) { return steps_of<T>(in); }

    // Tiles of nearly equal height: a thin last one would waste the multipliers.
    static int64_t first_row(int64_t tile, int64_t tiles, int64_t rows) {
        return tile * rows / tiles;
    }

    // The packed form of a tile: [steps][height]. row_of(m) is row m, of `in` elements.
    template <typename F>
    static void pack(const F& row_of, int64_t height, int64_t in, X* tile) {
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

    // sums [height], `stride` apart, each a Pair, of a packed tile: of its steps from `begin` up to
    // `end`, added to those before if there are any. `panel`: its steps from `begin` on.
    static void of_tile(float* sums, int64_t stride, const X* tile, int64_t height, const T* panel,
                        int64_t begin, int64_t end, Ahead ahead) {
        with_rows<ROWS>(height, [&](auto constant) {
            constexpr int M = decltype(constant)::value;
            run<M>(begin > 0, sums, stride, [&](int64_t k, int m) { return tile[k * M + m]; },
                   panel, begin, end, ahead);
        });
    }

    // Adds to the sums of rows that are STRIDE apart.
    template <int64_t STRIDE>
    static void add_rows(float* sums, int64_t stride, const X* rows, int64_t height, const T* panel,
                         int64_t steps, Ahead ahead) {
        with_rows<ROWS>(height, [&](auto constant) {
            constexpr int M = decltype(constant)::value;
            run<M>(true, sums, stride, [&](int64_t k, int m) { return rows[m * STRIDE + k]; }, panel,
                   0, steps, ahead);
        });
    }

   private:
    template <int M, typename F>
    static inline void run(bool adds, float* sums, int64_t stride, const F& x, const T* panel,
                           int64_t begin, int64_t end, Ahead ahead) {
        Pair acc[M];
        for (int m = 0; m < M; ++m) acc[m] = adds ? load_pair(sums + m * stride) : Pair{};
#pragma GCC unroll 4
        for (int64_t k = begin; k < end; ++k) {
            for (int64_t line = 0; line < STEP_SIZE<T> * (int64_t)sizeof(T); line += 64)
                __builtin_prefetch(ahead.first + k * ahead.stride + line);
            const auto weights = Dot<T>::load(panel + (k - begin) * STEP_SIZE<T>);
            for (int m = 0; m < M; ++m) Dot<T>::add(acc[m], weights, x(k, m));
        }
        for (int m = 0; m < M; ++m) store_pair(sums + m * stride, acc[m]);
    }
};

}  // namespace fastserve

#if defined(USES_AMX)
#include "amx_product.h"
#endif
