// y = x W^T + b with W [out, in] packed once, in panels of its own type or in INT8, with a scale for each
// row of W. A row's result does not depend on what it is batched with, bit for bit.
#include <omp.h>

#include <algorithm>
#include <vector>

#include "aligned.h"
#include "int8_panels.h"
#include "products.h"
#include "shares.h"

namespace fastserve {

// Packed rows that are multiplied with all panels before the next ones: half a typical second-level
// cache.
#if defined(USES_AMX)
constexpr int64_t BLOCK_BYTES = 1 << 20;
#elif defined(__AVX512F__)
constexpr int64_t BLOCK_BYTES = 512 << 10;
#else
constexpr int64_t BLOCK_BYTES = 256 << 10;
#endif

// With so few tiles the way of panels from memory is what takes time: they are multiplied whole.
constexpr int64_t FEW_TILES = 4;

// Where the sums with one panel go: PAIR columns of y, or what is left of them.
template <typename T>
struct Output {
    T* y;         // [rows, out], from the first of these columns on
    int64_t out;  // elements of a row
    int width;
    Pair scale, bias;
    bool relu;

    void write(int64_t row, Pair sum) const {
        sum = {sum.a * scale.a + bias.a, sum.b * scale.b + bias.b};
        if (relu) {
            // Written so that a NaN passes through.
            sum.a = sum.a < 0.f ? vf{} : sum.a;
            sum.b = sum.b < 0.f ? vf{} : sum.b;
        }
        store_pair_n(y + row * out, sum, width);
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

// A panel's elements are narrowed to bytes: whole numbers from -127 to 127.
template <typename T>
static void pack_int8(const int8_t* weight, int8_t* panels, int64_t out, int64_t in, int64_t stride) {
    const int64_t count = (out + PAIR - 1) / PAIR, size = steps_of<T>(in) * STEP_SIZE<T>;
#pragma omp parallel
    {
        AlignedVector<T> column(in), panel(size);
#pragma omp for
        for (int64_t p = 0; p < count; ++p) {
            const auto column_of = [&](int64_t n) {
                const int8_t* row = weight + (p * PAIR + n) * stride;
                for (int64_t i = 0; i < in; ++i) column[i] = from_float<T>(row[i]);
                return column.data();
            };
            pack_panel(column_of, out - p * PAIR, in, panel.data());
            for (int64_t i = 0; i < size; i += STEP_SIZE<T>)
                Int8Step<T>::narrow(panel.data() + i, panels + p * size + i);
        }
    }
}

// scale and bias [out]; without a scale it is 1.
template <typename Panels, typename T>
static void linear(const T* x, const void* panels, const T* scale, const T* bias, T* y, int64_t rows,
                   int64_t in, int64_t out, int64_t x_stride, bool relu) {
    using P = Product<T>;
    using X = typename P::X;
    // Kept between calls: a fresh large buffer would be page-faulted in every time.
    static thread_local AlignedVector<X> packed;
    const int64_t steps = steps_of<T>(in), count = (out + PAIR - 1) / PAIR;
    const int64_t tile_size = P::ROWS * std::max<int64_t>(1, steps);
    const int64_t most_tiles =
        std::max<int64_t>(1, BLOCK_BYTES / (tile_size * (int64_t)sizeof(X)));
    const int64_t tiles = (rows + P::ROWS - 1) / P::ROWS;
    const auto first_row = [&](int64_t tile) { return P::first_row(tile, tiles, rows); };
    packed.resize(std::min(tiles, most_tiles) * tile_size);
    X* const buffer = packed.data();
    const auto output_of = [&](int64_t panel) {
        const int64_t column = panel * PAIR;
        const int width = (int)std::min<int64_t>(PAIR, out - column);
        return Output<T>{y + column,
                         out,
                         width,
                         scale ? load_pair_n(scale + column, width) : Pair{splat(1.f), splat(1.f)},
                         bias ? load_pair_n(bias + column, width) : Pair{},
                         relu};
    };
    Shares shares(omp_get_max_threads());
#pragma omp parallel
    {
        [[maybe_unused]] const typename P::Unit unit{};
        Panels weights(panels, steps);
        static thread_local AlignedVector<float> sums_of_tiles;
        sums_of_tiles.resize(std::min(tiles, most_tiles) * P::ROWS * PAIR);
        for (int64_t block = 0; block < tiles; block += most_tiles) {
            const int64_t end_tile = std::min(tiles, block + most_tiles);
            const int64_t pass_steps = std::min(
                Panels::PASS_STEPS, end_tile - block > FEW_TILES ? P::PASS_STEPS : steps);
            const int thread = omp_get_thread_num();
            shares.deal(count, thread, omp_get_num_threads());
#pragma omp for schedule(static)
            for (int64_t tile = block; tile < end_tile; ++tile)
                P::pack([&](int64_t m) { return x + (first_row(tile) + m) * x_stride; },
                        first_row(tile + 1) - first_row(tile), in,
                        buffer + (tile - block) * tile_size);
            for (int64_t p; (p = shares.take(thread)) >= 0;) {
                const Output<T> output = output_of(p);
                int64_t begin = 0, end;
                do {  // once for rows without elements, too
                    end = begin + std::min(pass_steps, steps - begin);
                    const T* const panel = weights.steps(p, begin, end);
                    for (int64_t tile = block; tile < end_tile; ++tile) {
                        const int64_t first = first_row(tile), height = first_row(tile + 1) - first;
                        float* const sums = sums_of_tiles.data() + (tile - block) * P::ROWS * PAIR;
                        P::of_tile(sums, PAIR, buffer + (tile - block) * tile_size, height, panel,
                                   begin, end,
                                   weights.next(p, tile - block, end_tile - block));
                        for (int64_t m = 0; m < height && end == steps; ++m)
                            output.write(first + m, load_pair(sums + m * PAIR));
                    }
                    begin = end;
                } while (begin < steps);
            }
#pragma omp barrier
        }
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

// weight [out, in] of whole numbers from -127 to 127; the packed form has a byte for each element.
extern "C" void fs_pack_int8_weight(int64_t dtype, const void* weight, void* panels, int64_t out,
                                    int64_t in, int64_t stride) {
    fastserve::with_type(dtype, [&](auto type) {
        using T = decltype(type);
        fastserve::pack_int8<T>((const int8_t*)weight, (int8_t*)panels, out, in, stride);
    });
}

extern "C" void fs_linear(int64_t dtype, const void* x, const void* panels, const void* bias,
                          void* y, int64_t rows, int64_t in, int64_t out, int64_t x_stride,
                          int64_t relu) {
    fastserve::with_type(dtype, [&](auto type) {
        using T = decltype(type);
        fastserve::linear<fastserve::SamePanels<T>>((const T*)x, panels, (const T*)nullptr,
                                                    (const T*)bias, (T*)y, rows, in, out, x_stride,
                                                    relu != 0);
    });
}

extern "C" void fs_int8_linear(int64_t dtype, const void* x, const void* panels, const void* scale,
                               const void* bias, void* y, int64_t rows, int64_t in, int64_t out,
                               int64_t x_stride, int64_t relu) {
    fastserve::with_type(dtype, [&](auto type) {
        using T = decltype(type);
        fastserve::linear<fastserve::Int8Panels<T>>((const T*)x, panels, (const T*)scale,
                                                    (const T*)bias, (T*)y, rows, in, out, x_stride,
                                                    relu != 0);
    });
}
