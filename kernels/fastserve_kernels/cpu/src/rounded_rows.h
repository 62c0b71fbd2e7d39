// Products of weights of few bits with rows that are rounded to 8 bits. Each 64 neighbours of a row share
// a scale. Their products with codes are summed as whole numbers, which is exact, and an instruction does
// four of them in a lane. That takes less time than to widen the weights, if groups of these are as large.
#pragma once

#include "int8_tokens.h"
#include "quantized_panels.h"

#if defined(ROUNDS_ROWS)

namespace fastserve {

constexpr int64_t BLOCKS_OF_GROUP = 2, ROUNDED = BLOCKS_OF_GROUP * BLOCK;
constexpr int64_t GROUPS_OF_SCALE = BLOCKS_OF_SCALE / BLOCKS_OF_GROUP;

// ROUNDED neighbours of a row. It shares its scale with the group beside it.
struct RoundedGroup {
    int8_t codes[ROUNDED];  // zeros past the end of the row
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

// Groups that share a scale, `stride` apart; `count` elements of the row are left. An element that is
// infinite or NaN makes them NaN.
static inline void round_groups(const bf16* x, int64_t count, int64_t groups, int64_t stride,
                                RoundedGroup* to) {
    constexpr int PAIRS = ROUNDED / PAIR;  // of a group
    Pair pairs[GROUPS_OF_SCALE * PAIRS];
    vu largest = {};  // bits of magnitudes, whose order is that of the numbers; a NaN is above all
    for (int p = 0; p < groups * PAIRS; ++p) {
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
    const float scale = is_finite ? most / MOST_CODE : std::numeric_limits<float>::quiet_NaN();
    const vf magic = splat(12582912.f);  // 1.5 * 2^23: no fraction is left, and codes are the last bits
    for (int64_t g = 0; g < groups; ++g, to += stride) {
        to->scale = scale;
        to->sum = 0;
        for (int p = 0; p < PAIRS; ++p) {
            const Pair x = is_finite ? pairs[g * PAIRS + p] : Pair{};
            const vu even = (vu)(x.a * steps + magic), odd = (vu)(x.b * steps + magic);
            typedef uint16_t narrow __attribute__((vector_size(W * 2)));
            const narrow codes =
                __builtin_convertvector((even & 0xffu) | (odd & 0xffu) << 8, narrow);
            std::memcpy(to->codes + p * PAIR, &codes, sizeof codes);
            to->sum += hsum((vi)(even + odd - 2 * (vu)magic));
        }
        to->scaled = scale * (float)to->sum;
    }
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

// sums[m] += the products of row m with BLOCKS blocks, from the first of its group on. Groups are M apart.
template <int64_t CODES, int BLOCKS, int M>
__attribute__((always_inline)) static inline void add_blocks(const uint8_t* codes, int32_t center,
                                                             Pair scale, const RoundedGroup* x,
                                                             Pair* sums) {
    vi products[M][2];
    for (int m = 0; m < M; ++m) {
        const int32_t sum = BLOCKS > BLOCKS_OF_GROUP ? x[m].sum + x[M + m].sum : x[m].sum;
        products[m][0] = products[m][1] = -center * sum - vi{};
    }
#pragma GCC unroll 16
    for (int i = 0; i < BLOCKS * BLOCK / 4; ++i) {
        const uint8_t* const of_block = codes + i / 4 * BYTES_OF_BLOCK<CODES>;
        if (i % 4 == 0) fetch_ahead<CODES>(of_block, M > 4 ? FAR_AHEAD : AHEAD);
        const vu first = codes_of_quarter<CODES>(of_block, i % 4, 0);
        const vu second = codes_of_quarter<CODES>(of_block, i % 4, 1);
#pragma GCC unroll 8
        for (int m = 0; m < M; ++m) {
            int32_t four;
            std::memcpy(&four, x[i * 4 / ROUNDED * M + m].codes + i * 4 % ROUNDED, 4);
            const vi row = four - vi{};
            products[m][0] = add_products(products[m][0], first, row);
            products[m][1] = add_products(products[m][1], second, row);
        }
    }
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
        const float of_row = x[m].scale;
        sums[m].a += __builtin_convertvector(products[m][0], vf) * (scale.a * of_row);
        sums[m].b += __builtin_convertvector(products[m][1], vf) * (scale.b * of_row);
    }
}

// A panel of a piece.
struct PieceOfPanel {
    const Piece<bf16>* piece;
    int64_t panel;

    // sums [M] += the products of a tile of M rows with groups from `begin` up to `end`.
    template <int M>
    void add(int64_t begin, int64_t end, const RoundedGroup* tile, Pair* sums) const {
        piece->with_codes([&](auto codes_constant) {
            constexpr int64_t CODES = decltype(codes_constant)::value;
            if constexpr (CODES != kFloat8) {
                add_codes<CODES, M>(begin, end, tile, sums);
                if (piece->has_offset()) add_offsets<CODES, M>(begin, end, tile, sums);
            }
        });
    }

   private:
    // What a group of the weight and one of the rows have in common.
    struct Common {
        const uint8_t* codes;
        Pair scale, offset;
        const RoundedGroup* x;  // of M rows; a scale's groups, or one
        int64_t blocks;         // those of a scale or of a group, or the last one of a row
    };

    template <int64_t CODES, int M, typename F>
    __attribute__((always_inline)) inline void for_common(int64_t begin, int64_t end,
                                                          const RoundedGroup* tile,
                                                          const F& f) const {
        piece->template for_blocks<CODES>(
            panel, begin * BLOCKS_OF_GROUP, std::min(end * BLOCKS_OF_GROUP, piece->blocks()),
            [&](const uint8_t* codes, Pair scale, Pair offset, int64_t first, int64_t last) {
                for (int64_t blocks; first < last; first += blocks) {
                    blocks = BLOCKS_OF_SCALE;
                    while (first % blocks || last - first < blocks) blocks /= 2;
                    f(Common{codes, scale, offset, tile + first / BLOCKS_OF_GROUP * M, blocks});
                    codes += blocks * BYTES_OF_BLOCK<CODES>;
                }
            });
    }

    template <int64_t CODES, int M>
    void add_codes(int64_t begin, int64_t end, const RoundedGroup* tile, Pair* sums) const {
        const int32_t center = (int32_t)piece->center();
        Pair acc[M];  // in registers, as no one else has its address
        for (int m = 0; m < M; ++m) acc[m] = sums[m];
        for_common<CODES, M>(begin, end, tile, [&](const Common& of) {
            if (of.blocks == BLOCKS_OF_SCALE)
                add_blocks<CODES, BLOCKS_OF_SCALE, M>(of.codes, center, of.scale, of.x, acc);
            else if (of.blocks == BLOCKS_OF_GROUP)
                add_blocks<CODES, BLOCKS_OF_GROUP, M>(of.codes, center, of.scale, of.x, acc);
            else
                add_blocks<CODES, 1, M>(of.codes, center, of.scale, of.x, acc);
        });
        for (int m = 0; m < M; ++m) sums[m] = acc[m];
    }

    // After the codes: both together need more registers than there are.
    template <int64_t CODES, int M>
    void add_offsets(int64_t begin, int64_t end, const RoundedGroup* tile, Pair* sums) const {
        Pair acc[M];
        for (int m = 0; m < M; ++m) acc[m] = sums[m];
        for_common<CODES, M>(begin, end, tile, [&](const Common& of) {
            for (int m = 0; m < M; ++m) {
                float sum = of.x[m].scaled;
                if (of.blocks > BLOCKS_OF_GROUP) sum += of.x[M + m].scaled;
                acc[m].a += of.offset.a * sum;
                acc[m].b += of.offset.b * sum;
            }
        });
        for (int m = 0; m < M; ++m) sums[m] = acc[m];
    }
};

// As Product, a step being a group of the rows.
struct RoundedProduct {
#if defined(__AVX512F__)
    static constexpr int ROWS = 6;
#else
    static constexpr int ROWS = 2;
#endif
    static constexpr int64_t PASS_STEPS = 16 * GROUPS_OF_SCALE;
    using X = RoundedGroup;

    struct Unit {};

    static int64_t steps(int64_t in) { return (in + ROUNDED - 1) / ROUNDED; }
    static int64_t first_row(int64_t tile, int64_t tiles, int64_t rows) {
        return tile * rows / tiles;
    }

    // [steps][height].
    template <typename F>
    static void pack(const F& row_of, int64_t height, int64_t in, X* tile) {
        for (int64_t m = 0; m < height; ++m) {
            const bf16* const row = row_of(m);
            for (int64_t k = 0; k < steps(in); k += GROUPS_OF_SCALE)
                round_groups(row + k * ROUNDED, in - k * ROUNDED,
                             std::min(GROUPS_OF_SCALE, steps(in) - k), height,
                             tile + k * height + m);
        }
    }

    static void of_tile(float* sums, int64_t stride, const X* tile, int64_t height,
                        PieceOfPanel panel, int64_t begin, int64_t end, Ahead) {
        with_rows<ROWS>(height, [&](auto constant) {
            constexpr int M = decltype(constant)::value;
            Pair acc[M];
            for (int m = 0; m < M; ++m) acc[m] = begin > 0 ? load_pair(sums + m * stride) : Pair{};
            panel.template add<M>(begin, end, tile, acc);
            for (int m = 0; m < M; ++m) store_pair(sums + m * stride, acc[m]);
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
    // The product fetches ahead.
    Ahead next(int64_t, int64_t, int64_t) const { return {}; }
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
