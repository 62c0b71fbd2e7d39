// Vector types and storage conversions shared by the CPU kernels.
//
// Nearly everything is written with GCC's vector extensions, so the same source is correct on any
// instruction set, and the vector width follows the machine; instructions for bfloat16 are named.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace fastserve {

// Names of storage types in the C interface; the Python side passes these numbers.
enum DType : int64_t { kFloat32 = 0, kBFloat16 = 1, kInt8 = 2 };

#if defined(__AVX512F__)
constexpr int W = 16;
#else
constexpr int W = 8;
#endif
constexpr int PAIR = 2 * W;  // elements in one Pair

typedef float vf __attribute__((vector_size(W * 4)));
typedef int32_t vi __attribute__((vector_size(W * 4)));
typedef uint32_t vu __attribute__((vector_size(W * 4)));
// The same types for memory that need not be aligned and may hold another type.
typedef float vf_mem __attribute__((vector_size(W * 4), aligned(1), may_alias));
typedef uint32_t vu_mem __attribute__((vector_size(W * 4), aligned(1), may_alias));

struct bf16 {
    uint16_t bits;
};

// f(a value of the storage type with this number).
template <typename F>
static inline auto with_type(int64_t dtype, const F& f) {
    return dtype == kBFloat16 ? f(bf16{}) : f(0.f);
}

// 2*W consecutive elements as fp32. How they are spread over the two vectors depends on the
// storage type (bf16: even/odd elements, because a shift and a mask are the cheapest way to widen;
// fp32 and int8: first/second half). Loads and stores of one type agree, and all arithmetic between two
// Pairs is per lane, so the order never matters in between.
struct Pair {
    vf a, b;
};

static inline vf splat(float x) { return x - vf{}; }

static inline Pair load_pair(const float* p) {
    return {*(const vf_mem*)p, *(const vf_mem*)(p + W)};
}
static inline Pair load_pair(const bf16* p) {
    vu raw = *(const vu_mem*)p;
    return {(vf)(raw << 16), (vf)(raw & 0xffff0000u)};
}

static inline vf as_floats(const int8_t* from) {
    // Named, where there are instructions: GCC converts vectors of bytes one by one.
#if defined(__AVX512F__)
    const vi values = (vi)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)from));
#elif defined(__AVX2__)
    const vi values = (vi)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)from));
#else
    vi values;
    for (int i = 0; i < W; ++i) values[i] = from[i];
#endif
    return __builtin_convertvector(values, vf);
}
static inline Pair load_pair(const int8_t* p) { return {as_floats(p), as_floats(p + W)}; }

static inline void store_pair(float* p, Pair x) {
    *(vf_mem*)p = x.a;
    *(vf_mem*)(p + W) = x.b;
}
#if defined(__AVX512BF16__)
static inline void store_pair(bf16* p, Pair x) {
    typedef uint16_t halves __attribute__((vector_size(64)));
    const halves rounded = (halves)_mm512_cvtne2ps_pbh((__m512)x.b, (__m512)x.a);
    halves order;
    for (int i = 0; i < PAIR; ++i) order[i] = i / 2 + i % 2 * W;
    _mm512_storeu_si512(p, (__m512i)__builtin_shuffle(rounded, order));
}
#else
// fp32 -> bf16 in the upper half of each lane, round to nearest even; a NaN stays a NaN.
static inline vu round_bf16(vf x) {
    vu u = (vu)x;
    vu rounded = u + 0x7fffu + ((u >> 16) & 1u);
    vu quiet = u | 0x00400000u;
    return (vu)(x == x ? (vi)rounded : (vi)quiet);
}

static inline void store_pair(bf16* p, Pair x) {
    *(vu_mem*)p = (round_bf16(x.a) >> 16) | (round_bf16(x.b) & 0xffff0000u);
}
#endif

// The elements of a Pair of T in ascending order.
template <typename T>
static inline void store_in_order(float* p, Pair x) {
    if (sizeof(T) == sizeof(float)) return store_pair(p, x);
    vi first, second;
    for (int i = 0; i < W; ++i) {
        first[i] = i / 2 + i % 2 * W;
        second[i] = W / 2 + first[i];
    }
    *(vf_mem*)p = __builtin_shuffle(x.a, x.b, first);
    *(vf_mem*)(p + W) = __builtin_shuffle(x.a, x.b, second);
}

// From ascending order to that in which elements of T are spread over a Pair.
template <typename T>
static inline Pair spread(Pair x) {
    if (sizeof(T) == sizeof(float)) return x;
    vi even, odd;
    for (int i = 0; i < W; ++i) {
        even[i] = 2 * i;
        odd[i] = even[i] + 1;
    }
    return {__builtin_shuffle(x.a, x.b, even), __builtin_shuffle(x.a, x.b, odd)};
}

// fp32 values in ascending order, stored as T.
template <typename T>
static inline void store_ordered(T* p, Pair x) {
#if defined(__AVX512BF16__)
    if constexpr (sizeof(T) < sizeof(float)) {  // the instruction takes them in this order
        _mm512_storeu_si512(p, (__m512i)_mm512_cvtne2ps_pbh((__m512)x.b, (__m512)x.a));
        return;
    }
#endif
    store_pair(p, spread<T>(x));
}

// The first n (0 < n <= PAIR) elements; the rest read as zero, and are never touched in memory.
template <typename T>
static inline Pair load_pair_n(const T* p, int n) {
    if (n == PAIR) return load_pair(p);
    T buffer[PAIR];
    std::memset(buffer, 0, sizeof buffer);
    std::memcpy(buffer, p, n * sizeof(T));
    return load_pair(buffer);
}
template <typename T>
static inline void store_pair_n(T* p, Pair x, int n) {
    if (n == PAIR) return store_pair(p, x);
    T buffer[PAIR];
    store_pair(buffer, x);
    std::memcpy(p, buffer, n * sizeof(T));
}

// The first n fp32 values, in the order in which elements of T are spread over a Pair.
template <typename T>
static inline Pair spread_like(const T*, const float* p, int n) {
    return spread<T>(load_pair_n(p, n));
}

// f(the first element, how many) of each Pair of a row.
template <typename F>
static inline void for_pairs(int64_t size, const F& f) {
    const int tail = (int)(size % PAIR);
    for (int64_t at = 0; at < size - tail; at += PAIR) f(at, PAIR);
    if (tail > 0) f(size - tail, tail);
}

static inline float to_float(float x) { return x; }
static inline float to_float(bf16 x) {
    uint32_t u = (uint32_t)x.bits << 16;
    float f;
    std::memcpy(&f, &u, 4);
    return f;
}

// Of a value that T has.
template <typename T>
static inline T from_float(float x) {
    if constexpr (sizeof(T) == sizeof(float)) return x;
    uint32_t u;
    std::memcpy(&u, &x, 4);
    T value;
    u >>= 16;
    std::memcpy(&value, &u, sizeof value);  // the lower half, x86's order of bytes
    return value;
}

static inline vf magnitude(vf x) { return (vf)((vu)x & 0x7fffffffu); }

// y where either is NaN.
static inline vf vmax(vf x, vf y) { return x > y ? x : y; }

static inline float hsum(vf x) {
    float lanes[W];
    *(vf_mem*)lanes = x;
    for (int width = W / 2; width > 0; width /= 2)
        for (int i = 0; i < width; ++i) lanes[i] += lanes[i + width];
    return lanes[0];
}
// DISTANCE is a constant, or else the shuffle's indices would be made anew each time.
template <int DISTANCE = W / 2>
static inline float hmax(vf x) {
    vi other;
    for (int i = 0; i < W; ++i) other[i] = i ^ DISTANCE;
    x = vmax(x, __builtin_shuffle(x, other));
    if constexpr (DISTANCE > 1) return hmax<DISTANCE / 2>(x);
    return x[0];
}

// 2^x = power * (1 + rest) for x <= 0, or for x = -126 if it is less. Of a NaN, the rest is one.
struct PowerOf2 {
    vf power, rest;
};

static inline PowerOf2 power_of_2(vf x) {
    // Adding 1.5 * 2^23 rounds to an integer; 127 more makes its low bits a float's exponent.
    const vf round_magic = splat(12582912.f + 127.f);
    x = vmax(splat(-126.f), x);  // in this order: of a NaN, vmax takes its second argument
    vf shifted = x + round_magic;
    vf r = (x - (shifted - round_magic)) * 0.6931471805599453f;  // in [-ln2/2, ln2/2]
    vf p = splat(1.3888889e-3f);                                  // Taylor of e^r, degree 6
    p = p * r + 8.3333333e-3f;
    p = p * r + 4.1666667e-2f;
    p = p * r + 1.6666667e-1f;
    p = p * r + 0.5f;
    p = p * r + 1.f;
    return {(vf)((vu)shifted << 23), p * r};
}

// 2^x for x <= 0, relative error below 2e-7; anything under 2^-126 flushes to about 1e-38. A NaN
// stays one.
static inline vf exp2_nonpositive(vf x) {
    const PowerOf2 y = power_of_2(x);
    return (y.rest + 1.f) * y.power;
}

// Relative error below 4e-7, near 0 too: it goes by e^-2|x| - 1, from which no 1 cancels. A NaN stays one.
static inline vf tanh(vf x) {
    const PowerOf2 y = power_of_2(magnitude(x) * -2.8853900818f);  // 2 / ln 2
    const vf less = y.rest * y.power + (y.power - 1.f);
    return (vf)((vu)(-less / (less + 2.f)) | ((vu)x & 0x80000000u));
}

}  // namespace fastserve
