// y = x W^T + b with W packed once, for CPUs where oneDNN has no fast kernel for the weight type.
//
// W [out, in] is stored as panels of PAIR outputs, [out / PAIR][in][PAIR], in its own type and
// widened to fp32 in registers. Every output is one sum over `in` in ascending order whatever the
// number of rows, so a row's result does not depend on what it is batched with, bit for bit.
#include <algorithm>
#include <vector>

#include "vec.h"

namespace fastserve {

#if defined(__AVX512F__)
constexpr int TILE_ROWS = 12;  // 24 of 32 registers accumulate
#else
constexpr int TILE_ROWS = 6;  // 12 of 16 registers accumulate
#endif
// Packed rows that are multiplied with all panels before the next ones: half a typical L2.
constexpr int64_t BLOCK_BYTES = 256 << 10;

struct Epilogue {
    const void* bias;  // [out] in the weight's type, or nullptr
    bool relu;
};

// Rows [0, M) of one packed tile times N neighbouring panels.
template <typename T, int M, int N>
static void multiply(const float* x, const T* panels, int64_t in, int64_t out, int64_t first_out,
                     const Epilogue& epilogue, T* y, int64_t y_stride) {
    Pair acc[M][N] = {};
    const int64_t panel = in * PAIR;
    for (int64_t k = 0; k < in; ++k) {
        Pair w[N];
        for (int n = 0; n < N; ++n) w[n] = load_pair(panels + n * panel + k * PAIR);
        for (int m = 0; m < M; ++m) {
            const vf value = splat(x[k * M + m]);
            for (int n = 0; n < N; ++n) {
                acc[m][n].a += value * w[n].a;
                acc[m][n].b += value * w[n].b;
            }
        }
    }
    for (int n = 0; n < N; ++n) {
        const int64_t column = first_out + n * PAIR;
        const int width = (int)std::min<int64_t>(PAIR, out - column);
        Pair bias = {};
        if (epilogue.bias) bias = load_pair_n((const T*)epilogue.bias + column, width);
        for (int m = 0; m < M; ++m) {
            Pair p = {acc[m][n].a + bias.a, acc[m][n].b + bias.b};
            if (epilogue.relu) {
                // Written so that a NaN passes through.
                p.a = p.a < 0.f ? vf{} : p.a;
                p.b = p.b < 0.f ? vf{} : p.b;
            }
            store_pair_n(y + m * y_stride + column, p, width);
        }
    }
}

// A few rows leave registers free: then several panels at once keep the multipliers busy.
template <typename T, int M>
static void multiply_panels(const float* x, const T* panels, int64_t in, int64_t out,
                            int64_t first_panel, int64_t end_panel, const Epilogue& epilogue, T* y,
                            int64_t y_stride) {
    constexpr int N = std::max(1, std::min(4, TILE_ROWS / (M + (M == 1))));
    int64_t p = first_panel;
    for (; p + N <= end_panel; p += N)
        multiply<T, M, N>(x, panels + p * in * PAIR, in, out, p * PAIR, epilogue, y, y_stride);
    for (; p < end_panel; ++p)
        multiply<T, M, 1>(x, panels + p * in * PAIR, in, out, p * PAIR, epilogue, y, y_stride);
}

template <typename T, int M>
static void dispatch(int rows, const float* x, const T* panels, int64_t in, int64_t out,
                     int64_t first_panel, int64_t end_panel, const Epilogue& epilogue, T* y,
                     int64_t y_stride) {
    if (rows == M)
        return multiply_panels<T, M>(x, panels, in, out, first_panel, end_panel, epilogue, y,
                                     y_stride);
    if constexpr (M > 1)
        dispatch<T, M - 1>(rows, x, panels, in, out, first_panel, end_panel, epilogue, y, y_stride);
}

template <typename T>
static void pack(const T* weight, T* panels, int64_t out, int64_t in, int64_t stride) {
    const int64_t count = (out + PAIR - 1) / PAIR;
#pragma omp parallel for
    for (int64_t p = 0; p < count; ++p) {
        T* panel = panels + p * in * PAIR;
        for (int n = 0; n < PAIR; ++n) {
            const int64_t row = p * PAIR + n;
            for (int64_t k = 0; k < in; ++k)
                panel[k * PAIR + n] = row < out ? weight[row * stride + k] : T{};
        }
    }
}

template <typename T>
static void linear(const T* x, const T* panels, const T* bias, T* y, int64_t rows, int64_t in,
                   int64_t out, int64_t x_stride, bool relu) {
    // Kept between calls: a fresh large buffer would be page-faulted in every time.
    static thread_local std::vector<float> packed;
    const Epilogue epilogue{bias, relu};
    const int64_t count = (out + PAIR - 1) / PAIR;
    const int64_t most_tiles = std::max<int64_t>(1, BLOCK_BYTES / (4 * in * TILE_ROWS));
    const int64_t tiles = (rows + TILE_ROWS - 1) / TILE_ROWS;
    // Tiles of nearly equal height: a thin last tile would waste the multipliers.
    const auto first_row = [&](int64_t tile) { return tile * rows / tiles; };
    packed.resize(std::min(tiles, most_tiles) * TILE_ROWS * in);
    float* const buffer = packed.data();
    const int64_t step = rows <= 2 ? 8 : 2;  // panels of one work item
#pragma omp parallel
    for (int64_t block = 0; block < tiles; block += most_tiles) {
        const int64_t end_tile = std::min(tiles, block + most_tiles);
#pragma omp for schedule(static)
        for (int64_t tile = block; tile < end_tile; ++tile) {
            float* target = buffer + (tile - block) * TILE_ROWS * in;
            const int64_t first = first_row(tile), height = first_row(tile + 1) - first;
            for (int64_t m = 0; m < height; ++m) {
                const T* row = x + (first + m) * x_stride;
                for (int64_t k = 0; k < in; ++k) target[k * height + m] = to_float(row[k]);
            }
        }
#pragma omp for schedule(dynamic, 1)
        for (int64_t p = 0; p < count; p += step)
            for (int64_t tile = block; tile < end_tile; ++tile)
                dispatch<T, TILE_ROWS>((int)(first_row(tile + 1) - first_row(tile)),
                                       buffer + (tile - block) * TILE_ROWS * in, panels, in, out, p,
                                       std::min(count, p + step), epilogue,
                                       y + first_row(tile) * out, out);
    }
}

}  // namespace fastserve

// Elements that the packed form of a weight [out, in] takes.
extern "C" int64_t fs_packed_size(int64_t out, int64_t in) {
    return (out + fastserve::PAIR - 1) / fastserve::PAIR * fastserve::PAIR * in;
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
