// Products of bfloat16 by AMX, the matrix unit of some processors, to be included by products.h.
#pragma once

#include <immintrin.h>

#include "aligned.h"

namespace fastserve {

// By AMX, whose instructions multiply tile registers of 16 rows of 64 bytes: two hold rows of x, two the
// even and the odd columns of a panel, four the sums.
template <>
struct Product<bf16> {
    static constexpr int ROWS = 32;
    static constexpr int64_t PASS_STEPS = 128;  // 16 KiB of a panel: they stay in the first-level cache
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
            asm volatile("" ::: "memory");  // GCC may not know that all of it is read
            _tile_loadconfig(&config);
        }
        ~Unit() { _tile_release(); }
        Unit(const Unit&) = delete;
    };

    static int64_t steps(int64_t in) { return steps_of<bf16>(in); }
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
                        const bf16* panel, int64_t begin, int64_t end, Ahead ahead) {
        run(begin > 0, sums, stride, {tile + begin * ROWS, 16, ROWS * 16}, height, panel, begin, end,
            ahead);
    }

    template <int64_t STRIDE>
    static void add_rows(float* sums, int64_t stride, const X* rows, int64_t height,
                         const bf16* panel, int64_t steps, Ahead ahead) {
        run(true, sums, stride, {rows, STRIDE, 16}, height, panel, 0, steps, ahead);
    }

   private:
    struct Rows {
        const X* first;
        int64_t row_stride, block_stride;  // of 16 steps
    };

    static void run(bool adds, float* sums, int64_t stride, Rows x, int64_t height, const bf16* panel,
                    int64_t begin, int64_t end, Ahead ahead) {
        if (height > 16)
            run<true>(adds, sums, stride, x, panel, begin, end, ahead);
        else
            run<false>(adds, sums, stride, x, panel, begin, end, ahead);
    }

    // Rows past the tile's are multiplied too, whatever they hold, and their sums mean nothing.
    template <bool TWO>
    static inline void run(bool adds, float* sums, int64_t stride, Rows x, const bf16* panel,
                           int64_t begin, int64_t end, Ahead ahead) {
        const int64_t sum_bytes = stride * sizeof(float), row_bytes = x.row_stride * sizeof(X);
        const int64_t step_bytes = STEP_SIZE<bf16> * sizeof(bf16);
        // GCC does not know that the instructions read memory.
        asm volatile("" ::: "memory");
        if (adds) {
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
        for (int64_t k = begin; k < end; k += 16, x.first += x.block_stride) {
            for (int64_t line = 0; line < 16 * ahead.stride; line += 64)
                __builtin_prefetch(ahead.first + k * ahead.stride + line, 0, SECOND_LEVEL);
            _tile_loadd(4, x.first, row_bytes);
            _tile_loadd(6, panel + (k - begin) * STEP_SIZE<bf16>, step_bytes);
            _tile_loadd(7, panel + (k - begin) * STEP_SIZE<bf16> + PAIR, step_bytes);
            if (TWO) _tile_loadd(5, x.first + 16 * x.row_stride, row_bytes);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
            if (TWO) _tile_dpbf16ps(2, 5, 6);
            if (TWO) _tile_dpbf16ps(3, 5, 7);
        }
        _tile_stored(0, sums, sum_bytes);
        _tile_stored(1, sums + W, sum_bytes);
        if (TWO) _tile_stored(2, sums + 16 * stride, sum_bytes);
        if (TWO) _tile_stored(3, sums + 16 * stride + W, sum_bytes);
        asm volatile("" ::: "memory");
    }
};

}  // namespace fastserve
