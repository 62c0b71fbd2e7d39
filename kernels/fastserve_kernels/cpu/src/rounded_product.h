// Products of weights of few bits with rounded rows. Products of codes are summed as whole numbers, which is
// exact, and an instruction does four of them in a lane. That takes less time than to widen the weights.
#pragma once

#include "aligned.h"
#include "quantized_panels.h"
#include "rounded_rows.h"

#if defined(ROUNDS_ROWS)

namespace fastserve {

// Rows of a tile. The codes of 32 neighbours, which stay in registers for all rows, take 16 of 32 registers,
// and the sums of a tile 6. Of 16 registers the sums take 4.
#if defined(__AVX512F__)
constexpr int ROUNDED_ROWS = 3;
#else
constexpr int ROUNDED_ROWS = 2;
#endif

// Adds, in each lane, the products of four bytes without a sign and four bytes with one.
static inline vi add_products(vi sum, vu codes, vi x) {
#if defined(__AVX512VNNI__)
    return (vi)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)codes, (__m512i)x);
#else
    return (vi)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)codes, (__m256i)x);
#endif
}

// The codes of neighbours from 4 * quarter on, in vector v of a block.
template <int64_t CODES>
static inline vu codes_of_quarter(const uint8_t* block, int quarter, int v) {
    using Layout = ByColumn<bf16>;
    const Bits low = Layout::low_bits<CODES>(8 * quarter + v);
    const vu word = *(const vu_mem*)(block + low.plane * PLANE) >> low.shift;
    if constexpr (CODES >= k8Bits) return word;
    if constexpr (CODES == k4Bits) return word & 0x0f0f0f0fu;
    const Bits high = Layout::high_bits<CODES>(8 * quarter + v);
    const vu plane = *(const vu_mem*)(block + high.plane * PLANE);
    return (word & 0x0f0f0f0fu) |
           (moved(plane, high.shift, 4) & (CODES == k5Bits ? 0x10101010u : 0x30303030u));
}

// As Product, a step being a group of the rows.
template <int BLOCKS>
struct RoundedProduct {
    static constexpr int ROWS = ROUNDED_ROWS;
    using X = RoundedGroup<BLOCKS>;

    struct Unit {};

    static int64_t steps(int64_t in) { return (in + X::SIZE - 1) / X::SIZE; }
    static int64_t first_row(int64_t tile, int64_t, int64_t rows) {
        return std::min(tile * ROWS, rows);
    }

    // [steps][ROWS].
    template <typename F>
    static void pack(const F& row_of, int64_t height, int64_t in, X* tile) {
        for (int64_t m = 0; m < height; ++m) {
            const bf16* const row = row_of(m);
            for (int64_t k = 0; k < steps(in); ++k)
                round_group(row + k * X::SIZE, in - k * X::SIZE, tile + k * ROWS + m);
        }
    }
};

// Panels of Pieces for rounded rows. Each thread has its own.
template <int BLOCKS>
class RoundingPanels {
   public:
    using X = RoundedGroup<BLOCKS>;
    // Rows that are multiplied with a part of a panel before its next one. Their sums take 6 KiB at most.
    static constexpr int64_t ROWS_AT_A_TIME = 16 * ROUNDED_ROWS;
    static constexpr bool HAS_STEPS = false;

    explicit RoundingPanels(int64_t) {}

    void use(const void* pieces) { pieces_ = (const Pieces<bf16>*)pieces; }

    bool multiplies(int64_t, int64_t) const { return true; }
    // sums [rows] with a panel, of tiles that are tile_size apart, each full but the last one.
    void multiply(int64_t panel, const X* tiles, int64_t tile_size, int64_t rows, float* sums,
                  Ahead ahead) {
        const auto& [piece, first_panel, first_column] = pieces_->with_panel(panel);
        piece.with_codes([&, &piece = piece, local = panel - first_panel](auto codes_constant) {
            constexpr int64_t CODES = decltype(codes_constant)::value;
            if constexpr (CODES != kFloat8) {
                if (piece.has_offset())
                    run<CODES, true>(piece, local, tiles, tile_size, rows, sums, ahead);
                else run<CODES, false>(piece, local, tiles, tile_size, rows, sums, ahead);
            }
        });
    }

    // In bytes for each block.
    Ahead next(int64_t panel, int64_t pass, int64_t passes) const {
        const auto& [piece, first_panel, first_column] = pieces_->with_panel(panel);
        const int64_t bytes = piece.panel_bytes();
        return {(const char*)piece.panel(panel - first_panel + 1) + pass * bytes / passes,
                bytes / std::max<int64_t>(1, piece.blocks()) / passes};
    }
    Columns columns(int64_t panel, int64_t) const { return pieces_->columns(panel); }

   private:
    // Neighbours in a part of a group: so many that its codes stay in registers for all rows.
    static constexpr int PART = FEW_BLOCKS * (int)BLOCK;

    // A part of a group of a panel, which is as long as the groups of the rows.
    struct Part {
        vu codes[FEW_BLOCKS * 8];  // as bytes
        int32_t center;
        Pair scale, offset;
    };

    // Adds the products of M rows with a part of a group. All of a group are summed before they are scaled:
    // `unscaled` [M][2] keeps the sums from part to part.
    template <int M, int part, bool HAS_OFFSET>
    __attribute__((always_inline)) static inline void add(const Part& of, const X* x, vi* unscaled,
                                                          float* sums) {
        vi products[M][2];
        for (int m = 0; m < M; ++m)
            for (int v = 0; v < 2; ++v)
                products[m][v] = part ? unscaled[m * 2 + v] : -of.center * x[m].sum - vi{};
#pragma GCC unroll 8
        for (int i = 0; i < PART / 4; ++i)
            for (int m = 0; m < M; ++m) {
                int32_t four;
                std::memcpy(&four, x[m].codes + part * PART + i * 4, 4);
                const vi row = four - vi{};
                products[m][0] = add_products(products[m][0], of.codes[2 * i], row);
                products[m][1] = add_products(products[m][1], of.codes[2 * i + 1], row);
            }
        if constexpr ((part + 1) * PART < X::SIZE) {
            for (int m = 0; m < M; ++m)
                for (int v = 0; v < 2; ++v) unscaled[m * 2 + v] = products[m][v];
            return;
        }
        for (int m = 0; m < M; ++m) {
            Pair sum = load_pair(sums + m * PAIR);
            sum.a += __builtin_convertvector(products[m][0], vf) * (of.scale.a * x[m].scale);
            sum.b += __builtin_convertvector(products[m][1], vf) * (of.scale.b * x[m].scale);
            if (HAS_OFFSET) {
                sum.a += of.offset.a * x[m].scaled;
                sum.b += of.offset.b * x[m].scaled;
            }
            store_pair(sums + m * PAIR, sum);
        }
    }

    template <int64_t CODES, bool HAS_OFFSET>
    void run(const Piece<bf16>& piece, int64_t panel, const X* tiles, int64_t tile_size, int64_t rows,
             float* sums, Ahead ahead) {
        constexpr int M = ROUNDED_ROWS;
        std::fill_n(sums, rows * PAIR, 0.f);
        Part current;
        current.center = (int32_t)piece.center();
        const auto add_part = [&](const uint8_t* codes, int64_t first, int64_t last,
                                  auto part) __attribute__((always_inline)) {
            const int64_t begin = first + part * FEW_BLOCKS;
#pragma GCC unroll 4
            for (int i = 0; i < FEW_BLOCKS; ++i) {
                // The first level holds the rows and this panel.
                for (int64_t line = 0; line < ahead.stride; line += 64)
                    __builtin_prefetch(ahead.first + (begin + i) * ahead.stride + line, 0, SECOND_LEVEL);
                // Past the end of a row there may be any codes: the rounded row is 0 there.
                const uint8_t* const block =
                    codes + (begin + i < last ? begin + i - first : 0) * BYTES_OF_BLOCK<CODES>;
#pragma GCC unroll 8
                for (int n = 0; n < 8; ++n)
                    current.codes[i * 8 + n] = codes_of_quarter<CODES>(block, n / 2, n % 2);
            }
            const X* x = tiles + first / BLOCKS * M;
            vi* unscaled = unscaled_;
            float* to = sums;
            int64_t left = rows;
            for (; left >= M; left -= M, x += tile_size, unscaled += M * 2, to += M * PAIR)
                add<M, part, HAS_OFFSET>(current, x, unscaled, to);
            if (left == 2) add<2, part, HAS_OFFSET>(current, x, unscaled, to);
            else if (left == 1) add<1, part, HAS_OFFSET>(current, x, unscaled, to);
        };
        piece.template for_blocks<CODES>(
            panel, 0, piece.blocks(),
            [&](const uint8_t* codes, Pair scale, Pair offset, int64_t first,
                int64_t last) __attribute__((always_inline)) {
                current.scale = scale;
                current.offset = offset;
                for (; first < last; first += BLOCKS, codes += BLOCKS * BYTES_OF_BLOCK<CODES>) {
                    add_part(codes, first, last, std::integral_constant<int, 0>());
                    if constexpr (BLOCKS > FEW_BLOCKS)
                        add_part(codes, first, last, std::integral_constant<int, 1>());
                }
            });
    }

    const Pieces<bf16>* pieces_ = nullptr;
    vi unscaled_[BLOCKS > FEW_BLOCKS ? ROWS_AT_A_TIME * 2 : 1];
};

}  // namespace fastserve
#endif

namespace fastserve {

// Whether products with these pieces round rows, of any number: results must not depend on it.
template <typename T>
static bool round_rows(const Pieces<T>& pieces) {
    return pieces.all([](const auto& piece) { return piece.rounds_rows(); });
}

}  // namespace fastserve
