// Functions between the products of a feed-forward block.
#pragma once

#include "vec.h"

namespace fastserve {

// x / (1 + e^-y), by e^-|y| alone, which cannot overflow.
static inline vf times_sigmoid(vf x, vf y) {
    constexpr float LOG2_E = 1.44269504f;
    const vf magnitude = vmax(y, -y);
    const vf small = exp2_nonpositive(-magnitude * LOG2_E);  // e^-|y|
    const vf numerator = y > splat(0.f) ? splat(1.f) : small;
    return x * numerator / (small + 1.f);
}

static inline vf silu(vf x) { return times_sigmoid(x, x); }

// x (1 + tanh(u)) / 2, as tanh(u) = 2 sigmoid(2u) - 1.
static inline vf gelu_tanh(vf x) {
    constexpr float LINEAR = 1.5957691216f, CUBIC = 0.0713548163f;  // sqrt(8/pi) {1, 0.044715}
    return times_sigmoid(x, x * (x * x * CUBIC + LINEAR));
}

// x (1 + erf(x / sqrt 2)) / 2. The polynomials of erf(t) and of log(1 - erf(t)) are minimax fits, good to 1e-7;
// which one is taken depends on t.
static inline vf gelu(vf x) {
    constexpr float INVERSE_SQRT2 = 0.70710678f, SPLIT = 0.92773438f, LOG2_E = 1.44269504f;
    const vf t = magnitude(x) * INVERSE_SQRT2, s = t * t;
    vf near = s * -5.96761703e-4f + 4.99119423e-3f;
    near = near * s - 2.67681349e-2f;
    near = near * s + 1.12819925e-1f;
    near = near * s - 3.76125336e-1f;
    near = near * s + 1.28379166e-1f;
    near = near * t + t;
    vf far = (t * -1.72853470e-5f + 3.83197126e-4f) * s + (t * -3.88396438e-3f + 2.42546219e-2f);
    far = far * t - 1.06777877e-1f;
    far = far * t - 6.34846687e-1f;
    far = far * t - 1.28717512e-1f;
    far = exp2_nonpositive((far * t - t) * LOG2_E);
    const vf rest = (t > splat(SPLIT) ? far : 1.f - near) * 0.5f;  // (1 - erf(t)) / 2
    return x * (x > splat(0.f) ? 1.f - rest : rest);
}

static inline vf relu(vf x) { return x < splat(0.f) ? vf{} : x; }  // a NaN stays one

// f(the function with this number): see ACTIVATIONS in compiled.py.
template <typename F>
static inline void with_activation(int64_t number, const F& f) {
    switch (number) {
        case 0: return f([](vf x) { return silu(x); });
        case 1: return f([](vf x) { return gelu(x); });
        case 2: return f([](vf x) { return gelu_tanh(x); });
        case 3: return f([](vf x) { return relu(x); });
        case 4: return f([](vf x) { return relu(x) * relu(x); });
    }
}

}  // namespace fastserve
