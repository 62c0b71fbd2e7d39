// y = x W^T + b with W packed once.
//
// W [out, in] is stored as panels of PAIR outputs in its own type, and multiplied in fp32 or, where
// the processor has the instruction, by dot products of bfloat16 pairs. Every output is one sum over
// `in` in ascending order whatever the number of rows, so a row's result does not depend on what it
// is batched with, bit for bit.
#include <algorithm>
#include <type_traits>
#include <vector>

#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

#include "vec.h"

namespace fastserve {

// BLOCK_BYTES: packed rows that are multiplied with all panels before the next ones, half a typical
// second-level cache.
#if defined(__AVX512F__)
constexpr int TILE_ROWS = 12;  // 24 of 32 registers accumulate
constexpr int64_t BLOCK_BYTES = 512 << 10;
#else
constexpr int TILE_ROWS = 6;  // 12 of 16 registers accumulate
constexpr int64_t BLOCK_BYTES = 256 << 10;
#endif
// How far ahead of the multiplication panels are fetched: from memory 5 to 10% faster than without
// at up to 64 rows, and no slower from a cache.
constexpr int64_t PREFETCH_BYTES = 4096;
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
    // Of element k of an output within the step of its panel.
    static int64_t place(int64_t, int output) { return output; }
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
    static int64_t place(int64_t k, int output) {
        return (output % 2 * W + output / 2) * 2 + k % 2;
    }
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

// Where the sums of some rows go.
template <typename T>
struct Output {
    T* y;
    int64_t out;    // elements of a row
    const T* bias;  // [out], or nullptr
    bool relu;

    void write(int64_t row, int64_t column, Pair sum) const {
        const int width = (int)std::min<int64_t>(PAIR, out - column);
        if (bias) {
            const Pair b = load_pair_n(bias + column, width);
            sum = {sum.a + b.a, sum.b + b.b};
        }
        if (relu) {
            // Written so that a NaN passes through.
            sum.a = sum.a < 0.f ? vf{} : sum.a;
            sum.b = sum.b < 0.f ? vf{} : sum.b;
        }
        store_pair_n(y + row * out + column, sum, width);
    }
};

// Adds `steps` steps of M packed rows times N neighbouring panels.
template <typename T, int M, int N>
static inline void add_products(Pair (&sums)[M][N], const typename Dot<T>::X* x, const T* panels,
                                int64_t panel_size, int64_t steps) {
#pragma GCC unroll 4
    for (int64_t k = 0; k < steps; ++k) {
        typename Dot<T>::Weights w[N];
        for (int n = 0; n < N; ++n) {
            const T* at = panels + n * panel_size + k * STEP_SIZE<T>;
            for (int64_t line = 0; line < STEP_SIZE<T> * (int64_t)sizeof(T); line += 64)
                __builtin_prefetch((const char*)at + PREFETCH_BYTES + line);
            w[n] = Dot<T>::load(at);
        }
        for (int m = 0; m < M; ++m)
            for (int n = 0; n < N; ++n) Dot<T>::add(sums[m][n], w[n], x[k * M + m]);
    }
}

// A few rows leave registers free: then several panels at once keep the multipliers busy.
constexpr int panels_at_once(int rows) {
    return std::max(1, std::min(4, TILE_ROWS / (rows + (rows == 1))));
}

// All steps of M rows times N panels from `panel` on.
template <typename T, int M, int N>
static void multiply(const typename Dot<T>::X* x, const T* panels, int64_t steps, int64_t panel,
                     const Output<T>& output) {
    const int64_t panel_size = steps * STEP_SIZE<T>;
    Pair sums[M][N] = {};
    add_products<T, M, N>(sums, x, panels + panel * panel_size, panel_size, steps);
    for (int n = 0; n < N; ++n)
        for (int m = 0; m < M; ++m) output.write(m, (panel + n) * PAIR, sums[m][n]);
}

// f(a constant equal to `rows`), which is at most M.
template <int M, typename F>
static void with_rows(int64_t rows, const F& f) {
    if (rows == M) return f(std::integral_constant<int, M>());
    if constexpr (M > 1) with_rows<M - 1>(rows, f);
}

// Panel [step][PAIR outputs, with the DEPTH neighbours of each], zeros past the ends.
template <typename T>
static void pack(const T* weight, T* panels, int64_t out, int64_t in, int64_t stride) {
    constexpr int DEPTH = Dot<T>::DEPTH;
    const int64_t steps = steps_of<T>(in), count = (out + PAIR - 1) / PAIR;
#pragma omp parallel for
    for (int64_t p = 0; p < count; ++p) {
        T* panel = panels + p * steps * STEP_SIZE<T>;
        for (int n = 0; n < PAIR; ++n) {
            const int64_t row = p * PAIR + n;
            for (int64_t k = 0; k < steps * DEPTH; ++k)
                panel[k / DEPTH * STEP_SIZE<T> + Dot<T>::place(k, n)] =
                    row < out && k < in ? weight[row * stride + k] : T{};
        }
    }
}

template <typename T>
static void linear(const T* x, const T* panels, const T* bias, T* y, int64_t rows, int64_t in,
                   int64_t out, int64_t x_stride, bool relu) {
    using X = typename Dot<T>::X;
    // Kept between calls: a fresh large buffer would be page-faulted in every time.
    static thread_local std::vector<X> packed;
    const int64_t steps = steps_of<T>(in), count = (out + PAIR - 1) / PAIR;
    const int64_t most_tiles =
        std::max<int64_t>(1, BLOCK_BYTES / (TILE_ROWS * steps * (int64_t)sizeof(X)));
    const int64_t tiles = (rows + TILE_ROWS - 1) / TILE_ROWS;
    // Tiles of nearly equal height: a thin last tile would waste the multipliers.
    const auto first_row = [&](int64_t tile) { return tile * rows / tiles; };
    packed.resize(std::min(tiles, most_tiles) * TILE_ROWS * steps);
    X* const buffer = packed.data();
    const auto pack_tile = [&](int64_t tile, X* target) {
        const int64_t first = first_row(tile), height = first_row(tile + 1) - first;
        for (int64_t begin = 0; begin < steps; begin += PACK_STEPS) {
            const int64_t end = std::min(steps, begin + PACK_STEPS);
            for (int64_t m = 0; m < height; ++m) {
                const T* row = x + (first + m) * x_stride;
                for (int64_t k = begin; k < end; ++k) {
                    const int64_t at = k * Dot<T>::DEPTH;
                    target[k * height + m] = Dot<T>::pack(row + at, in - at);
                }
            }
        }
    };
#pragma omp parallel
    for (int64_t block = 0; block < tiles; block += most_tiles) {
        const int64_t end_tile = std::min(tiles, block + most_tiles);
#pragma omp for schedule(static)
        for (int64_t tile = block; tile < end_tile; ++tile)
            pack_tile(tile, buffer + (tile - block) * TILE_ROWS * steps);
        const int at_once = panels_at_once((int)((rows + tiles - 1) / tiles));
#pragma omp for schedule(dynamic, 1)
        for (int64_t p = 0; p < count; p += at_once)
            for (int64_t tile = block; tile < end_tile; ++tile)
                with_rows<TILE_ROWS>(first_row(tile + 1) - first_row(tile), [&](auto height) {
                    constexpr int M = decltype(height)::value, N = panels_at_once(M);
                    const X* packed_tile = buffer + (tile - block) * TILE_ROWS * steps;
                    const Output<T> output{y + first_row(tile) * out, out, bias, relu};
                    const int64_t end = std::min(count, p + at_once);
                    int64_t q = p;
                    for (; q + N <= end; q += N)
                        multiply<T, M, N>(packed_tile, panels, steps, q, output);
                    for (; q < end; ++q)
                        multiply<T, M, 1>(packed_tile, panels, steps, q, output);
                });
    }
}

}  // namespace fastserve

// Elements that the packed form of a weight [out, in] takes.
extern "C" int64_t fs_packed_size(int64_t dtype, int64_t out, int64_t in) {
    using namespace fastserve;
    const int64_t count = (out + PAIR - 1) / PAIR;
    if (dtype == kBFloat16) return count * steps_of<bf16>(in) * STEP_SIZE<bf16>;
    return count * steps_of<float>(in) * STEP_SIZE<float>;
}

extern "C" void fs_pack_weight(int64_t dtype, const void* weight, void* panels, int64_t out,
                               int64_t in, int64_t stride) {
    using namespace fastserve;
    if (dtype == kBFloat16)
        return pack((const bf16*)weight, (bf16*)panels, out, in, stride);
    pack((const float*)weight, (float*)panels, out, in, stride);
}

extern "C" void fs_linear(int64_t dtype, const void* x, const void* panels, const void* bias,
                          void* y, int64_t rows, int64_t in, int64_t out, int64_t x_stride,
                          int64_t relu) {
    using namespace fastserve;
    if (dtype == kBFloat16)
        return linear((const bf16*)x, (const bf16*)panels, (const bf16*)bias, (bf16*)y, rows, in,
                      out, x_stride, relu != 0);
    linear((const float*)x, (const float*)panels, (const float*)bias, (float*)y, rows, in, out,
           x_stride, relu != 0);
}
