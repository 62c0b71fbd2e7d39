// Products of weights of few bits with rows that are rounded to 8 bits. 64 neighbours of a row share a scale,
// or 32 where a group of the weight has no more columns. Their products with codes are summed as whole
// numbers, which is exact, and an instruction does four of them in a lane. That takes less time than to widen
// the weights.
#pragma once

#include "int8_tokens.h"
#include "quantized_panels.h"

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

// Neighbours of a row.
template <int BLOCKS>
struct RoundedGroup {
    static constexpr int SIZE = BLOCKS * (int)BLOCK;
    int8_t codes[SIZE];  // zeros past the end of the row
    float scale;
    int32_t sum;   // of the codes
    float scaled;  // their sum, times the scale
};

// The largest of the bits of floats without a sign, as a float.
template <int DISTANCE = W / 2>
static inline float hmax_bits(vu x) {
    vi place;
    for (int i = 0; i < W; ++i) place[i] = i ^ DISTANCE;
    const vu other = __builtin_shuffle(x, place);
    x = x > other ? x : other;
    if constexpr (DISTANCE > 1) return hmax_bits<DISTANCE / 2>(x);
    return ((vf)x)[0];
}

template <int DISTANCE = W / 2>
static inline int32_t hsum(vi x) {
    vi place;
    for (int i = 0; i < W; ++i) place[i] = i ^ DISTANCE;
    x += __builtin_shuffle(x, place);
    if constexpr (DISTANCE > 1) return hsum<DISTANCE / 2>(x);
    return x[0];
}

// The first `count` elements of a group, or all. One that is infinite or NaN makes it NaN.
template <int BLOCKS>
static inline void round_group(const bf16* x, int64_t count, RoundedGroup<BLOCKS>* to) {
    constexpr int PAIRS = RoundedGroup<BLOCKS>::SIZE / PAIR;
    Pair pairs[PAIRS];
    vu largest = {};  // bits of magnitudes, whose order is that of the numbers; a NaN is above all
    for (int p = 0; p < PAIRS; ++p) {
        const int64_t n = std::min<int64_t>(PAIR, count - p * PAIR);
        pairs[p] = n > 0 ? load_pair_n(x + p * PAIR, (int)n) : Pair{};
        const vu a = (vu)magnitude(pairs[p].a), b = (vu)magnitude(pairs[p].b);
        const vu larger = a > b ? a : b;
        largest = largest > larger ? largest : larger;
    }
    const float most = hmax_bits(largest);
    // The reciprocal of a smaller number would be infinite. A NaN is no larger, and its codes are 0.
    constexpr float SMALLEST = 1e-30f;
    const bool is_finite = most <= std::numeric_limits<float>::max();
    const vf steps = splat(is_finite && most > SMALLEST ? MOST_CODE / most : 0.f);
    const vf magic = splat(12582912.f);  // 1.5 * 2^23: no fraction is left, and codes are the last bits
    to->scale = is_finite ? most / MOST_CODE : std::numeric_limits<float>::quiet_NaN();
    vi sums = {};
    for (int p = 0; p < PAIRS; ++p) {
        const Pair of = is_finite ? pairs[p] : Pair{};
        const vu even = (vu)(of.a * steps + magic), odd = (vu)(of.b * steps + magic);
        typedef uint16_t narrow __attribute__((vector_size(W * 2)));
        const narrow codes = __builtin_convertvector((even & 0xffu) | (odd & 0xffu) << 8, narrow);
        std::memcpy(to->codes + p * PAIR, &codes, sizeof codes);
        sums += (vi)(even + odd - 2 * (vu)magic);
    }
    to->sum = hsum(sums);
    to->scaled = to->scale * (float)to->sum;
}

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

// Sums of the products of M rows with the codes of a group of them.
template <int64_t CODES, int M>
struct SumsOfGroup {
    // With few rows, every other product has a sum of its own, as each waits for the one before it.
    static constexpr int CHAINS = 2 * M <= ROUNDED_ROWS ? 2 : 1;
    vi sums[CHAINS][M][2];

    template <typename X>
    __attribute__((always_inline)) SumsOfGroup(int32_t center, const X* x) {
        for (int m = 0; m < M; ++m) {
            sums[0][m][0] = sums[0][m][1] = -center * x[m].sum - vi{};
            for (int chain = 1; chain < CHAINS; ++chain) sums[chain][m][0] = sums[chain][m][1] = vi{};
        }
    }

    // Block i of the group.
    template <typename X>
    __attribute__((always_inline)) inline void add_block(const uint8_t* block, int64_t i, const X* x) {
#pragma GCC unroll 4
        for (int quarter = 0; quarter < 4; ++quarter) {
            auto& of_rows = sums[quarter % CHAINS];
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

    Pair of_row(int m) const {
        vi first = sums[0][m][0], second = sums[0][m][1];
        for (int chain = 1; chain < CHAINS; ++chain) {
            first += sums[chain][m][0];
            second += sums[chain][m][1];
        }
        return {__builtin_convertvector(first, vf), __builtin_convertvector(second, vf)};
    }
};

// A panel of a piece.
struct PieceOfPanel {
    const Piece<bf16>* piece;
    int64_t panel;

    // sums [M], `stride` apart, of a tile of M rows with the groups from `begin` up to `end`, added to those
    // before if there are any.
    template <int M, int BLOCKS>
    void multiply(int64_t begin, int64_t end, const RoundedGroup<BLOCKS>* tile, float* sums,
                  int64_t stride, Ahead ahead) const {
        piece->with_codes([&](auto codes_constant) {
            constexpr int64_t CODES = decltype(codes_constant)::value;
            if constexpr (CODES != kFloat8) {
                if (piece->has_offset())
                    multiply<CODES, M, BLOCKS, true>(begin, end, tile, sums, stride, ahead);
                else
                    multiply<CODES, M, BLOCKS, false>(begin, end, tile, sums, stride, ahead);
            }
        });
    }

   private:
    template <int64_t CODES, int M, int BLOCKS, bool HAS_OFFSET>
    void multiply(int64_t begin, int64_t end, const RoundedGroup<BLOCKS>* tile, float* sums,
                  int64_t stride, Ahead ahead) const {
        const int32_t center = (int32_t)piece->center();
        Pair acc[M];
        for (int m = 0; m < M; ++m) acc[m] = begin > 0 ? load_pair(sums + m * stride) : Pair{};
        piece->template for_blocks<CODES>(
            panel, begin * BLOCKS, std::min(end * BLOCKS, piece->blocks()),
            [&](const uint8_t* codes, Pair scale, Pair offset, int64_t first, int64_t last) {
                const auto add = [&](auto blocks) {
                    const RoundedGroup<BLOCKS>* const x = tile + first / BLOCKS * M;
                    SumsOfGroup<CODES, M> products(center, x);
#pragma GCC unroll 4
                    for (int i = 0; i < blocks; ++i) {
                        const char* const next = ahead.first + (first + i) * ahead.stride;
                        for (int64_t line = 0; line < ahead.stride; line += 64)
                            __builtin_prefetch(next + line, 0, SECOND_LEVEL);
                        products.add_block(codes + i * BYTES_OF_BLOCK<CODES>, i, x);
                    }
#pragma GCC unroll 8
                    for (int m = 0; m < M; ++m) {
                        const Pair sum = products.of_row(m);
                        acc[m].a += sum.a * (scale.a * x[m].scale);
                        acc[m].b += sum.b * (scale.b * x[m].scale);
                        if (HAS_OFFSET) {
                            acc[m].a += offset.a * x[m].scaled;
                            acc[m].b += offset.b * x[m].scaled;
                        }
                    }
                    codes += blocks * BYTES_OF_BLOCK<CODES>;
                    first += blocks;
                };
                while (last - first >= BLOCKS) add(std::integral_constant<int, BLOCKS>());
                if (first < last) add((int)(last - first));  // at the end of a row
            });
        for (int m = 0; m < M; ++m) store_pair(sums + m * stride, acc[m]);
    }
};

// As Product, a step being a group of the rows.
template <int BLOCKS>
struct RoundedProduct {
    static constexpr int ROWS = ROUNDED_ROWS;
    static constexpr int64_t PASS_STEPS = 64 / BLOCKS;
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
                        PieceOfPanel panel, int64_t begin, int64_t end, Ahead ahead) {
        with_rows<ROWS>(height, [&](auto rows) {
            panel.multiply<decltype(rows)::value>(begin, end, tile, sums, stride, ahead);
        });
    }
};

// Panels of Pieces for rounded rows.
class RoundingPanels {
   public:
    static constexpr int FEW_ROWS = 0;
    static constexpr int64_t PASS_STEPS = std::numeric_limits<int64_t>::max();

    explicit RoundingPanels(int64_t) {}

    void use(const void* pieces) { pieces_ = (const Pieces<bf16>*)pieces; }
    PieceOfPanel steps(int64_t panel, int64_t, int64_t) const {
        const auto& place = pieces_->with_panel(panel);
        return {&place.piece, panel - place.first_panel};
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
    const Pieces<bf16>* pieces_ = nullptr;
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
