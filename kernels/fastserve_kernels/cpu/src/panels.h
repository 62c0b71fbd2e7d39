// What rows are multiplied with, packed: a panel holds PAIR columns, a step of the sums after the
// other. The columns are rows of a weight; in attention keys, and then elements of values.
#pragma once

#include <algorithm>
#include <cstring>
#include <limits>

#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

#include "vec.h"

namespace fastserve {

// One step of the sums, which are in fp32: DEPTH neighbours of a row as an X, and of PAIR columns as a
// Weights. bfloat16 is widened or, where the processor has the instruction, multiplied in pairs.
template <typename T>
struct Dot {
    static constexpr int DEPTH = 1;
    using X = float;
    using Weights = Pair;

    // `left`: elements from x to the end of its row.
    static X pack(const T* x, int64_t) { return to_float(*x); }
    // PAIR values, in a Pair of T, as a row's next steps.
    static void pack_pair(X* target, Pair x) { store_in_order<T>(target, x); }
    // Of a column's DEPTH elements in each step of its panel.
    static int place(int column) { return column; }
    // A step from rows, of which each has an element of every column.
    static void pack_step(T* step, const T* const* rows) { std::copy_n(rows[0], PAIR, step); }
    static inline Weights load(const T* panel) { return load_pair(panel); }
    static inline void add(Pair& sum, const Weights& w, X x) {
        const vf value = splat(x);
        sum.a += value * w.a;
        sum.b += value * w.b;
    }
};

#if defined(__AVX512BF16__)
template <>
struct Dot<bf16> {
    static constexpr int DEPTH = 2;
    using X = uint32_t;
    struct Weights {
        __m512bh a, b;
    };

    static X pack(const bf16* x, int64_t left) {
        X pair = 0;
        std::memcpy(&pair, x, left > 1 ? 4 : 2);
        return pair;
    }
    static void pack_pair(X* target, Pair x) { store_pair((bf16*)target, x); }
    // Even columns in the first vector, odd ones in the second, as in a Pair of bf16.
    static int place(int column) { return (column % 2 * W + column / 2) * 2; }
    // A step, as `place` has it, from an element of every column in each of two rows.
    static inline Weights of_rows(vu first, vu second) {
        return {(__m512bh)((first & 0xffffu) | (second << 16)),
                (__m512bh)((first >> 16) | (second & 0xffff0000u))};
    }
    static void pack_step(bf16* step, const bf16* const* rows) {
        const Weights w = of_rows(*(const vu_mem*)rows[0], *(const vu_mem*)rows[1]);
        *(vu_mem*)step = (vu)w.a;
        *(vu_mem*)(step + PAIR) = (vu)w.b;
    }
    static inline Weights load(const bf16* panel) {
        return {(__m512bh)_mm512_loadu_si512(panel), (__m512bh)_mm512_loadu_si512(panel + PAIR)};
    }
    static inline void add(Pair& sum, const Weights& w, X x) {
        const __m512bh value = (__m512bh)_mm512_set1_epi32((int)x);
        sum.a = (vf)_mm512_dpbf16_ps((__m512)sum.a, w.a, value);
        sum.b = (vf)_mm512_dpbf16_ps((__m512)sum.b, w.b, value);
    }
};
#endif

#if defined(FASTSERVE_AMX) && defined(__AMX_BF16__) && defined(__AVX512BF16__)
#define USES_AMX
#endif

// Steps that a product takes at a time: panels and rows are filled up with zeros to a multiple of it.
template <typename T>
inline constexpr int64_t STEPS_AT_A_TIME = 1;
#if defined(USES_AMX)
template <>
inline constexpr int64_t STEPS_AT_A_TIME<bf16> = 16;
#endif

template <typename T>
static int64_t steps_of(int64_t in) {
    constexpr int64_t multiple = STEPS_AT_A_TIME<T> * Dot<T>::DEPTH;
    return (in + multiple - 1) / multiple * STEPS_AT_A_TIME<T>;
}
template <typename T>
constexpr int64_t STEP_SIZE = PAIR * Dot<T>::DEPTH;  // elements of a panel

// From `count` columns, up to PAIR of them: [steps][PAIR, with DEPTH neighbours each], zeros past the
// ends. column_of(n) is column n, of `in` elements.
template <typename T, typename F>
static void pack_panel(const F& column_of, int64_t count, int64_t in, T* panel) {
    constexpr int DEPTH = Dot<T>::DEPTH;
    const int64_t steps = steps_of<T>(in), whole = in / DEPTH;
    if (count < PAIR || whole < steps) std::fill(panel, panel + steps * STEP_SIZE<T>, T{});
    for (int n = 0; n < std::min<int64_t>(count, PAIR); ++n) {
        const T* column = column_of(n);
        T* target = panel + Dot<T>::place(n);
        for (int64_t k = 0; k < whole; ++k)
            std::memcpy(target + k * STEP_SIZE<T>, column + k * DEPTH, DEPTH * sizeof(T));
        if (whole * DEPTH < in)
            std::memcpy(target + whole * STEP_SIZE<T>, column + whole * DEPTH,
                        (in - whole * DEPTH) * sizeof(T));
    }
}

// From `in` rows of the columns' elements, `count` of them, up to PAIR. row_of(k) is row k.
template <typename T, typename F>
static void pack_panel_by_rows(const F& row_of, int64_t count, int64_t in, T* panel) {
    constexpr int DEPTH = Dot<T>::DEPTH;
    static const T zeros[PAIR] = {};
    T filled[DEPTH][PAIR] = {};
    for (int64_t k = 0; k < steps_of<T>(in) * DEPTH; k += DEPTH, panel += STEP_SIZE<T>) {
        const T* rows[DEPTH];
        for (int i = 0; i < DEPTH; ++i) {
            rows[i] = k + i < in ? row_of(k + i) : zeros;
            if (count < PAIR && k + i < in) {
                std::copy_n(rows[i], count, filled[i]);
                rows[i] = filled[i];
            }
        }
        Dot<T>::pack_step(panel, rows);
    }
}

// What is fetched while a panel is multiplied: in each step the bytes from there on.
struct Ahead {
    const char* first;
    int64_t stride;  // bytes
};

// What lies behind so many steps of a panel, whose type is that of its elements in memory, in equal parts
// by all passes over them: from memory up to a third faster than without.
template <typename T, typename Stored>
static inline Ahead next_panel(const Stored* panel, int64_t steps, int64_t pass, int64_t passes) {
    constexpr int64_t STEP_BYTES = STEP_SIZE<T> * sizeof(Stored);
    const int64_t bytes = steps * STEP_BYTES;
    return {(const char*)panel + bytes + pass * bytes / passes, STEP_BYTES / passes};
}

// Columns of the product that a panel makes.
struct Columns {
    int64_t first;
    int count;
};

// Of a weight with `out` columns.
static inline Columns columns_of_panel(int64_t panel, int64_t out) {
    return {panel * PAIR, (int)std::min<int64_t>(PAIR, out - panel * PAIR)};
}

// A weight's panels, as they are in memory; `use` chooses the weight.
template <typename T>
class SamePanels {
   public:
    static constexpr int64_t ROWS_AT_A_TIME = 0;  // that `multiply` takes; 0: there is none
    static constexpr bool HAS_STEPS = true;       // whether there is `steps`
    static constexpr int64_t PASS_STEPS = std::numeric_limits<int64_t>::max();

    explicit SamePanels(int64_t steps) : steps_(steps) {}

    void use(const void* panels) { panels_ = (const T*)panels; }
    // Steps of a panel from `begin` up to `end`; good until the next call.
    const T* steps(int64_t panel, int64_t begin, int64_t) {
        return panels_ + (panel * steps_ + begin) * STEP_SIZE<T>;
    }
    Ahead next(int64_t panel, int64_t pass, int64_t passes) const {
        return next_panel<T>(panels_ + panel * steps_ * STEP_SIZE<T>, steps_, pass, passes);
    }
    Columns columns(int64_t panel, int64_t out) const { return columns_of_panel(panel, out); }

   private:
    const T* panels_ = nullptr;
    int64_t steps_;
};

}  // namespace fastserve
