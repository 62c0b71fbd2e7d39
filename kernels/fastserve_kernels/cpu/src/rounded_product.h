// Products of weights of few bits with rounded rows. Products of codes are summed as whole numbers, which is
// exact, and an instruction does four of them in a lane. That takes less time than to widen the weights.
#pragma once

#include "quantized_panels.h"
#include "rounded_rows.h"

#if defined(ROUNDS_ROWS)

namespace fastserve {

// Rows of a tile at most: their sums, as whole numbers and as floats, take 24 of 32 registers, or 8 of 16.
#if defined(__AVX512F__)
constexpr int ROUNDED_ROWS = 6;
#else
constexpr int ROUNDED_ROWS = 2;
#endif
// Where the next panel is fetched to. The first level holds the rows and this panel.
constexpr int SECOND_LEVEL = 2;
// Blocks of a panel that several tiles are multiplied with before its next ones. Their codes, a byte each, and
// numbers take three quarters of the first-level cache.
constexpr int64_t PREPARED_BLOCKS = 36;

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

// The sums of a tile of M rows with a panel, group by group of the rows.
template <int M, int BLOCKS>
struct SumsOfTile {
    using X = RoundedGroup<BLOCKS>;
    // With few rows, every other product has a sum of its own, as each waits for the one before it.
    static constexpr int CHAINS = 2 * M <= ROUNDED_ROWS ? 2 : 1;
    Pair sums[M];

    // Adds the products with `blocks` blocks of CODES, whose numbers are these. x: the group of each row.
    template <int64_t CODES, bool HAS_OFFSET, typename Blocks>
    __attribute__((always_inline)) inline void add(const uint8_t* codes, Blocks blocks,
                                                   int32_t center, Pair scale, Pair offset,
                                                   const X* x, const char* ahead,
                                                   int64_t ahead_stride) {
        vi products[CHAINS][M][2];
        for (int m = 0; m < M; ++m) {
            products[0][m][0] = products[0][m][1] = -center * x[m].sum - vi{};
            for (int chain = 1; chain < CHAINS; ++chain)
                products[chain][m][0] = products[chain][m][1] = vi{};
        }
#pragma GCC unroll 4
        for (int i = 0; i < blocks; ++i) {
            for (int64_t line = 0; line < ahead_stride; line += 64)
                __builtin_prefetch(ahead + i * ahead_stride + line, 0, SECOND_LEVEL);
#pragma GCC unroll 4
            for (int quarter = 0; quarter < 4; ++quarter) {
                auto& of_rows = products[quarter % CHAINS];
                const uint8_t* const block = codes + i * BYTES_OF_BLOCK<CODES>;
                const vu first = codes_of_quarter<CODES>(block, quarter, 0);
                const vu second = codes_of_quarter<CODES>(block, quarter, 1);
#pragma GCC unroll 8
                for (int m = 0; m < M; ++m) {
                    int32_t four;
                    std::memcpy(&four, x[m].codes + i * BLOCK + quarter * 4, 4);
                    const vi row = four - vi{};
                    of_rows[m][0] = add_products(of_rows[m][0], first, row);
                    of_rows[m][1] = add_products(of_rows[m][1], second, row);
                }
            }
        }
#pragma GCC unroll 8
        for (int m = 0; m < M; ++m) {
            vi first = products[0][m][0], second = products[0][m][1];
            for (int chain = 1; chain < CHAINS; ++chain) {
                first += products[chain][m][0];
                second += products[chain][m][1];
            }
            sums[m].a += __builtin_convertvector(first, vf) * (scale.a * x[m].scale);
            sums[m].b += __builtin_convertvector(second, vf) * (scale.b * x[m].scale);
            if (HAS_OFFSET) {
                sums[m].a += offset.a * x[m].scaled;
                sums[m].b += offset.b * x[m].scaled;
            }
        }
    }
};

// Blocks of a panel with their numbers, for a group of the rows.
template <int BLOCKS>
struct PreparedStep {
    const uint8_t* codes;  // bytes, [BLOCKS] blocks of k8Bits
    Pair scale, offset;
};

// Steps of a panel.
template <int BLOCKS>
struct PreparedPanel {
    const PreparedStep<BLOCKS>* steps;
    int32_t center;
    bool has_offset;
};

// As Product, a step being a group of the rows.
template <int BLOCKS>
struct RoundedProduct {
    static constexpr int ROWS = ROUNDED_ROWS;
    static constexpr int64_t PASS_STEPS = PREPARED_BLOCKS / BLOCKS;
    using X = RoundedGroup<BLOCKS>;

    struct Unit {};

    static int64_t steps(int64_t in) { return (in + X::SIZE - 1) / X::SIZE; }
    static int64_t first_row(int64_t tile, int64_t tiles, int64_t rows) {
        return tile * rows / tiles;
    }

    // [steps][height].
    template <typename F>
    static void pack(const F& row_of, int64_t height, int64_t in, X* tile) {
        for (int64_t m = 0; m < height; ++m) {
            const bf16* const row = row_of(m);
            for (int64_t k = 0; k < steps(in); ++k)
                round_group(row + k * X::SIZE, in - k * X::SIZE, tile + k * height + m);
        }
    }

    static void of_tile(float* sums, int64_t stride, const X* tile, int64_t height,
                        const PreparedPanel<BLOCKS>& panel, int64_t begin, int64_t end, Ahead ahead) {
        with_rows<ROWS>(height, [&](auto rows) {
            if (panel.has_offset) run<rows, true>(sums, stride, tile, panel, begin, end, ahead);
            else run<rows, false>(sums, stride, tile, panel, begin, end, ahead);
        });
    }

   private:
    template <int M, bool HAS_OFFSET>
    static void run(float* sums, int64_t stride, const X* tile, const PreparedPanel<BLOCKS>& panel,
                    int64_t begin, int64_t end, Ahead ahead) {
        SumsOfTile<M, BLOCKS> of;
        for (int m = 0; m < M; ++m) of.sums[m] = begin > 0 ? load_pair(sums + m * stride) : Pair{};
        for (int64_t k = begin; k < end; ++k) {
            const PreparedStep<BLOCKS>& step = panel.steps[k - begin];
            of.template add<k8Bits, HAS_OFFSET>(
                step.codes, std::integral_constant<int, BLOCKS>(), panel.center, step.scale,
                step.offset, tile + k * M, ahead.first + k * BLOCKS * ahead.stride, ahead.stride);
        }
        for (int m = 0; m < M; ++m) store_pair(sums + m * stride, of.sums[m]);
    }
};

// Panels of Pieces for rounded rows. Each thread has its own.
template <int BLOCKS>
class RoundingPanels {
   public:
    using X = RoundedGroup<BLOCKS>;
    static constexpr int FEW_ROWS = ROUNDED_ROWS;
    static constexpr int64_t FEW_TILES = 8;  // more gain from prepared steps
    static constexpr int64_t PASS_STEPS = RoundedProduct<BLOCKS>::PASS_STEPS;

    explicit RoundingPanels(int64_t) {}

    void use(const void* pieces) { pieces_ = (const Pieces<bf16>*)pieces; }

    // Steps of a panel from `begin` up to `end`, at most PASS_STEPS; good until the next call. Several tiles
    // are multiplied with them, which need not take codes from their bits each time.
    PreparedPanel<BLOCKS> steps(int64_t panel, int64_t begin, int64_t end) {
        const auto& [piece, first_panel, first_column] = pieces_->with_panel(panel);
        piece.with_codes([&, &piece = piece, local = panel - first_panel](auto codes_constant) {
            constexpr int64_t CODES = decltype(codes_constant)::value;
            if constexpr (CODES != kFloat8) prepare<CODES>(piece, local, begin, end);
        });
        return {steps_, (int32_t)piece.center(), piece.has_offset()};
    }

    // Sums of a tile with a panel.
    bool multiply(int64_t panel, const X* tile, int64_t height, float* sums, Ahead ahead) const {
        const auto& [piece, first_panel, first_column] = pieces_->with_panel(panel);
        piece.with_codes([&, &piece = piece, local = panel - first_panel](auto codes_constant) {
            constexpr int64_t CODES = decltype(codes_constant)::value;
            if constexpr (CODES != kFloat8)
                with_rows<FEW_ROWS>(height, [&](auto rows) {
                    if (piece.has_offset()) run<CODES, rows, true>(piece, local, tile, sums, ahead);
                    else run<CODES, rows, false>(piece, local, tile, sums, ahead);
                });
        });
        return true;
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
    template <int64_t CODES>
    void prepare(const Piece<bf16>& piece, int64_t panel, int64_t begin, int64_t end) {
        PreparedStep<BLOCKS>* step = steps_;
        uint8_t* to = codes_;
        piece.template for_blocks<CODES>(
            panel, begin * BLOCKS, std::min(end * BLOCKS, piece.blocks()),
            [&](const uint8_t* codes, Pair scale, Pair offset, int64_t first, int64_t last) {
                for (; first < last; first += BLOCKS, ++step) {
                    const int blocks = (int)std::min<int64_t>(BLOCKS, last - first);
                    *step = {to, scale, offset};
                    if (CODES == k8Bits && blocks == BLOCKS) {
                        step->codes = codes;  // they are bytes
                        codes += BLOCKS * BYTES_OF_BLOCK<CODES>;
                        continue;
                    }
                    // Past the end of a row there may be any codes, since the rounded row is 0 there.
                    for (int i = 0; i < blocks; ++i, codes += BYTES_OF_BLOCK<CODES>)
#pragma GCC unroll 8
                        for (int n = 0; n < 8; ++n)
                            *(vu*)(to + i * BYTES_OF_BLOCK<k8Bits> + n * PLANE) =
                                codes_of_quarter<CODES>(codes, n / 2, n % 2);
                    to += BLOCKS * BYTES_OF_BLOCK<k8Bits>;
                }
            });
    }

    template <int64_t CODES, int M, bool HAS_OFFSET>
    static void run(const Piece<bf16>& piece, int64_t panel, const X* tile, float* sums, Ahead ahead) {
        const int32_t center = (int32_t)piece.center();
        SumsOfTile<M, BLOCKS> of{};
        piece.template for_blocks<CODES>(
            panel, 0, piece.blocks(),
            [&](const uint8_t* codes, Pair scale, Pair offset, int64_t first, int64_t last) {
                const auto add = [&](auto blocks) {
                    of.template add<CODES, HAS_OFFSET>(codes, blocks, center, scale, offset,
                                                       tile + first / BLOCKS * M,
                                                       ahead.first + first * ahead.stride,
                                                       ahead.stride);
                    codes += blocks * BYTES_OF_BLOCK<CODES>;
                    first += blocks;
                };
                while (last - first >= BLOCKS) add(std::integral_constant<int, BLOCKS>());
                if (first < last) add((int)(last - first));  // at the end of a row
            });
        for (int m = 0; m < M; ++m) store_pair(sums + m * PAIR, of.sums[m]);
    }

    const Pieces<bf16>* pieces_ = nullptr;
    PreparedStep<BLOCKS> steps_[PASS_STEPS];
    alignas(64) uint8_t codes_[PREPARED_BLOCKS * BYTES_OF_BLOCK<k8Bits>];
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
