// Panels of weights of few bits, in several formats: codes, and numbers that groups of them share.
// They are widened to the panel's type a few steps at a time, into the first-level cache, or, for few
// rows, into registers. An element is scale * (code - center) + offset, computed in fp32, in which the
// product is rounded too, and then rounded to the panel's type.
//
// A panel is a run of superblocks, each of which has the numbers of its groups and then their codes:
//
//   [scale steps][offset steps][scales of each group][offsets of each group][codes of each group]
//
// There are PAIR numbers of a group, one for each column. Where numbers are bytes, a step multiplies
// those of all groups of a superblock; otherwise a superblock is one group. Codes are in blocks of
// BLOCK neighbours of each column.
#pragma once

#include <type_traits>
#include <vector>

#include "products.h"
#include "rounded_rows.h"
#include "team.h"

// AMX multiplies tiles of widened weights.
#if (defined(__AVX512VNNI__) || (defined(__AVXVNNI__) && !defined(__AVX512F__))) && !defined(USES_AMX)
#define ROUNDS_ROWS
#endif

namespace fastserve {

constexpr int VECTORS = 32;         // of W elements: a widened block
constexpr int64_t PLANE = W * 4;    // bytes: one vector
constexpr int64_t AHEAD = 4096;     // bytes: so far ahead memory is fetched, what a core reads while it waits

// How numbers are stored. The Python side passes these.
enum Numbers : int64_t { kNoNumbers = 0, kHalf = 1, kBrainHalf = 2, kSingle = 3, kByte = 4 };

// Kinds of codes, by what the Python side passes for them.
enum Codes : int64_t { kPlain = 0, k4Bits = 4, k5Bits = 5, k6Bits = 6, k8Bits = 8, kFloat8 = 9 };

// A weight [out, in] as the Python side describes it.
struct StoredPiece {
    const uint8_t* panels;
    int64_t out;
    int64_t codes;  // kPlain: panels of the product's own type; the rest does not matter
    int64_t center;
    int64_t group;           // columns of the weight
    int64_t groups_of_step;  // 1 without steps
    int64_t scale, scale_step, offset, offset_step;  // Numbers
};

static inline vu words(const uint8_t* from) {
#if defined(__AVX512F__)
    return (vu)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)from));
#elif defined(__AVX2__)
    return (vu)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)from));
#else
    uint16_t halves[W];
    std::memcpy(halves, from, sizeof halves);
    vu words;
    for (int i = 0; i < W; ++i) words[i] = halves[i];
    return words;
#endif
}

static inline vf from_halves(const uint8_t* from) {
#if defined(__AVX512F__)
    return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)from));
#elif defined(__F16C__)
    return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)from));
#else
    const vu bits = words(from);
    const vu magnitude = (bits & 0x7fffu) << 13;
    const vu finite = (vu)((vf)magnitude * 0x1p112f), other = magnitude | 0x7f800000u;
    return (vf)((magnitude < (0x7c00u << 13) ? finite : other) | (bits & 0x8000u) << 16);
#endif
}

static inline int64_t bytes_of(int64_t numbers) {
    constexpr int64_t SIZES[] = {0, 2, 2, 4, 1};
    return SIZES[numbers];
}

__attribute__((always_inline)) static inline Pair read_numbers(int64_t kind, const uint8_t* from) {
    switch (kind) {
        case kHalf: return {from_halves(from), from_halves(from + 2 * W)};
        case kBrainHalf: return {(vf)(words(from) << 16), (vf)(words(from + 2 * W) << 16)};
        case kSingle: return load_pair((const float*)from);
        default: return load_pair((const int8_t*)from);
    }
}

// Rounds a product, which would otherwise be fused with the addition that follows.
static inline vf rounded(vf x) {
#if defined(__AVX__)
    asm("" : "+v"(x));
#else
    asm("" : "+m"(x));
#endif
    return x;
}

template <int64_t CODES>
constexpr int64_t BYTES_OF_BLOCK = PLANE * (CODES >= k8Bits ? 8 : CODES);

// A block has planes of one vector, whose lanes are words of 32 bits. Of codes below 8 bits, the planes of
// the first 4 bits come first. A layout says which vectors of a step a block's codes become, in which order,
// and where each one's bits are.
struct Bits {
    int plane, shift;
};
struct Lane {
    int vector, lane;
};

// Where a column is in a Pair of T.
template <typename T>
static Lane lane_of(int column) {
    return sizeof(T) == sizeof(float) ? Lane{column / W, column % W} : Lane{column % 2, column / 2};
}

// A lane for each column. The bytes of its word belong to four neighbours, so that a plane, shifted and
// masked, has the codes of four. Each neighbour has two vectors.
template <typename T>
struct ByColumn {
    static constexpr int OF_STEP = 2 * Dot<T>::DEPTH;  // vectors
    static constexpr int NEIGHBOURS = 4;  // whose bits have the same places in the bytes of a word

    static Lane place(int column, int k) {
        const auto [vector, lane] = lane_of<T>(column);
        return {k * 2 + vector, lane};
    }
    template <int64_t CODES>
    static constexpr Bits low_bits(int n) {
        const int k = n / 2, vector = n % 2;
        if (CODES >= k8Bits) return {k / 4 * 2 + vector, k % 4 * 8};
        return {k / 8 * 2 + vector, k % 4 * 8 + k / 4 % 2 * 4};
    }
    template <int64_t CODES>
    static constexpr Bits high_bits(int n) {
        const int k = n / 2, vector = n % 2;
        if (CODES == k5Bits) return {4, k % 4 * 8 + vector * 4 + k / 4};
        return {4 + vector, k % 4 * 8 + k / 4 * 2};
    }
    // A number of each column, for the vectors of a step.
    static void spread(Pair numbers, vf* lanes) {
        for (int i = 0; i < OF_STEP; ++i) lanes[i] = i % 2 ? numbers.b : numbers.a;
    }
    static inline void store(T* step, const vf* lanes) { store_pair(step, {lanes[0], lanes[1]}); }
    static inline typename Dot<T>::Weights weights(const vf* lanes) {
        T step[STEP_SIZE<T>];
        store(step, lanes);
        return Dot<T>::load(step);
    }
};

#if defined(__AVX512BF16__)
template <>
inline void ByColumn<bf16>::store(bf16* step, const vf* lanes) {
    typedef uint16_t halves __attribute__((vector_size(64)));
    halves order;
    for (int i = 0; i < PAIR; ++i) order[i] = i / 2 + i % 2 * W;
    for (int i = 0; i < 2; ++i) {
        const halves both = (halves)_mm512_cvtne2ps_pbh((__m512)lanes[2 + i], (__m512)lanes[i]);
        _mm512_storeu_si512(step + i * PAIR, (__m512i)__builtin_shuffle(both, order));
    }
}

// In the order of a panel of bfloat16, in which two neighbours of a column are side by side. This is the
// fastest to widen. Bits are in the order of the vectors.
struct SideBySide {
    static constexpr int OF_STEP = 2 * Dot<bf16>::DEPTH;
    static constexpr int NEIGHBOURS = 1;

    static Lane place(int column, int k) {
        const int element = Dot<bf16>::place(column) + k % 2;
        return {k / 2 * OF_STEP + element / W, element % W};
    }
    template <int64_t CODES>
    static constexpr Bits low_bits(int n) {
        if (CODES >= k8Bits) return {n / 4, n % 4 * 8};
        return {n / 8, n % 8 * 4};
    }
    template <int64_t CODES>
    static constexpr Bits high_bits(int n) {
        if (CODES == k5Bits) return {4, n};
        return {4 + n / 16, n % 16 * 2};
    }
    static void spread(Pair numbers, vf* lanes) {
        vi first, second;
        for (int i = 0; i < W; ++i) {
            first[i] = i / 2;
            second[i] = W / 2 + i / 2;
        }
        lanes[0] = __builtin_shuffle(numbers.a, first);
        lanes[1] = __builtin_shuffle(numbers.a, second);
        lanes[2] = __builtin_shuffle(numbers.b, first);
        lanes[3] = __builtin_shuffle(numbers.b, second);
    }
    static inline void store(bf16* step, const vf* lanes) {
        const auto [first, second] = weights(lanes);
        _mm512_storeu_si512(step, (__m512i)first);
        _mm512_storeu_si512(step + PAIR, (__m512i)second);
    }
    static inline Dot<bf16>::Weights weights(const vf* lanes) {
        return {_mm512_cvtne2ps_pbh((__m512)lanes[1], (__m512)lanes[0]),
                _mm512_cvtne2ps_pbh((__m512)lanes[3], (__m512)lanes[2])};
    }
};
#endif

// A word's bits from `from` on, moved to `to`.
static inline vu moved(vu word, int from, int to) {
    return from < to ? word << (to - from) : word >> (from - to);
}

// Values of the codes of a block, vector by vector, less the center. `n` is a constant to the compiler.
// Bits past a whole number's become the last of its mantissa, if its exponent is that of 2^23.
template <int64_t CODES, typename Layout>
class Widener {
   public:
    explicit Widener(float center) : center_(splat(8388608.f + center)) {
        for (int i = 0; i < W; ++i) {
            first_[i] = (float)i;
            second_[i] = (float)(W + i);
        }
        first_ -= center;
        second_ -= center;
    }

    inline vf operator()(const uint8_t* block, int n) const {
        const Bits low = Layout::template low_bits<CODES>(n);
        const vu word = load(block + low.plane * PLANE) >> low.shift;
        if constexpr (CODES == kFloat8) {
            const vf magnitude = (vf)((word & 0x7fu) << 20) * 0x1p120f;
            return (vf)((vu)magnitude | (word & 0x80u) << 24);
        } else if constexpr (CODES == k8Bits) {
            return whole(word & 0xffu);
        } else if constexpr (CODES == k4Bits) {
            return looked_up(word);
        } else {
            const Bits high = Layout::template high_bits<CODES>(n);
            const vu plane = load(block + high.plane * PLANE);
            const vu code = (word & 0xfu) | (moved(plane, high.shift, 4) & ~0xfu);
            if constexpr (CODES == k5Bits) return looked_up(code);
            return whole(code & 0x3fu);
        }
    }

   private:
    static vu load(const uint8_t* plane) { return *(const vu_mem*)plane; }
    vf whole(vu code) const { return (vf)(code | 0x4b000000u) - center_; }
    // By the 4 or 5 last bits.
    vf looked_up(vu code) const {
#if defined(__AVX512F__)
        if constexpr (CODES == k4Bits)
            return (vf)_mm512_permutexvar_ps((__m512i)code, (__m512)first_);
        return (vf)_mm512_permutex2var_ps((__m512)first_, (__m512i)code, (__m512)second_);
#else
        return whole(code & (CODES == k4Bits ? 0xfu : 0x1fu));
#endif
    }

    vf center_, first_, second_;
};

template <int64_t CODES>
static inline void fetch_ahead(const uint8_t* block, int64_t distance) {
    for (int64_t line = 0; line < BYTES_OF_BLOCK<CODES>; line += 64)
        __builtin_prefetch(block + distance + line);
}

template <typename T>
struct FastestToWiden {
    using Layout = ByColumn<T>;
};
#if defined(__AVX512BF16__)
template <>
struct FastestToWiden<bf16> {
    using Layout = SideBySide;
};
#endif

// A weight [out, in] and its panels.
template <typename T>
class Piece {
    using Widened = typename FastestToWiden<T>::Layout;

   public:
    Piece(const StoredPiece& stored, int64_t in) : stored_(stored), center_((float)stored.center) {
        const int64_t steps = steps_of<T>(in);
        if (stored.codes == kPlain) {
            panel_bytes_ = steps * STEP_SIZE<T> * (int64_t)sizeof(T);
            return;
        }
        blocks_ = (steps * Dot<T>::DEPTH + BLOCK - 1) / BLOCK;
        block_bytes_ = PLANE * (stored.codes >= k8Bits ? 8 : stored.codes);
        group_blocks_ = stored.group == in ? std::max<int64_t>(1, blocks_) : stored.group / BLOCK;
        scale_bytes_ = PAIR * bytes_of(stored.scale);
        offset_bytes_ = PAIR * bytes_of(stored.offset);
        scale_step_bytes_ = PAIR * bytes_of(stored.scale_step);
        steps_bytes_ = scale_step_bytes_ + PAIR * bytes_of(stored.offset_step);
        offsets_at_ = steps_bytes_ + scale_bytes_ * stored.groups_of_step;
        head_bytes_ = offsets_at_ + offset_bytes_ * stored.groups_of_step;
        const int64_t blocks_of_superblock = stored.groups_of_step * group_blocks_;
        superblock_bytes_ = head_bytes_ + blocks_of_superblock * block_bytes_;
        panel_bytes_ =
            (blocks_ + blocks_of_superblock - 1) / blocks_of_superblock * superblock_bytes_;
    }

    int64_t out() const { return stored_.out; }
    int64_t panels() const { return (stored_.out + PAIR - 1) / PAIR; }
    int64_t panel_bytes() const { return panel_bytes_; }
    const uint8_t* panel(int64_t number) const { return stored_.panels + number * panel_bytes_; }

    // codes [out, in], rows contiguous; numbers [out, groups] and steps [out, superblocks], contiguous.
    struct Source {
        const uint8_t* codes;
        int64_t stride;
        const uint8_t *scale, *scale_step, *offset, *offset_step;
    };

    void pack(const Source& source, int64_t in, uint8_t* panels) const {
        const int64_t count = this->panels();
#pragma omp parallel for
        for (int64_t p = 0; p < count; ++p) {
            uint8_t* const panel = panels + p * panel_bytes_;
            std::memset(panel, 0, panel_bytes_);
            for (int64_t n = 0; n < std::min<int64_t>(PAIR, stored_.out - p * PAIR); ++n)
                with_layout([&](auto layout) {
                    with_codes([&](auto codes) {
                        pack_column<codes, decltype(layout)>(source, p * PAIR + n, in, panel, n);
                    });
                });
        }
    }

    // Steps from `begin` up to `end` of a panel, which begin a block; whole blocks are written.
    void widen(int64_t panel, int64_t begin, int64_t end, T* to) const {
        with_layout([&](auto layout) {
            using Layout = decltype(layout);
            with_codes([&](auto codes) {
                const auto store = [&](const vf* lanes) {
                    Layout::store(to, lanes);
                    to += STEP_SIZE<T>;
                };
                if (!stored_.offset) for_steps<codes, Layout, kNoSum>(panel, begin, end, store);
                else if (has_exact_products())
                    for_steps<codes, Layout, kFusedSum>(panel, begin, end, store);
                else for_steps<codes, Layout, kRoundedSum>(panel, begin, end, store);
            });
        });
    }

    // Whether `multiply` may be called for so many steps.
    bool multiplies(int64_t steps) const {
        return stored_.codes != kPlain && !rounds_rows() && steps * Dot<T>::DEPTH % BLOCK == 0 &&
               (!stored_.offset || has_exact_products());
    }

    // sums [M] of the rows of a packed tile with all steps of a panel. Elements stay in registers, and
    // the processor widens those of a step while it adds those of the last one.
    template <int M>
    void multiply(int64_t panel, int64_t steps, const typename Dot<T>::X* tile, float* sums) const {
        with_codes([&](auto codes) {
            Pair acc[M] = {};
            const auto* x = tile;
            const auto add = [&](const vf* lanes) {
                const auto weights = Widened::weights(lanes);
                for (int m = 0; m < M; ++m) Dot<T>::add(acc[m], weights, x[m]);
                x += M;
            };
            if (stored_.offset) for_steps<codes, Widened, kFusedSum>(panel, 0, steps, add);
            else for_steps<codes, Widened, kNoSum>(panel, 0, steps, add);
            for (int m = 0; m < M; ++m) store_pair(sums + m * PAIR, acc[m]);
        });
    }

    bool is_plain() const { return stored_.codes == kPlain; }
    // Whether groups are multiples of so many blocks, or the whole row.
    bool has_groups_of(int blocks) const {
        return group_blocks_ % blocks == 0 || group_blocks_ == blocks_;
    }

    // Whether its products may be with rounded rows. A row in bfloat16 has been rounded to 8 bits already.
    // In groups of 16 columns there are few products for each sum that has to be scaled.
    bool rounds_rows() const {
#if defined(ROUNDS_ROWS)
        return sizeof(T) < sizeof(float) && stored_.codes != kPlain && stored_.codes != kFloat8 &&
               has_groups_of(FEW_BLOCKS);
#else
        return false;
#endif
    }

    float center() const { return center_; }
    bool has_offset() const { return stored_.offset != kNoNumbers; }
    int64_t blocks() const { return blocks_; }

    // f(the kind of codes, a constant).
    template <typename F>
    void with_codes(const F& f) const {
        switch (stored_.codes) {
            case k4Bits: return f(std::integral_constant<int64_t, k4Bits>());
            case k5Bits: return f(std::integral_constant<int64_t, k5Bits>());
            case k6Bits: return f(std::integral_constant<int64_t, k6Bits>());
            case k8Bits: return f(std::integral_constant<int64_t, k8Bits>());
            default: return f(std::integral_constant<int64_t, kFloat8>());
        }
    }

    // f(codes, scale, offset, first, last) of the blocks from `begin` up to `end`, group by group: of the
    // blocks from `first` up to `last`, whose codes are one after the other.
    template <int64_t CODES, typename F>
    __attribute__((always_inline)) inline void for_blocks(int64_t number, int64_t begin, int64_t end,
                                                          const F& f) const {
        const uint32_t group = begin / (uint32_t)group_blocks_;
        int64_t group_end = (group + 1) * group_blocks_;
        int64_t i = group % (uint32_t)stored_.groups_of_step;
        const uint8_t* head =
            panel(number) + group / (uint32_t)stored_.groups_of_step * superblock_bytes_;
        const uint8_t* codes = head + head_bytes_ + i * group_blocks_ * BYTES_OF_BLOCK<CODES> +
                               (begin - group * group_blocks_) * BYTES_OF_BLOCK<CODES>;
        while (begin < end) {
            const Pair scale = read_numbers(stored_.scale, head + steps_bytes_ + i * scale_bytes_,
                                            stored_.scale_step, head);
            Pair offset = {};
            if (stored_.offset)
                offset = read_numbers(stored_.offset, head + offsets_at_ + i * offset_bytes_,
                                      stored_.offset_step, head + scale_step_bytes_);
            f(codes, scale, offset, begin, std::min(group_end, end));
            const int64_t blocks = std::min(group_end, end) - begin;
            codes += blocks * BYTES_OF_BLOCK<CODES>;
            begin = group_end;
            group_end += group_blocks_;
            if (++i == stored_.groups_of_step) {
                i = 0;
                head = codes;
                codes += head_bytes_;
            }
        }
    }

   private:
    template <typename F>
    void with_layout(const F& f) const {
        if constexpr (!std::is_same_v<Widened, ByColumn<T>>)
            if (!rounds_rows()) return f(Widened());
        f(ByColumn<T>());
    }

    // Into a panel of zeros.
    template <int64_t CODES, typename Layout>
    void pack_column(const Source& source, int64_t row, int64_t in, uint8_t* panel, int64_t n) const {
        const auto copy = [&](int64_t kind, const uint8_t* from, int64_t number, uint8_t* to) {
            const int64_t size = bytes_of(kind);
            const auto [vector, lane] = lane_of<T>((int)n);
            if (size) std::memcpy(to + (vector * W + lane) * size, from + number * size, size);
        };
        const int64_t of_step = stored_.groups_of_step, groups = in / stored_.group;
        const uint8_t* const codes = source.codes + row * source.stride;
        for (int64_t g = 0; g < groups; ++g) {
            const int64_t i = g % of_step, number = row * groups + g;
            uint8_t* const head = panel + g / of_step * superblock_bytes_;
            if (i == 0) {
                const int64_t step = row * (groups / of_step) + g / of_step;
                copy(stored_.scale_step, source.scale_step, step, head);
                copy(stored_.offset_step, source.offset_step, step, head + scale_step_bytes_);
            }
            copy(stored_.scale, source.scale, number, head + steps_bytes_ + i * scale_bytes_);
            copy(stored_.offset, source.offset, number, head + offsets_at_ + i * offset_bytes_);
            uint8_t* block = head + head_bytes_ + i * group_blocks_ * block_bytes_;
            const int64_t end = (g + 1) * stored_.group;
            constexpr int64_t COUNT = Layout::NEIGHBOURS;
            for (int64_t k = g * stored_.group; k < end; k += BLOCK, block += block_bytes_)
#pragma GCC unroll 16
                for (int64_t j = 0; j < BLOCK; j += COUNT)
                    if (k + j < end)
                        pack_codes<CODES, Layout>(block, (int)n, (int)j, codes + k + j,
                                                  std::min(COUNT, end - k - j));
        }
    }

    // The codes of a column's elements from the k-th on, into a block of zeros: `count` of them, at most
    // Layout::NEIGHBOURS, of which k is a multiple.
    template <int64_t CODES, typename Layout>
    __attribute__((always_inline)) static inline void pack_codes(uint8_t* block, int column, int k,
                                                                 const uint8_t* from,
                                                                 int64_t count) {
        const auto [vector, lane] = Layout::place(column, k);
        uint32_t codes = 0;
        if (count == Layout::NEIGHBOURS) std::memcpy(&codes, from, Layout::NEIGHBOURS);
        else std::memcpy(&codes, from, count);
        const auto add = [&, lane = lane](Bits place, uint32_t bits) {
            uint8_t* const at = block + place.plane * PLANE + lane * 4;
            uint32_t word;
            std::memcpy(&word, at, 4);
            word |= bits << place.shift;
            std::memcpy(at, &word, 4);
        };
        constexpr uint32_t HALF = 0x0f0f0f0fu;  // of each byte
        add(Layout::template low_bits<CODES>(vector), CODES >= k8Bits ? codes : codes & HALF);
        if constexpr (CODES == k5Bits || CODES == k6Bits)
            add(Layout::template high_bits<CODES>(vector), codes >> 4 & HALF);
    }

    // How an offset is added to the product of scale and code.
    enum Sum { kNoSum, kFusedSum, kRoundedSum };

    // Whether the product has no more bits than a float: one of 11 bits, perhaps 7 of a byte, and up to 8
    // of the code, or 6 beside a byte. Then it need not be rounded.
    bool has_exact_products() const {
        const bool is_byte = stored_.scale == kByte;
        return (is_byte ? stored_.scale_step : stored_.scale) != kSingle &&
               (!is_byte || stored_.codes <= k6Bits);
    }

    // f(lanes) of each step from `begin` up to `end`, and of the rest of the last block.
    template <int64_t CODES, typename Layout, Sum SUM, typename F>
    __attribute__((always_inline)) inline void for_steps(int64_t number, int64_t begin, int64_t end,
                                                         const F& f) const {
        constexpr int64_t BLOCK_STEPS = BLOCK / Dot<T>::DEPTH;
        constexpr int OF_STEP = Layout::OF_STEP;
        const Widener<CODES, Layout> value(center_);
        for_blocks<CODES>(
            number, begin / BLOCK_STEPS, (end + BLOCK_STEPS - 1) / BLOCK_STEPS,
            [&](const uint8_t* codes, Pair scales, Pair offsets, int64_t first, int64_t last) {
                vf scale[OF_STEP], offset[OF_STEP];
                Layout::spread(scales, scale);
                if (SUM != kNoSum) Layout::spread(offsets, offset);
                for (; first < last; ++first, codes += BYTES_OF_BLOCK<CODES>) {
                    fetch_ahead<CODES>(codes, AHEAD);
#pragma GCC unroll 32
                    for (int n = 0; n < VECTORS; n += OF_STEP) {
                        vf lanes[OF_STEP];
#pragma GCC unroll 4
                        for (int i = 0; i < OF_STEP; ++i) {
                            lanes[i] = value(codes, n + i) * scale[i];
                            if (SUM == kRoundedSum) lanes[i] = rounded(lanes[i]);
                            if (SUM != kNoSum) lanes[i] += offset[i];
                        }
                        f(lanes);
                    }
                }
            });
    }

    __attribute__((always_inline)) static inline Pair read_numbers(int64_t kind, const uint8_t* from,
                                                                   int64_t step_kind,
                                                                   const uint8_t* steps) {
        const Pair numbers = fastserve::read_numbers(kind, from);
        if (!step_kind) return numbers;
        const Pair step = fastserve::read_numbers(step_kind, steps);
        return {numbers.a * step.a, numbers.b * step.b};
    }

    StoredPiece stored_;
    float center_;
    int64_t blocks_ = 0, block_bytes_ = 0, group_blocks_ = 1, scale_bytes_ = 0, offset_bytes_ = 0,
            scale_step_bytes_ = 0, steps_bytes_ = 0, offsets_at_ = 0, head_bytes_ = 0,
            superblock_bytes_ = 0, panel_bytes_ = 0;
};

// Pieces, one below the other, as one weight.
template <typename T>
class Pieces {
   public:
    Pieces(const StoredPiece* stored, int64_t count, int64_t in) {
        for (int64_t i = 0; i < count; ++i) {
            places_.push_back({Piece<T>(stored[i], in), panels_, out_});
            panels_ += places_.back().piece.panels();
            out_ += stored[i].out;
        }
    }

    struct Place {
        Piece<T> piece;
        int64_t first_panel, first_column;
    };

    int64_t panels() const { return panels_; }
    int64_t out() const { return out_; }
    // Its panels, if it is one piece of the product's own type; null otherwise.
    const void* plain_panels() const {
        const Piece<T>& first = places_[0].piece;
        return first.is_plain() && first.out() == out_ ? first.panel(0) : nullptr;
    }
    template <typename F>
    bool all(const F& f) const {
        return std::all_of(places_.begin(), places_.end(),
                           [&](const Place& place) { return f(place.piece); });
    }
    Columns columns(int64_t panel) const {
        const auto& [piece, first_panel, first_column] = with_panel(panel);
        const int64_t column = (panel - first_panel) * PAIR;
        return {first_column + column, (int)std::min<int64_t>(PAIR, piece.out() - column)};
    }
    const Place& with_panel(int64_t panel) const {
        size_t i = places_.size() - 1;
        while (panel < places_[i].first_panel) --i;
        return places_[i];
    }
    const Place& with_column(int64_t column) const {
        size_t i = places_.size() - 1;
        while (column < places_[i].first_column) --i;
        return places_[i];
    }

   private:
    std::vector<Place> places_;
    int64_t panels_ = 0, out_ = 0;
};

// Panels of Pieces. Each thread has its own.
template <typename T>
class QuantizedPanels {
   public:
    static constexpr int64_t PASS_STEPS = 128;  // widened 16 KiB at most
    // For AMX rows are packed in another order.
    static constexpr int64_t ROWS_AT_A_TIME = STEPS_AT_A_TIME<T> > 1 ? 0 : 4;
    static constexpr bool HAS_STEPS = true;

    explicit QuantizedPanels(int64_t steps) : steps_(steps) {}

    void use(const void* pieces) { pieces_ = (const Pieces<T>*)pieces; }
    const T* steps(int64_t panel, int64_t begin, int64_t end) {
        const auto& [piece, first_panel, first_column] = pieces_->with_panel(panel);
        if (piece.is_plain())
            return (const T*)piece.panel(panel - first_panel) + begin * STEP_SIZE<T>;
        piece.widen(panel - first_panel, begin, end, widened_);
        return widened_;
    }
    bool multiplies(int64_t panel, int64_t rows) const {
        return rows <= ROWS_AT_A_TIME && pieces_->with_panel(panel).piece.multiplies(steps_);
    }
    // sums [rows] of a tile with a panel, which the processor widens meanwhile.
    void multiply(int64_t panel, const typename Dot<T>::X* tile, int64_t, int64_t rows, float* sums,
                  Ahead) const {
        const auto& [piece, first_panel, first_column] = pieces_->with_panel(panel);
        with_rows<ROWS_AT_A_TIME>(rows, [&, &piece = piece, local = panel - first_panel](auto rows) {
            piece.template multiply<rows>(local, steps_, tile, sums);
        });
    }
    Ahead next(int64_t panel, int64_t pass, int64_t passes) const {
        const auto& [piece, first_panel, first_column] = pieces_->with_panel(panel);
        const int64_t bytes = piece.panel_bytes();
        return {(const char*)piece.panel(panel - first_panel + 1) + pass * bytes / passes,
                bytes / std::max<int64_t>(1, steps_) / passes};
    }
    Columns columns(int64_t panel, int64_t) const { return pieces_->columns(panel); }

   private:
    const Pieces<T>* pieces_ = nullptr;
    int64_t steps_;
    alignas(64) T widened_[PASS_STEPS * STEP_SIZE<T>];
};

// Rows of the weight: y [count, in].
template <typename T>
static void look_up_rows(const Team* team, const Pieces<T>& pieces, const int64_t* ids, int64_t count,
                         int64_t in, int64_t first_id, T* y) {
    constexpr int64_t DEPTH = Dot<T>::DEPTH, PASS = QuantizedPanels<T>::PASS_STEPS;
    const int64_t steps = steps_of<T>(in);
    in_team(team, true, [&](const Team& own) {
        QuantizedPanels<T> weights(steps);
        weights.use(&pieces);
        const auto [first, last] = own.part(count);
        for (int64_t i = first; i < last; ++i) {
            const int64_t column = ids[i] - first_id;
            if (column < 0 || column >= pieces.out()) {
                std::fill_n(y + i * in, in, T{});
                continue;
            }
            const auto& [piece, first_panel, first_column] = pieces.with_column(column);
            const int64_t row = column - first_column;
            const int place = Dot<T>::place(row % PAIR);
            for (int64_t begin = 0; begin < steps; begin += PASS) {
                const int64_t end = std::min(steps, begin + PASS);
                const T* const of_steps = weights.steps(first_panel + row / PAIR, begin, end);
                for (int64_t k = begin * DEPTH; k < std::min(in, end * DEPTH); ++k)
                    y[i * in + k] =
                        of_steps[(k / DEPTH - begin) * STEP_SIZE<T> + place + k % DEPTH];
            }
        }
    });
}

}  // namespace fastserve
