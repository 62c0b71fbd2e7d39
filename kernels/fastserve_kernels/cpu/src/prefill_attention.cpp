// Causal attention over the fresh keys of whole prompts, as matrix products: scores of a tile of queries
// with panels of keys, then their weights with the rows of values. A query's result depends on its own
// context only, never on what else is in the batch.
#include <algorithm>
#include <vector>

#include "online_softmax.h"
#include "panels.h"

namespace fastserve {

static_assert(CHUNK % PAIR == 0);

struct PrefillArgs {
    const void *query, *key, *value;
    void* out;
    const int64_t* ranges;  // [count, 2] row ranges
    int64_t count, heads, kv_heads, dim;
    int64_t query_stride_t, query_stride_h, key_stride_t, key_stride_h, value_stride_t,
        value_stride_h, out_stride_t;
    float scale;
};

// Some rows of a prompt, which begins at row `start` and whose panels begin at `first_panel`.
struct PromptRows {
    int64_t start, first, end, first_panel;
};

// The rows of each prompt, `height` at a time.
static std::vector<PromptRows> cut_prompts(const PrefillArgs& a, int64_t height) {
    std::vector<PromptRows> parts;
    int64_t panel = 0;
    for (int64_t r = 0; r < a.count; ++r) {
        const int64_t start = a.ranges[2 * r], end = a.ranges[2 * r + 1];
        for (int64_t t = start; t < end; t += height)
            parts.push_back({start, t, std::min(t + height, end), panel});
        panel += (end - start + PAIR - 1) / PAIR;
    }
    return parts;
}

// Scores of M queries, which are packed in x, with `count` keys from a panel on.
template <typename T, int M>
static void score(Query* queries, const typename Dot<T>::X* x, const T* panel, int64_t steps,
                  int count, float scale) {
    for (int i = 0; i < count; i += PAIR, panel += steps * STEP_SIZE<T>) {
        Pair sums[M][1] = {};
        add_products<T, M, 1>(sums, x, panel, 0, steps);
        for (int m = 0; m < M; ++m)
            store_in_order<T>(queries[m].weights + i, {sums[m][0].a * scale, sums[m][0].b * scale});
    }
}

// Adds `count` rows of values, by the weights of M queries.
template <typename T, int M>
static void add_values(Query* queries, const T* values, int64_t stride, int count, int size) {
    for (int c = 0; c < size; c += PAIR) {
        const int width = std::min(PAIR, size - c);
        Pair sums[M];
        for (int m = 0; m < M; ++m) {
            const Pair acc = load_pair(queries[m].acc + c);
            sums[m] = {acc.a * queries[m].rescale, acc.b * queries[m].rescale};
        }
        for (int i = 0; i < count; ++i) {
            const Pair v = load_pair_n(values + i * stride + c, width);
            for (int m = 0; m < M; ++m) {
                sums[m].a += queries[m].weights[i] * v.a;
                sums[m].b += queries[m].weights[i] * v.b;
            }
        }
        for (int m = 0; m < M; ++m) store_pair(queries[m].acc + c, sums[m]);
    }
}

// From the scores of a chunk's `count` positions to weights; `left` of its context are not before it.
static void weigh(Query& query, int64_t left, int count) {
    const int seen = (int)std::clamp<int64_t>(left, 0, count);
    query.rescale = 1.f;
    if (seen > 0) query.softmax(seen);
    std::fill(query.weights + seen, query.weights + count, 0.f);
}

template <typename T>
static void prefill(const PrefillArgs& a) {
    using X = typename Dot<T>::X;
    // Kept between calls: a fresh large buffer would be page-faulted in every time.
    static thread_local std::vector<T> packed_keys;
    const int64_t group = a.heads / a.kv_heads;
    const int64_t steps = steps_of<T>(a.dim), panel_size = steps * STEP_SIZE<T>;
    const std::vector<PromptRows> panels = cut_prompts(a, PAIR);
    const int64_t num_panels = (int64_t)panels.size();
    packed_keys.resize(a.kv_heads * num_panels * panel_size);
    T* const keys = packed_keys.data();
    std::vector<PromptRows> tiles = cut_prompts(a, TILE_ROWS);
    // Those that take longest first, so that no thread is left with one at the end.
    std::stable_sort(tiles.begin(), tiles.end(), [](const PromptRows& x, const PromptRows& y) {
        return x.end - x.start > y.end - y.start;
    });
#pragma omp parallel
    {
#pragma omp for schedule(static)
        for (int64_t item = 0; item < num_panels * a.kv_heads; ++item) {
            const PromptRows& rows = panels[item % num_panels];
            const int64_t kv_head = item / num_panels;
            pack_panel((const T*)a.key + rows.first * a.key_stride_t + kv_head * a.key_stride_h,
                       rows.end - rows.first, a.dim, a.key_stride_t, keys + item * panel_size);
        }
        const int64_t num_tiles = (int64_t)tiles.size(), pairs = (a.dim + PAIR - 1) / PAIR;
        std::vector<float> memory(TILE_ROWS * group * pairs * PAIR);
        std::vector<Query> queries(TILE_ROWS * group);
        std::vector<X> packed(TILE_ROWS * group * steps);
        // Head by head, so that its keys and values stay in the second-level cache.
#pragma omp for schedule(dynamic, 1)
        for (int64_t item = 0; item < num_tiles * a.kv_heads; ++item) {
            const PromptRows& tile = tiles[item % num_tiles];
            const int64_t kv_head = item / num_tiles;
            const int64_t count = (tile.end - tile.first) * group;  // of queries
            // f(the first of some queries, how many these are).
            const auto for_each_tile = [&](const auto& f) {
                for (int64_t i = 0; i < count; i += TILE_ROWS)
                    with_rows<TILE_ROWS>(std::min<int64_t>(TILE_ROWS, count - i),
                                         [&](auto height) { f(i, height); });
            };
            for (int64_t i = 0; i < count; ++i)
                queries[i].begin(memory.data() + i * pairs * PAIR, (int)pairs);
            for_each_tile([&](int64_t first, auto height) {
                const auto row_of = [&](int64_t m) {
                    const int64_t i = first + m;
                    return (const T*)a.query + (tile.first + i / group) * a.query_stride_t +
                           (kv_head * group + i % group) * a.query_stride_h;
                };
                pack_tile<T>(row_of, height, a.dim, packed.data() + first * steps);
            });
            const T* panel = keys + (kv_head * num_panels + tile.first_panel) * panel_size;
            const T* values = (const T*)a.value + tile.start * a.value_stride_t +
                              kv_head * a.value_stride_h;
            const int64_t context = tile.end - tile.start;
            for (int64_t position = 0; position < context; position += CHUNK) {
                const int chunk = (int)std::min<int64_t>(CHUNK, context - position);
                for_each_tile([&](int64_t first, auto height) {
                    score<T, decltype(height)::value>(
                        queries.data() + first, packed.data() + first * steps,
                        panel + position / PAIR * panel_size, steps, chunk, a.scale * LOG2E);
                });
                for (int64_t i = 0; i < count; ++i) {
                    const int64_t own_context = tile.first + i / group - tile.start + 1;
                    weigh(queries[i], own_context - position, chunk);
                }
                for_each_tile([&](int64_t first, auto height) {
                    add_values<T, decltype(height)::value>(
                        queries.data() + first, values + position * a.value_stride_t,
                        a.value_stride_t, chunk, (int)a.dim);
                });
            }
            for (int64_t i = 0; i < count; ++i)
                queries[i].finish((T*)a.out + (tile.first + i / group) * a.out_stride_t +
                                      (kv_head * group + i % group) * a.dim,
                                  (int)a.dim);
        }
    }
}

}  // namespace fastserve

extern "C" void fs_prefill_attention(
    int64_t dtype, const void* query, const void* key, const void* value, void* out,
    const int64_t* ranges, int64_t count, int64_t heads, int64_t kv_heads, int64_t dim,
    int64_t query_stride_t, int64_t query_stride_h, int64_t key_stride_t, int64_t key_stride_h,
    int64_t value_stride_t, int64_t value_stride_h, int64_t out_stride_t, double scale) {
    const fastserve::PrefillArgs args{
        query, key, value, out, ranges, count, heads, kv_heads, dim, query_stride_t,
        query_stride_h, key_stride_t, key_stride_h, value_stride_t, value_stride_h, out_stride_t,
        (float)scale};
    if (dtype == fastserve::kBFloat16) return fastserve::prefill<fastserve::bf16>(args);
    fastserve::prefill<float>(args);
}
