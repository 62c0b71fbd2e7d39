// y = x W^T + b with W [out, in] packed once, in panels of its own type. A row's result does not
// depend on what it is batched with, bit for bit.
#include <omp.h>

#include <algorithm>
#include <vector>

#include "panels.h"
#include "shares.h"

namespace fastserve {

// Packed rows that are multiplied with all panels before the next ones: half a typical second-level
// cache.
#if defined(__AVX512F__)
constexpr int64_t BLOCK_BYTES = 512 << 10;
#else
constexpr int64_t BLOCK_BYTES = 256 << 10;
#endif

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

template <typename T>
static void pack(const T* weight, T* panels, int64_t out, int64_t in, int64_t stride) {
    const int64_t count = (out + PAIR - 1) / PAIR;
#pragma omp parallel for
    for (int64_t p = 0; p < count; ++p)
        pack_panel([&](int64_t n) { return weight + (p * PAIR + n) * stride; }, out - p * PAIR, in,
                   panels + p * steps_of<T>(in) * STEP_SIZE<T>);
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
    Shares shares(omp_get_max_threads());
#pragma omp parallel
    for (int64_t block = 0; block < tiles; block += most_tiles) {
        const int64_t end_tile = std::min(tiles, block + most_tiles);
        const int thread = omp_get_thread_num();
        shares.deal(count, thread, omp_get_num_threads());
#pragma omp for schedule(static)
        for (int64_t tile = block; tile < end_tile; ++tile)
            pack_tile<T>([&](int64_t m) { return x + (first_row(tile) + m) * x_stride; },
                         first_row(tile + 1) - first_row(tile), in,
                         buffer + (tile - block) * TILE_ROWS * steps);
        for (int64_t p; (p = shares.take(thread)) >= 0;) {
            const T* const panel = panels + p * steps * STEP_SIZE<T>;
            for (int64_t tile = block; tile < end_tile; ++tile)
                with_rows<TILE_ROWS>(first_row(tile + 1) - first_row(tile), [&](auto height) {
                    constexpr int M = decltype(height)::value;
                    const X* packed_tile = buffer + (tile - block) * TILE_ROWS * steps;
                    Pair sums[M] = {};
                    add_products<T, M>(sums, packed_tile, panel, steps,
                                       next_panel(panel, steps, tile - block, end_tile - block));
                    const Output<T> output{y + first_row(tile) * out, out, bias, relu};
                    for (int m = 0; m < M; ++m) output.write(m, p * PAIR, sums[m]);
                });
        }
#pragma omp barrier
    }
}

}  // namespace fastserve

// Elements that the packed form of a weight [out, in] takes.
extern "C" int64_t fs_packed_size(int64_t dtype, int64_t out, int64_t in) {
    using namespace fastserve;
    return with_type(dtype, [&](auto type) {
        using T = decltype(type);
        return (out + PAIR - 1) / PAIR * steps_of<T>(in) * STEP_SIZE<T>;
    });
}

extern "C" void fs_pack_weight(int64_t dtype, const void* weight, void* panels, int64_t out,
                               int64_t in, int64_t stride) {
    fastserve::with_type(dtype, [&](auto type) {
        using T = decltype(type);
        fastserve::pack((const T*)weight, (T*)panels, out, in, stride);
    });
}

extern "C" void fs_linear(int64_t dtype, const void* x, const void* panels, const void* bias,
                          void* y, int64_t rows, int64_t in, int64_t out, int64_t x_stride,
                          int64_t relu) {
    fastserve::with_type(dtype, [&](auto type) {
        using T = decltype(type);
        fastserve::linear((const T*)x, (const T*)panels, (const T*)bias, (T*)y, rows, in, out,
                          x_stride, relu != 0);
    });
}
