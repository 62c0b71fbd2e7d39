// What turns scores into attention: see attention_rule.py.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

namespace fastserve {

constexpr float LOG2E = 1.44269504088896340736f;

struct AttentionRule {
    float scale;     // to the log2 domain, of scores, or of their tanh
    float in_tanh;   // of scores in their tanh; 0: they have none
    int64_t window;  // at least the longest context, if there is none
    const float* sinks;  // [heads], or null

    AttentionRule(double scale, int64_t window, double soft_cap, const float* sinks)
        : scale((float)(soft_cap > 0 ? soft_cap : scale) * LOG2E),
          in_tanh(soft_cap > 0 ? (float)(scale / soft_cap) : 0.f),
          window(window),
          sinks(sinks) {}

    // Of a row that sees `context` positions, or fewer of their last ones.
    int64_t first_visible(int64_t context) const { return std::max<int64_t>(0, context - window); }
    // Of a query head, in the log2 domain.
    float sink_of(int64_t head) const { return sinks ? sinks[head] * LOG2E : -INFINITY; }
};

}  // namespace fastserve
