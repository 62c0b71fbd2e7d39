// Memory-bound operations on whole rows: cache writes, norms, rotation, gating, sums, argmax.
#include <algorithm>
#include <cmath>
#include <vector>

#include "activations.h"
#include "expert_choice.h"
#include "int8_tokens.h"
#include "team.h"
#include "vec.h"

namespace fastserve {

// sum = x + residual, rounded; f(the sum as it is then) of each Pair.
template <typename T, typename F>
static inline void add_row(const T* x, const T* residual, T* sum, int64_t size, const F& f) {
    for_pairs(size, [&](int64_t at, int n) {
        const Pair p = load_pair_n(x + at, n), q = load_pair_n(residual + at, n);
        store_pair_n(sum + at, {p.a + q.a, p.b + q.b}, n);
        f(load_pair_n(sum + at, n));
    });
}

template <typename T>
static void add_layer_norm(const Team* team, const T* x, const T* residual, const T* weight,
                           const T* bias, T* sum, T* normed, int64_t rows, int64_t size,
                           int64_t x_stride, int64_t residual_stride, float eps) {
    float ones[PAIR];
    std::fill(ones, ones + PAIR, 1.f);
    for_rows(team, rows, size, [=](int64_t r) {
        T* s = sum + r * size;
        vf total = {};
        add_row(x + r * x_stride, residual + r * residual_stride, s, size,
                [&](Pair p) { total += p.a + p.b; });
        const float mean = hsum(total) / size;
        vf squares = {};
        for_pairs(size, [&](int64_t at, int n) {
            const Pair p = load_pair_n(s + at, n);
            vf a = p.a - mean, b = p.b - mean;
            if (n < PAIR) {  // lanes past the end are -mean, not 0
                const Pair inside = spread_like(x, ones, n);
                a *= inside.a;
                b *= inside.b;
            }
            squares += a * a + b * b;
        });
        const float inverse = 1.f / std::sqrt(hsum(squares) / size + eps);
        for_pairs(size, [&](int64_t at, int n) {
            const Pair p = load_pair_n(s + at, n);
            Pair y = {(p.a - mean) * inverse, (p.b - mean) * inverse};
            if (weight) {
                const Pair w = load_pair_n(weight + at, n);
                y = {y.a * w.a, y.b * w.b};
            }
            if (bias) {
                const Pair w = load_pair_n(bias + at, n);
                y = {y.a + w.a, y.b + w.b};
            }
            store_pair_n(normed + r * size + at, y, n);
        });
    });
}

template <typename T>
static void add_rms_norm(const Team* team, const T* x, const T* residual, const T* weight, T* sum,
                         T* normed, int64_t rows, int64_t size, int64_t x_stride,
                         int64_t residual_stride, float eps, float shift) {
    for_rows(team, rows, size, [=](int64_t r) {
        T* s = sum + r * size;
        vf squares = {};
        add_row(x + r * x_stride, residual + r * residual_stride, s, size,
                [&](Pair p) { squares += p.a * p.a + p.b * p.b; });
        const float inverse = 1.f / std::sqrt(hsum(squares) / size + eps);
        for_pairs(size, [&](int64_t at, int n) {
            const Pair p = load_pair_n(s + at, n), w = load_pair_n(weight + at, n);
            const Pair scaled = {p.a * inverse * (w.a + shift), p.b * inverse * (w.b + shift)};
            store_pair_n(normed + r * size + at, scaled, n);
        });
    });
}

template <typename T>
static void rms_norm_heads(const Team* team, T* x, const T* weight, int64_t tokens, int64_t heads,
                           int64_t dim, int64_t stride_t, int64_t stride_h, float eps,
                           float shift) {
    for_rows(team, tokens, heads * dim, [=](int64_t t) {
        for (int64_t h = 0; h < heads; ++h) {
            T* head = x + t * stride_t + h * stride_h;
            vf squares = {};
            for_pairs(dim, [&](int64_t at, int n) {
                const Pair p = load_pair_n(head + at, n);
                squares += p.a * p.a + p.b * p.b;
            });
            const float inverse = 1.f / std::sqrt(hsum(squares) / dim + eps);
            for_pairs(dim, [&](int64_t at, int n) {
                const Pair p = load_pair_n(head + at, n), w = load_pair_n(weight + at, n);
                const Pair scaled = {p.a * inverse * (w.a + shift), p.b * inverse * (w.b + shift)};
                store_pair_n(head + at, scaled, n);
            });
        }
    });
}

constexpr int64_t MAX_HEAD_DIM = 256;

template <typename T>
static void rotate(const Team* team, T* x, const float* cos_sin, int64_t tokens, int64_t heads,
                   int64_t half, int64_t stride_t, int64_t stride_h) {
    for_rows(team, tokens, heads * half, [=](int64_t t) {
        Pair cosine[MAX_HEAD_DIM / 2 / PAIR + 1], sine[MAX_HEAD_DIM / 2 / PAIR + 1];
        for_pairs(half, [&](int64_t at, int n) {
            const float* values = cos_sin + t * 2 * half + at;
            cosine[at / PAIR] = spread_like(x, values, n);
            sine[at / PAIR] = spread_like(x, values + half, n);
        });
        for (int64_t h = 0; h < heads; ++h) {
            T* first = x + t * stride_t + h * stride_h;
            T* second = first + half;
            for_pairs(half, [&](int64_t at, int n) {
                const Pair p = load_pair_n(first + at, n), q = load_pair_n(second + at, n);
                const Pair u = cosine[at / PAIR], v = sine[at / PAIR];
                store_pair_n(first + at, {p.a * u.a - q.a * v.a, p.b * u.b - q.b * v.b}, n);
                store_pair_n(second + at, {q.a * u.a + p.a * v.a, q.b * u.b + p.b * v.b}, n);
            });
        }
    });
}

// f(gate, up), the first and the second half of each row.
template <typename T, typename F>
static void gate_rows(const Team* team, const T* x, T* out, int64_t rows, int64_t size,
                      int64_t stride, const F& f) {
    for_rows(team, rows, size, [=](int64_t r) {
        const T* gate = x + r * stride;
        // As for_pairs does; with the last one apart GCC's code for bfloat16 is 6% slower.
        for (int64_t at = 0; at < size; at += PAIR) {
            const int n = (int)std::min<int64_t>(PAIR, size - at);
            const Pair g = load_pair_n(gate + at, n), u = load_pair_n(gate + size + at, n);
            store_pair_n(out + r * size + at, {f(g.a, u.a), f(g.b, u.b)}, n);
        }
    });
}

// Both keep a NaN.
static inline vf at_most(vf x, float limit) { return x > splat(limit) ? splat(limit) : x; }
static inline vf at_least(vf x, float limit) { return x < splat(limit) ? splat(limit) : x; }

// out[t] = the sum of weights[t, i] * y[places[t, i]] over i, in this order. Places from `end` on add
// nothing.
template <typename T>
static void sum_choices(const Team* team, const T* y, const float* weights, const int32_t* places,
                        T* out, int64_t tokens, int64_t choices, int64_t size, int32_t end) {
    for_rows(team, tokens, choices * size, [=](int64_t t) {
        for_pairs(size, [&](int64_t at, int n) {
            Pair sum = {};
            for (int64_t i = t * choices; i < (t + 1) * choices; ++i) {
                if (places[i] >= end) continue;
                const Pair p = load_pair_n(y + places[i] * size + at, n);
                sum = {sum.a + p.a * weights[i], sum.b + p.b * weights[i]};
            }
            store_pair_n(out + t * size + at, sum, n);
        });
    });
}

// First index of the largest value; a NaN counts as the largest, as in torch.
template <typename T>
static int64_t argmax(const T* row, int64_t size) {
    constexpr int64_t STRIP = 1024;  // found by vectors first, then searched in one strip only
    float best = -INFINITY;
    int64_t best_strip = 0;
    for (int64_t start = 0; start < size; start += STRIP) {
        const int64_t end = std::min(size, start + STRIP);
        int64_t i = start;
        vf high_a = splat(-INFINITY), high_b = high_a;
        vi nan = {};
        for (; i + PAIR <= end; i += PAIR) {
            const Pair p = load_pair(row + i);
            high_a = vmax(p.a, high_a);
            high_b = vmax(p.b, high_b);
            nan |= (p.a != p.a) | (p.b != p.b);
        }
        float high = hmax(vmax(high_a, high_b));
        bool has_nan = false;
        for (int lane = 0; lane < W; ++lane) has_nan |= nan[lane] != 0;
        for (; i < end; ++i) {
            const float f = to_float(row[i]);
            high = std::max(high, f);
            has_nan |= f != f;
        }
        if (has_nan) {
            for (int64_t j = start;; ++j)
                if (to_float(row[j]) != to_float(row[j])) return j;
        }
        if (high > best) {
            best = high;
            best_strip = start;
        }
    }
    int64_t j = best_strip;
    while (to_float(row[j]) != best) ++j;
    return j;
}

template <typename T>
static void greedy_tokens(const Team* team, const T* x, int64_t* tokens, int64_t* answers, int64_t rows,
                          int64_t size, int64_t stride) {
    for_rows(team, rows, size, [=](int64_t r) {
        const T* const row = x + r * stride;
        const int64_t token = argmax(row, size);
        const float largest = to_float(row[token]);
        tokens[r] = token;
        answers[r] = largest == largest ? token : -1;
    });
}

// Sizes and strides in bytes where named so: the copy does not depend on the element type.
static void kv_write_any(const Team* team, char* kv, const char* key, const char* value,
                         const int64_t* slots, int64_t tokens, int64_t kv_heads, int64_t key_bytes,
                         int64_t value_bytes, int64_t row_bytes, int64_t block_size, int64_t layers,
                         int64_t layer, int64_t key_stride_t_bytes, int64_t key_stride_h_bytes,
                         int64_t value_stride_t_bytes, int64_t value_stride_h_bytes) {
    const int64_t part = kv_heads * block_size * row_bytes;
    for_rows(team, tokens, kv_heads * row_bytes, [=](int64_t t) {
        if (slots[t] < 0) return;
        const int64_t block = slots[t] / block_size, offset = slots[t] % block_size;
        char* k = kv + (block * layers + layer) * 2 * part + offset * row_bytes;
        for (int64_t h = 0; h < kv_heads; ++h, k += block_size * row_bytes) {
            std::memcpy(k, key + t * key_stride_t_bytes + h * key_stride_h_bytes, key_bytes);
            std::memcpy(k + part, value + t * value_stride_t_bytes + h * value_stride_h_bytes,
                        value_bytes);
        }
    });
}

// To codes and scales: see int8_cache.py. Strides in elements.
static void int8_kv_write_any(const Team* team, int64_t dtype, int8_t* kv, const void* key,
                              const void* value, const int64_t* slots, int64_t tokens,
                              int64_t kv_heads, int64_t key_dim, int64_t value_dim, int64_t width,
                              int64_t block_size, int64_t layers, int64_t layer,
                              int64_t key_stride_t, int64_t key_stride_h, int64_t value_stride_t,
                              int64_t value_stride_h) {
    const int64_t head_bytes = block_size * width, row_bytes = width - (int64_t)sizeof(float);
    with_type(dtype, [&](auto type) {
        using T = decltype(type);
        for_rows(team, tokens, kv_heads * width, [=](int64_t t) {
            if (slots[t] < 0) return;
            const int64_t block = slots[t] / block_size, offset = slots[t] % block_size;
            const auto write = [&](int8_t* head, const T* token, int64_t dim) {
                float* scales = (float*)(head + block_size * row_bytes);
                quantize_token(token, dim, head + offset * row_bytes, scales + offset);
            };
            int8_t* head = kv + (block * layers + layer) * 2 * kv_heads * head_bytes;
            for (int64_t h = 0; h < kv_heads; ++h, head += head_bytes) {
                write(head, (const T*)key + t * key_stride_t + h * key_stride_h, key_dim);
                write(head + kv_heads * head_bytes,
                      (const T*)value + t * value_stride_t + h * value_stride_h, value_dim);
            }
        });
    });
}

static void add_layer_norm_any(const Team* team, int64_t dtype, const void* x, const void* residual,
                               const void* weight, const void* bias, void* sum, void* normed,
                               int64_t rows, int64_t size, int64_t x_stride,
                               int64_t residual_stride, double eps) {
    with_type(dtype, [&](auto type) {
        using T = decltype(type);
        add_layer_norm(team, (const T*)x, (const T*)residual, (const T*)weight, (const T*)bias,
                       (T*)sum, (T*)normed, rows, size, x_stride, residual_stride, (float)eps);
    });
}

static void add_rms_norm_any(const Team* team, int64_t dtype, const void* x, const void* residual,
                             const void* weight, void* sum, void* normed, int64_t rows,
                             int64_t size, int64_t x_stride, int64_t residual_stride, double eps,
                             double shift) {
    with_type(dtype, [&](auto type) {
        using T = decltype(type);
        add_rms_norm(team, (const T*)x, (const T*)residual, (const T*)weight, (T*)sum, (T*)normed,
                     rows, size, x_stride, residual_stride, (float)eps, (float)shift);
    });
}

static void rms_norm_heads_any(const Team* team, int64_t dtype, void* x, const void* weight,
                               int64_t tokens, int64_t heads, int64_t dim, int64_t stride_t,
                               int64_t stride_h, double eps, double shift) {
    with_type(dtype, [&](auto type) {
        using T = decltype(type);
        rms_norm_heads(team, (T*)x, (const T*)weight, tokens, heads, dim, stride_t, stride_h,
                       (float)eps, (float)shift);
    });
}

static void rotate_any(const Team* team, int64_t dtype, void* x, const float* cos_sin,
                       int64_t tokens, int64_t heads, int64_t half, int64_t stride_t,
                       int64_t stride_h) {
    with_type(dtype, [&](auto type) {
        rotate(team, (decltype(type)*)x, cos_sin, tokens, heads, half, stride_t, stride_h);
    });
}

static void activate_mul_any(const Team* team, int64_t dtype, const void* x, void* out,
                             int64_t rows, int64_t size, int64_t stride, int64_t activation) {
    with_type(dtype, [&](auto type) {
        using T = decltype(type);
        with_activation(activation, [&](auto activate) {
            gate_rows(team, (const T*)x, (T*)out, rows, size, stride,
                      [=](vf gate, vf up) { return activate(gate) * up; });
        });
    });
}

static void clamped_swiglu_any(const Team* team, int64_t dtype, const void* x, void* out,
                               int64_t rows, int64_t size, int64_t stride, double alpha,
                               double limit) {
    with_type(dtype, [&](auto type) {
        using T = decltype(type);
        const float a = (float)alpha, most = (float)limit;
        gate_rows(team, (const T*)x, (T*)out, rows, size, stride, [=](vf gate, vf up) {
            gate = at_most(gate, most);
            return times_sigmoid((at_least(at_most(up, most), -most) + 1.f) * gate, gate * a);
        });
    });
}

static void sum_choices_any(const Team* team, int64_t dtype, const void* y, const float* weights,
                            const int32_t* places, const int32_t* starts, void* out, int64_t tokens,
                            int64_t choices, int64_t size, int64_t groups) {
    with_type(dtype, [&](auto type) {
        using T = decltype(type);
        sum_choices(team, (const T*)y, weights, places, (T*)out, tokens, choices, size,
                    starts[groups]);
    });
}

static void choose_any(const Team* team, int64_t dtype, const void* scores, const float* bias,
                       float* weights, int64_t* chosen, int64_t rows, int64_t count,
                       int64_t choices, int64_t stride, int64_t is_sigmoid, int64_t renormalises,
                       int64_t groups, int64_t chosen_groups, double factor, double margin) {
    const RoutingRule rule{is_sigmoid != 0, renormalises != 0, groups, chosen_groups,
                           (float)factor, (float)margin};
    with_type(dtype, [&](auto type) {
        choose(team, (const decltype(type)*)scores, bias, weights, chosen, rows, count, choices,
               stride, rule);
    });
}

static void greedy_tokens_any(const Team* team, int64_t dtype, const void* x, int64_t* tokens,
                              int64_t* answers, int64_t rows, int64_t size, int64_t stride) {
    with_type(dtype, [&](auto type) {
        greedy_tokens(team, (const decltype(type)*)x, tokens, answers, rows, size, stride);
    });
}

// Sorts the experts of all choices, stably: see routing.py. Choices of experts that are not among the
// `count` from `first` on come last.
static void sort_choices_any(const Team* team, const int64_t* experts, int32_t* tokens,
                             int32_t* starts, int32_t* places, int64_t num_tokens, int64_t choices,
                             int64_t first, int64_t count) {
    if (team && !team->is_first()) return;
    const auto group_of = [&](int64_t i) {
        const int64_t group = experts[i] - first;
        return group < 0 || group >= count ? count : group;
    };
    std::vector<int32_t> next(count + 2);  // of each group, from 1 on: its next row
    for (int64_t i = 0; i < num_tokens * choices; ++i) {
        const int64_t group = group_of(i);
        if (group < count) ++next[group + 1];
    }
    for (int64_t group = 0; group < count; ++group) next[group + 1] += next[group];
    std::copy_n(next.begin(), count + 1, starts);
    for (int64_t i = 0; i < num_tokens * choices; ++i) {
        const int32_t row = next[group_of(i)]++;
        places[i] = row;
        tokens[row] = (int32_t)(i / choices);
    }
}

}  // namespace fastserve

OPERATION(fs_kv_write, kv_write_any)
OPERATION(fs_int8_kv_write, int8_kv_write_any)
OPERATION(fs_add_layer_norm, add_layer_norm_any)
OPERATION(fs_add_rms_norm, add_rms_norm_any)
OPERATION(fs_rms_norm_heads, rms_norm_heads_any)
OPERATION(fs_rotate, rotate_any)
OPERATION(fs_activate_mul, activate_mul_any)
OPERATION(fs_clamped_swiglu, clamped_swiglu_any)
OPERATION(fs_choose, choose_any)
OPERATION(fs_sum_choices, sum_choices_any)
OPERATION(fs_greedy_tokens, greedy_tokens_any)
OPERATION(fs_sort_choices, sort_choices_any)
