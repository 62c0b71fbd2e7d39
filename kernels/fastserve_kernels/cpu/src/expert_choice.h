// The router of a mixture: see `RoutingRule` in routing_rule.py.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "team.h"
#include "vec.h"

namespace fastserve {

struct RoutingRule {
    bool is_sigmoid, renormalises;
    int64_t groups, chosen_groups;
    float factor, margin;  // margin < 0: none
};

static bool is_higher(float score, float other) {
    return score > other || (score != score && other == other);
}

// The `choices` highest of `count` values, the highest first; of equal ones the lower number comes
// first, and a NaN is higher than all others, as in torch.
template <typename V>
static void find_highest(const V& value, int64_t count, int64_t choices, float* best,
                         int64_t* numbers) {
    for (int64_t i = 0; i < count; ++i) {
        const float one = value(i);
        int64_t place = std::min(i, choices);
        while (place > 0 && is_higher(one, best[place - 1])) --place;
        if (place == choices) continue;
        for (int64_t j = std::min(i, choices - 1); j > place; --j) {
            best[j] = best[j - 1];
            numbers[j] = numbers[j - 1];
        }
        best[place] = one;
        numbers[place] = i;
    }
}

// Makes the keys of all groups but the best ones -inf. Each group has `size` keys.
static void leave_best_groups(float* keys, int64_t size, const RoutingRule& rule) {
    const auto sum_of_two = [&](int64_t group) {
        float best[2] = {0.f, 0.f};
        int64_t numbers[2];
        const float* own = keys + group * size;
        find_highest([&](int64_t i) { return own[i]; }, size, std::min<int64_t>(size, 2), best,
                     numbers);
        return best[0] + best[1];
    };
    std::vector<float> sums(rule.chosen_groups);
    std::vector<int64_t> chosen(rule.chosen_groups);
    find_highest(sum_of_two, rule.groups, rule.chosen_groups, sums.data(), chosen.data());
    for (int64_t group = 0; group < rule.groups; ++group) {
        if (std::find(chosen.begin(), chosen.end(), group) == chosen.end()) {
            std::fill_n(keys + group * size, size, -std::numeric_limits<float>::infinity());
        }
    }
}

// The weight of the chosen score `high`, if `chosen` are those before it.
template <typename V>
static float weight_within_margin(const V& score, int64_t count, float high, const int64_t* chosen,
                                  int64_t num_chosen, float margin) {
    float sum = 0.f;
    for (int64_t i = 0; i < count; ++i) {
        const float one = score(i), size = std::max(std::abs(one), high);
        const bool is_far = (high - one) / size > margin;
        if (is_far || std::find(chosen, chosen + num_chosen, i) != chosen + num_chosen) continue;
        sum += std::exp(one - high);
    }
    return 1.f / sum;
}

// bias: of each expert, or null.
template <typename T>
static void choose(const Team* team, const T* scores, const float* bias, float* weights,
                   int64_t* chosen, int64_t rows, int64_t count, int64_t choices, int64_t stride,
                   const RoutingRule& rule) {
    constexpr float LEAST_SUM = 1e-20f;  // as in transformers
    for_rows(team, rows, count * choices, [=](int64_t r) {
        const T* row = scores + r * stride;
        float* const best = weights + r * choices;
        int64_t* const numbers = chosen + r * choices;
        const auto score = [&](int64_t i) { return to_float(row[i]); };
        const auto logistic = [&](int64_t i) { return 1.f / (1.f + std::exp(-score(i))); };
        float high = 0.f, of_all = 1.f;  // of softmax
        if (!rule.is_sigmoid && (bias || rule.groups > 1 || !rule.renormalises)) {
            float one;
            int64_t number;
            find_highest(score, count, 1, &one, &number);
            high = one;
            of_all = 0.f;
            for (int64_t i = 0; i < count; ++i) of_all += std::exp(score(i) - high);
        }
        if (bias || rule.groups > 1) {
            std::vector<float> keys(count);
            for (int64_t i = 0; i < count; ++i) {
                const float part = rule.is_sigmoid ? logistic(i) : std::exp(score(i) - high) / of_all;
                keys[i] = bias ? part + bias[i] : part;
            }
            if (rule.groups > 1) leave_best_groups(keys.data(), count / rule.groups, rule);
            find_highest([&](int64_t i) { return keys[i]; }, count, choices, best, numbers);
        } else {
            find_highest(score, count, choices, best, numbers);
        }
        if (rule.margin >= 0.f) {
            for (int64_t i = 0; i < choices; ++i) {
                best[i] = weight_within_margin(score, count, score(numbers[i]), numbers, i,
                                               rule.margin);
            }
        } else if (rule.is_sigmoid) {
            for (int64_t i = 0; i < choices; ++i) best[i] = logistic(numbers[i]);
        } else {
            if (rule.renormalises) {  // whatever the sum over all was
                high = score(numbers[0]);
                for (int64_t i = 1; i < choices; ++i) high = std::max(high, score(numbers[i]));
                of_all = 1.f;
            }
            for (int64_t i = 0; i < choices; ++i) best[i] = std::exp(score(numbers[i]) - high) / of_all;
        }
        float sum = 1.f;
        if (rule.renormalises) {
            sum = rule.is_sigmoid ? LEAST_SUM : 0.f;
            for (int64_t i = 0; i < choices; ++i) sum += best[i];
        }
        for (int64_t i = 0; i < choices; ++i) best[i] = best[i] / sum * rule.factor;
    });
}

}  // namespace fastserve
