// Memory-bound operations on whole rows: cache writes, residual + norm, rotation, gating, argmax.
#include <algorithm>
#include <cmath>

#include "vec.h"

namespace fastserve {

// Below this many elements, waking the other threads costs more than the work.
constexpr int64_t PARALLEL_ELEMENTS = 1 << 15;

// fp32 values in the order in which elements of T are spread over a Pair.
static inline Pair spread_like(const float*, const float* p, int n) { return load_pair_n(p, n); }
static inline Pair spread_like(const bf16*, const float* p, int n) {
    Pair spread = {};
    for (int i = 0; i < n; ++i) {  // (GCC 12 miscompiles a choice of vectors as an lvalue)
        if (i % 2) spread.b[i / 2] = p[i];
        else spread.a[i / 2] = p[i];
    }
    return spread;
}

template <typename T>
static void add_layer_norm(const T* x, const T* residual, const T* weight, const T* bias, T* sum,
                           T* normed, int64_t rows, int64_t size, int64_t x_stride,
                           int64_t residual_stride, float eps) {
    const int64_t pairs = (size + PAIR - 1) / PAIR;
    const int tail = (int)(size - (pairs - 1) * PAIR);
    float ones[PAIR];
    std::fill(ones, ones + PAIR, 1.f);
    const Pair in_tail = spread_like(x, ones, tail);  // lanes of the last Pair: 1, past the end 0
#pragma omp parallel for if (rows > 1 && rows * size >= PARALLEL_ELEMENTS)
    for (int64_t r = 0; r < rows; ++r) {
        T* s = sum + r * size;
        vf total = {};
        for (int64_t c = 0; c < pairs; ++c) {
            const int n = c == pairs - 1 ? tail : PAIR;
            const Pair p = load_pair_n(x + r * x_stride + c * PAIR, n);
            const Pair q = load_pair_n(residual + r * residual_stride + c * PAIR, n);
            store_pair_n(s + c * PAIR, {p.a + q.a, p.b + q.b}, n);
            const Pair rounded = load_pair_n(s + c * PAIR, n);
            total += rounded.a + rounded.b;
        }
        const float mean = hsum(total) / size;
        vf squares = {};
        for (int64_t c = 0; c < pairs; ++c) {
            const int n = c == pairs - 1 ? tail : PAIR;
            const Pair p = load_pair_n(s + c * PAIR, n);
            vf a = p.a - mean, b = p.b - mean;
            if (c == pairs - 1) {  // lanes past the end are -mean, not 0
                a *= in_tail.a;
                b *= in_tail.b;
            }
            squares += a * a + b * b;
        }
        const float inverse = 1.f / std::sqrt(hsum(squares) / size + eps);
        for (int64_t c = 0; c < pairs; ++c) {
            const int n = c == pairs - 1 ? tail : PAIR;
            const Pair p = load_pair_n(s + c * PAIR, n);
            Pair y = {(p.a - mean) * inverse, (p.b - mean) * inverse};
            if (weight) {
                const Pair w = load_pair_n(weight + c * PAIR, n);
                y = {y.a * w.a, y.b * w.b};
            }
            if (bias) {
                const Pair w = load_pair_n(bias + c * PAIR, n);
                y = {y.a + w.a, y.b + w.b};
            }
            store_pair_n(normed + r * size + c * PAIR, y, n);
        }
    }
}

template <typename T>
static void add_rms_norm(const T* x, const T* residual, const T* weight, T* sum, T* normed,
                         int64_t rows, int64_t size, int64_t x_stride, int64_t residual_stride,
                         float eps) {
    const int64_t pairs = (size + PAIR - 1) / PAIR;
    const int tail = (int)(size - (pairs - 1) * PAIR);
#pragma omp parallel for if (rows > 1 && rows * size >= PARALLEL_ELEMENTS)
    for (int64_t r = 0; r < rows; ++r) {
        T* s = sum + r * size;
        vf squares = {};
        for (int64_t c = 0; c < pairs; ++c) {
            const int n = c == pairs - 1 ? tail : PAIR;
            const Pair p = load_pair_n(x + r * x_stride + c * PAIR, n);
            const Pair q = load_pair_n(residual + r * residual_stride + c * PAIR, n);
            store_pair_n(s + c * PAIR, {p.a + q.a, p.b + q.b}, n);
            const Pair rounded = load_pair_n(s + c * PAIR, n);
            squares += rounded.a * rounded.a + rounded.b * rounded.b;
        }
        const float inverse = 1.f / std::sqrt(hsum(squares) / size + eps);
        for (int64_t c = 0; c < pairs; ++c) {
            const int n = c == pairs - 1 ? tail : PAIR;
            const Pair p = load_pair_n(s + c * PAIR, n);
            const Pair w = load_pair_n(weight + c * PAIR, n);
            store_pair_n(normed + r * size + c * PAIR,
                         {p.a * inverse * w.a, p.b * inverse * w.b}, n);
        }
    }
}

constexpr int64_t MAX_HEAD_DIM = 256;

template <typename T>
static void rotate(T* x, const float* cos_sin, int64_t tokens, int64_t heads, int64_t half,
                   int64_t stride_t, int64_t stride_h) {
    const int64_t pairs = (half + PAIR - 1) / PAIR;
    const int tail = (int)(half - (pairs - 1) * PAIR);
#pragma omp parallel for if (tokens > 1 && tokens * heads * half >= PARALLEL_ELEMENTS)
    for (int64_t t = 0; t < tokens; ++t) {
        Pair cosine[MAX_HEAD_DIM / 2 / PAIR + 1], sine[MAX_HEAD_DIM / 2 / PAIR + 1];
        for (int64_t c = 0; c < pairs; ++c) {
            const int n = c == pairs - 1 ? tail : PAIR;
            const float* at = cos_sin + t * 2 * half + c * PAIR;
            cosine[c] = spread_like(x, at, n);
            sine[c] = spread_like(x, at + half, n);
        }
        for (int64_t h = 0; h < heads; ++h) {
            T* first = x + t * stride_t + h * stride_h;
            T* second = first + half;
            for (int64_t c = 0; c < pairs; ++c) {
                const int n = c == pairs - 1 ? tail : PAIR;
                const int64_t at = c * PAIR;
                const Pair p = load_pair_n(first + at, n), q = load_pair_n(second + at, n);
                const Pair u = cosine[c], v = sine[c];
                store_pair_n(first + at, {p.a * u.a - q.a * v.a, p.b * u.b - q.b * v.b}, n);
                store_pair_n(second + at, {q.a * u.a + p.a * v.a, q.b * u.b + p.b * v.b}, n);
            }
        }
    }
}

// x / (1 + e^-x), by e^-|x| alone, which cannot overflow.
static inline vf silu(vf x) {
    constexpr float LOG2_E = 1.44269504f;
    const vf magnitude = vmax(x, -x);
    const vf small = exp2_nonpositive(-magnitude * LOG2_E);  // e^-|x|
    const vf numerator = x > splat(0.f) ? splat(1.f) : small;
    return x * numerator / (small + 1.f);
}

template <typename T>
static void silu_mul(const T* x, T* out, int64_t rows, int64_t size, int64_t stride) {
    const int64_t pairs = (size + PAIR - 1) / PAIR;
    const int tail = (int)(size - (pairs - 1) * PAIR);
#pragma omp parallel for if (rows > 1 && rows * size >= PARALLEL_ELEMENTS)
    for (int64_t r = 0; r < rows; ++r) {
        const T* gate = x + r * stride;
        const T* up = gate + size;
        for (int64_t c = 0; c < pairs; ++c) {
            const int n = c == pairs - 1 ? tail : PAIR;
            const Pair g = load_pair_n(gate + c * PAIR, n), u = load_pair_n(up + c * PAIR, n);
            store_pair_n(out + r * size + c * PAIR, {silu(g.a) * u.a, silu(g.b) * u.b}, n);
        }
    }
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
static void argmax_rows(const T* x, int64_t* out, int64_t rows, int64_t size, int64_t stride) {
#pragma omp parallel for if (rows > 1 && rows * size >= PARALLEL_ELEMENTS)
    for (int64_t r = 0; r < rows; ++r) out[r] = argmax(x + r * stride, size);
}

}  // namespace fastserve

// Sizes and strides in bytes where named so: the copy does not depend on the element type.
extern "C" void fs_kv_write(char* kv, const char* key, const char* value, const int64_t* slots,
                            int64_t tokens, int64_t kv_heads, int64_t head_bytes,
                            int64_t block_size, int64_t layers, int64_t layer,
                            int64_t key_stride_t_bytes, int64_t key_stride_h_bytes,
                            int64_t value_stride_t_bytes, int64_t value_stride_h_bytes) {
    const int64_t part = kv_heads * block_size * head_bytes;
#pragma omp parallel for if (tokens * kv_heads * head_bytes >= fastserve::PARALLEL_ELEMENTS)
    for (int64_t t = 0; t < tokens; ++t) {
        if (slots[t] < 0) continue;
        const int64_t block = slots[t] / block_size, offset = slots[t] % block_size;
        char* k = kv + (block * layers + layer) * 2 * part + offset * head_bytes;
        for (int64_t h = 0; h < kv_heads; ++h, k += block_size * head_bytes) {
            std::memcpy(k, key + t * key_stride_t_bytes + h * key_stride_h_bytes, head_bytes);
            std::memcpy(k + part, value + t * value_stride_t_bytes + h * value_stride_h_bytes,
                        head_bytes);
        }
    }
}

extern "C" void fs_add_layer_norm(int64_t dtype, const void* x, const void* residual,
                                  const void* weight, const void* bias, void* sum, void* normed,
                                  int64_t rows, int64_t size, int64_t x_stride,
                                  int64_t residual_stride, double eps) {
    using namespace fastserve;
    if (dtype == kBFloat16)
        return add_layer_norm((const bf16*)x, (const bf16*)residual, (const bf16*)weight,
                              (const bf16*)bias, (bf16*)sum, (bf16*)normed, rows, size, x_stride,
                              residual_stride, (float)eps);
    add_layer_norm((const float*)x, (const float*)residual, (const float*)weight,
                   (const float*)bias, (float*)sum, (float*)normed, rows, size, x_stride,
                   residual_stride, (float)eps);
}

extern "C" void fs_add_rms_norm(int64_t dtype, const void* x, const void* residual,
                                const void* weight, void* sum, void* normed, int64_t rows,
                                int64_t size, int64_t x_stride, int64_t residual_stride,
                                double eps) {
    using namespace fastserve;
    if (dtype == kBFloat16)
        return add_rms_norm((const bf16*)x, (const bf16*)residual, (const bf16*)weight, (bf16*)sum,
                            (bf16*)normed, rows, size, x_stride, residual_stride, (float)eps);
    add_rms_norm((const float*)x, (const float*)residual, (const float*)weight, (float*)sum,
                 (float*)normed, rows, size, x_stride, residual_stride, (float)eps);
}

extern "C" void fs_rotate(int64_t dtype, void* x, const float* cos_sin, int64_t tokens,
                          int64_t heads, int64_t half, int64_t stride_t, int64_t stride_h) {
    using namespace fastserve;
    if (dtype == kBFloat16)
        return rotate((bf16*)x, cos_sin, tokens, heads, half, stride_t, stride_h);
    rotate((float*)x, cos_sin, tokens, heads, half, stride_t, stride_h);
}

extern "C" void fs_silu_mul(int64_t dtype, const void* x, void* out, int64_t rows, int64_t size,
                            int64_t stride) {
    using namespace fastserve;
    if (dtype == kBFloat16) return silu_mul((const bf16*)x, (bf16*)out, rows, size, stride);
    silu_mul((const float*)x, (float*)out, rows, size, stride);
}

extern "C" void fs_argmax_rows(int64_t dtype, const void* x, int64_t* out, int64_t rows,
                               int64_t size, int64_t stride) {
    using namespace fastserve;
    if (dtype == kBFloat16)
        return argmax_rows((const bf16*)x, out, rows, size, stride);
    argmax_rows((const float*)x, out, rows, size, stride);
}
