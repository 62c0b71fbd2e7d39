// Keys and values of the cache in INT8: a code for each element of a token of a head, and its scale.
#pragma once

#include <algorithm>

#include "vec.h"

namespace fastserve {

constexpr float MOST_CODE = 127.f;

// A value that is infinite or NaN makes the scale NaN, and with it the whole token.
template <typename T>
static inline void quantize_token(const T* token, int64_t dim, int8_t* codes, float* scale) {
    vf largest = {}, not_a_number = {};
    for_pairs(dim, [&](int64_t at, int n) {
        const Pair x = load_pair_n(token + at, n);
        largest = vmax(vmax(largest, magnitude(x.a)), magnitude(x.b));
        not_a_number += x.a * 0.f;
        not_a_number += x.b * 0.f;
    });
    *scale = hmax(largest) / MOST_CODE + hsum(not_a_number);
    if (!(*scale > 0.f)) {
        std::fill(codes, codes + dim, (int8_t)0);
        return;
    }
    const vf divisor = splat(*scale), magic = splat(12582912.f);  // 1.5 * 2^23: no fraction is left
    for_pairs(dim, [&](int64_t at, int n) {
        float steps[PAIR];
        store_in_order<T>(steps, load_pair_n(token + at, n));
        for (int i = 0; i < PAIR; i += W) {
            const vf step = (*(const vf_mem*)(steps + i) / divisor + magic) - magic;
            *(vf_mem*)(steps + i) = vmax(splat(-MOST_CODE), -vmax(splat(-MOST_CODE), -step));
        }
        for (int i = 0; i < n; ++i) codes[at + i] = (int8_t)(int)steps[i];
    });
}

template <typename T>
static inline void widen_token(const int8_t* codes, float scale, int64_t dim, T* token) {
    for_pairs(dim, [&](int64_t at, int n) {
        const Pair x = load_pair_n(codes + at, n);
        const Pair values{x.a * scale, x.b * scale};
        if (n == PAIR) return store_ordered(token + at, values);
        T rest[PAIR];
        store_ordered(rest, values);
        std::copy_n(rest, n, token + at);
    });
}

}  // namespace fastserve
