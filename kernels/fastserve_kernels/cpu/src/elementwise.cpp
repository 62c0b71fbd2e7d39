// Operations on each row, or each element of it, by itself: lookups, sums, factors, limits, activations.
#include <algorithm>
#include <cstring>

#include "activations.h"
#include "team.h"
#include "vec.h"

namespace fastserve {

// out[i] = table[ids[i] - first], of `bytes`. If it wraps, -1 is the last row, and so on; otherwise the rows
// that are not in the table are zeros.
static void lookup_rows_any(const Team* team, char* out, const char* table, const int64_t* ids,
                            int64_t rows, int64_t bytes, int64_t table_rows, int64_t first,
                            int64_t wraps) {
    for_rows(team, rows, bytes, [=](int64_t i) {
        int64_t row = ids[i] - first;
        if (wraps && row < 0) row += table_rows;
        if (0 <= row && row < table_rows)
            std::memcpy(out + i * bytes, table + row * bytes, bytes);
        else
            std::memset(out + i * bytes, 0, bytes);
    });
}

// out[i, j] = x[i, columns[j]].
static void take_columns_any(const Team* team, int64_t dtype, void* out, const void* x,
                             const int64_t* columns, int64_t rows, int64_t size, int64_t stride) {
    with_type(dtype, [&](auto type) {
        using T = decltype(type);
        for_rows(team, rows, size, [=, target = (T*)out, source = (const T*)x](int64_t i) {
            for (int64_t j = 0; j < size; ++j)
                target[i * size + j] = source[i * stride + columns[j]];
        });
    });
}

static void zero_rows_any(const Team* team, char* out, int64_t rows, int64_t bytes) {
    for_rows(team, rows, bytes, [=](int64_t i) { std::memset(out + i * bytes, 0, bytes); });
}

// out = f(x), rounded once; f(the fp32 elements, the number of their row). Strides in elements.
template <typename T, typename F>
static void map_rows(const Team* team, const T* x, T* out, int64_t rows, int64_t size,
                     int64_t x_stride, int64_t out_stride, const F& f) {
    for_rows(team, rows, size, [=](int64_t i) {
        for_pairs(size, [&](int64_t at, int n) {
            const Pair p = load_pair_n(x + i * x_stride + at, n);
            store_pair_n(out + i * out_stride + at, {f(p.a, i), f(p.b, i)}, n);
        });
    });
}

static void add_any(const Team* team, int64_t dtype, const void* x, const void* y, void* out,
                    int64_t rows, int64_t size, int64_t x_stride, int64_t y_stride) {
    with_type(dtype, [&](auto type) {
        using T = decltype(type);
        const T *const first = (const T*)x, *const second = (const T*)y;
        for_rows(team, rows, size, [=, sum = (T*)out](int64_t i) {
            for_pairs(size, [&](int64_t at, int n) {
                const Pair p = load_pair_n(first + i * x_stride + at, n);
                const Pair q = load_pair_n(second + i * y_stride + at, n);
                store_pair_n(sum + i * size + at, {p.a + q.a, p.b + q.b}, n);
            });
        });
    });
}

// By a number for all rows.
static void scale_any(const Team* team, int64_t dtype, void* x, int64_t rows, int64_t size,
                      int64_t stride, double factor) {
    with_type(dtype, [&](auto type) {
        using T = decltype(type);
        const float number = (float)factor;
        map_rows(team, (const T*)x, (T*)x, rows, size, stride, stride,
                 [=](vf values, int64_t) { return values * number; });
    });
}

// By a number for each row.
static void scale_rows_any(const Team* team, int64_t dtype, void* x, const float* factors,
                           int64_t rows, int64_t size, int64_t stride) {
    with_type(dtype, [&](auto type) {
        using T = decltype(type);
        map_rows(team, (const T*)x, (T*)x, rows, size, stride, stride,
                 [=](vf values, int64_t i) { return values * factors[i]; });
    });
}

// By the logistic function of a number for each row, which are `gate_stride` apart.
static void scale_by_sigmoid_any(const Team* team, int64_t dtype, void* x, const void* gates,
                                 int64_t rows, int64_t size, int64_t stride, int64_t gate_stride) {
    with_type(dtype, [&](auto type) {
        using T = decltype(type);
        const T* const first = (const T*)gates;
        map_rows(team, (const T*)x, (T*)x, rows, size, stride, stride,
                 [=](vf values, int64_t i) {
                     return times_sigmoid(values, splat(to_float(first[i * gate_stride])));
                 });
    });
}

// To -limit .. limit. A NaN stays one.
static void clamp_any(const Team* team, int64_t dtype, void* x, int64_t rows, int64_t size,
                      int64_t stride, double limit) {
    with_type(dtype, [&](auto type) {
        using T = decltype(type);
        const float most = (float)limit;
        map_rows(team, (const T*)x, (T*)x, rows, size, stride, stride, [=](vf values, int64_t) {
            values = values > splat(most) ? splat(most) : values;
            return values < splat(-most) ? splat(-most) : values;
        });
    });
}

// cap * tanh(x / cap).
static void soft_cap_any(const Team* team, int64_t dtype, void* x, int64_t rows, int64_t size,
                         int64_t stride, double cap) {
    with_type(dtype, [&](auto type) {
        using T = decltype(type);
        const float most = (float)cap, inverse = (float)(1 / cap);
        map_rows(team, (const T*)x, (T*)x, rows, size, stride, stride,
                 [=](vf values, int64_t) { return tanh(values * inverse) * most; });
    });
}

static void activate_any(const Team* team, int64_t dtype, const void* x, void* out, int64_t rows,
                         int64_t size, int64_t stride, int64_t activation) {
    with_type(dtype, [&](auto type) {
        using T = decltype(type);
        with_activation(activation, [&](auto activate) {
            map_rows(team, (const T*)x, (T*)out, rows, size, stride, size,
                     [=](vf values, int64_t) { return activate(values); });
        });
    });
}

}  // namespace fastserve

OPERATION(fs_lookup_rows, lookup_rows_any)
OPERATION(fs_take_columns, take_columns_any)
OPERATION(fs_zero_rows, zero_rows_any)
OPERATION(fs_add, add_any)
OPERATION(fs_scale, scale_any)
OPERATION(fs_scale_rows, scale_rows_any)
OPERATION(fs_scale_by_sigmoid, scale_by_sigmoid_any)
OPERATION(fs_clamp, clamp_any)
OPERATION(fs_soft_cap, soft_cap_any)
OPERATION(fs_activate, activate_any)
