// Products of bfloat16 by AMX, the matrix unit of some processors, to be included by products.h.
#pragma once

#include <immintrin.h>

namespace fastserve {

// By AMX, whose instructions multiply tile registers of 16 rows of 64 bytes: two hold rows of x, two the
// even and the odd columns of a panel, four the sums.
template <>
struct Product<bf16> {
    static constexpr int ROWS = 32;
    using X = Dot<bf16>::X;

    struct Unit {
        Unit() {
            struct alignas(64) {
                uint8_t palette = 1, start_row = 0, reserved[14] = {};
                uint16_t row_bytes[16] = {};
                uint8_t rows[16] = {};
            } config;
            std::fill_n(config.row_bytes, 8, 64);
            std::fill_n(config.rows, 8, 16);
            _tile_loadconfig(&config);
        }
        ~Unit() { _tile_release(); }
        Unit(const Unit&) = delete;
    };

    static int64_t first_row(int64_t tile, int64_t, int64_t rows) {
        return std::min(tile * ROWS, rows);
    }

    // [steps / 16][ROWS][16]: each tile register's content in one piece, which matters for speed.
    template <typename F>
    static void pack(const F& row_of, int64_t height, int64_t in, X* tile) {
        const int64_t whole = in / 32 * 32;
        for (int64_t m = 0; m < height; ++m) {
            const bf16* const row = row_of(m);
            X* target = tile + m * 16;
            for (int64_t i = 0; i < whole; i += 32, target += ROWS * 16)
                std::memcpy(target, row + i, 64);
            if (whole < in) {
                std::memset(target, 0, 64);
                std::memcpy(target, row + whole, (in - whole) * sizeof(bf16));
            }
        }
    }

    static void of_tile(float* sums, int64_t stride, const X* tile, int64_t height,
                        const bf16* panel, int64_t steps, Ahead ahead) {
        if (height > 16)
            run<true, false>(sums, stride, tile, 16, ROWS * 16, panel, steps, ahead);
        else
            run<false, false>(sums, stride, tile, 16, ROWS * 16, panel, steps, ahead);
    }

    template <int64_t STRIDE>
    static void add_rows(float* sums, int64_t stride, const X* rows, int64_t height,
                         const bf16* panel, int64_t steps, Ahead ahead) {
        if (height > 16)
            run<true, true>(sums, stride, rows, STRIDE, 16, panel, steps, ahead);
        else
            run<false, true>(sums, stride, rows, STRIDE, 16, panel, steps, ahead);
    }

   private:
    // Rows past the tile's are multiplied too, whatever they hold, and their sums mean nothing.
    template <bool TWO, bool ADD>
    static inline void run(float* sums, int64_t stride, const X* x, int64_t row_stride,
                           int64_t step_stride, const bf16* panel, int64_t steps, Ahead ahead) {
        const int64_t sum_bytes = stride * sizeof(float), row_bytes = row_stride * sizeof(X);
        const int64_t step_bytes = STEP_SIZE<bf16> * sizeof(bf16);
        if (ADD) {
            _tile_loadd(0, sums, sum_bytes);
            _tile_loadd(1, sums + W, sum_bytes);
            if (TWO) _tile_loadd(2, sums + 16 * stride, sum_bytes);
            if (TWO) _tile_loadd(3, sums + 16 * stride + W, sum_bytes);
        } else {
            _tile_zero(0);
            _tile_zero(1);
            if (TWO) _tile_zero(2);
            if (TWO) _tile_zero(3);
        }
        for (int64_t k = 0; k < steps; k += 16) {
            for (int64_t line = 0; line < 16 * ahead.stride; line += 64)
                __builtin_prefetch(ahead.first + k * ahead.stride + line, 0, 2);
            _tile_loadd(4, x, row_bytes);
            _tile_loadd(6, panel + k * STEP_SIZE<bf16>, step_bytes);
            _tile_loadd(7, panel + k * STEP_SIZE<bf16> + PAIR, step_bytes);
            if (TWO) _tile_loadd(5, x + 16 * row_stride, row_bytes);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
            if (TWO) _tile_dpbf16ps(2, 5, 6);
            if (TWO) _tile_dpbf16ps(3, 5, 7);
            x += step_stride;
        }
        _tile_stored(0, sums, sum_bytes);
        _tile_stored(1, sums + W, sum_bytes);
        if (TWO) _tile_stored(2, sums + 16 * stride, sum_bytes);
        if (TWO) _tile_stored(3, sums + 16 * stride + W, sum_bytes);
    }
};

}  // namespace fastserve
