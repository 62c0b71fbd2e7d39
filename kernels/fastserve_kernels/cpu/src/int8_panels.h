// Panels of weights in INT8: a byte for each element of a panel, widened to the panel's type a few steps
// at a time, into the first-level cache. Every such number is one of bfloat16 as well, so widening
// rounds nothing.
#pragma once

#include "panels.h"

#if defined(__AVX512BF16__) && defined(__AVX512VBMI__)
#define LOOKS_UP_BF16
#endif

namespace fastserve {

// PAIR neighbours of a panel, as bytes.
template <typename T>
struct Int8Pair {
    static void narrow(const T* from, int8_t* to) {
        const Pair values = load_pair(from);
        for (int i = 0; i < W; ++i) {
            to[i] = (int8_t)values.a[i];
            to[W + i] = (int8_t)values.b[i];
        }
    }
    static inline void widen(const int8_t* from, T* to) {
        store_pair(to, load_pair(from));
    }
};

// A step of a panel, as bytes.
template <typename T>
struct Int8Step {
    static void narrow(const T* from, int8_t* to) {
        for (int64_t i = 0; i < STEP_SIZE<T>; i += PAIR) Int8Pair<T>::narrow(from + i, to + i);
    }
    struct Widener {
        inline void operator()(const int8_t* from, T* to) const {
            for (int64_t i = 0; i < STEP_SIZE<T>; i += PAIR) Int8Pair<T>::widen(from + i, to + i);
        }
    };
};

#if defined(LOOKS_UP_BF16)
// A sign and a magnitude of 7 bits, by which both bytes of the bfloat16 are looked up: a third of the
// instructions of a conversion by way of fp32. The bytes are in the order in which unpacking, within
// each 16 bytes, puts the looked up ones together.
template <>
struct Int8Step<bf16> {
    static void narrow(const bf16* from, int8_t* to) {
        for (int i = 0; i < 64; ++i) {
            const int value = (int)to_float(from[i % 16 / 8 * 32 + i / 16 * 8 + i % 8]);
            to[i] = (int8_t)(value < 0 ? -value | 0x80 : value);
        }
    }
    class Widener {
       public:
        Widener() {
            alignas(64) uint8_t low[128], high[128];
            for (int i = 0; i < 128; ++i) {
                const float value = (float)i;
                uint32_t bits;
                std::memcpy(&bits, &value, 4);
                low[i] = (uint8_t)(bits >> 16);
                high[i] = (uint8_t)(bits >> 24);
            }
            low_first_ = _mm512_load_si512(low);
            low_second_ = _mm512_load_si512(low + 64);
            high_first_ = _mm512_load_si512(high);
            high_second_ = _mm512_load_si512(high + 64);
        }
        inline void operator()(const int8_t* from, bf16* to) const {
            constexpr int OR_OF_SIGN = 0xf8;  // a | (b & c)
            const __m512i codes = _mm512_loadu_si512(from), sign = _mm512_set1_epi8((char)0x80);
            const __m512i low = _mm512_permutex2var_epi8(low_first_, codes, low_second_);
            const __m512i magnitude = _mm512_permutex2var_epi8(high_first_, codes, high_second_);
            const __m512i high = _mm512_ternarylogic_epi64(magnitude, codes, sign, OR_OF_SIGN);
            _mm512_storeu_si512(to, _mm512_unpacklo_epi8(low, high));
            _mm512_storeu_si512(to + 32, _mm512_unpackhi_epi8(low, high));
        }

       private:
        __m512i low_first_, low_second_, high_first_, high_second_;
    };
};
#endif

// Panels in INT8. Each thread has its own.
template <typename T>
class Int8Panels {
   public:
    static constexpr int64_t ROWS_AT_A_TIME = 0;
    static constexpr bool HAS_STEPS = true;
    static constexpr int64_t PASS_STEPS = 128;  // widened 16 KiB at most

    explicit Int8Panels(int64_t steps) : steps_(steps) {}

    void use(const void* panels) { panels_ = (const int8_t*)panels; }
    const T* steps(int64_t panel, int64_t begin, int64_t end) {
        const int8_t* from = panels_ + (panel * steps_ + begin) * STEP_SIZE<T>;
        for (int64_t i = 0; i < (end - begin) * STEP_SIZE<T>; i += STEP_SIZE<T>)
            widen_(from + i, widened_ + i);
        return widened_;
    }
    Ahead next(int64_t panel, int64_t pass, int64_t passes) const {
        return next_panel<T>(panels_ + panel * steps_ * STEP_SIZE<T>, steps_, pass, passes);
    }
    Columns columns(int64_t panel, int64_t out) const { return columns_of_panel(panel, out); }

   private:
    const int8_t* panels_ = nullptr;
    int64_t steps_;
    typename Int8Step<T>::Widener widen_;
    alignas(64) T widened_[PASS_STEPS * STEP_SIZE<T>];
};

}  // namespace fastserve
