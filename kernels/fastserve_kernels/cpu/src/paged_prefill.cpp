// Causal attention of prompts, or chunks of them, over the paged cache, as matrix products: scores of a
// tile of queries with panels of keys, then their weights with the rows of values. A query's result
// depends on its own context only, never on what else is in the batch or how a prompt is cut.
#include <algorithm>
#include <vector>

#include "online_softmax.h"
#include "paged_rows.h"
#include "panels.h"

namespace fastserve {

static_assert(CHUNK % PAIR == 0);

struct PrefillArgs {
    const void *query, *kv;
    void* out;
    const int32_t *block_tables, *context_lens;
    const int32_t* query_starts;  // [jobs + 1]
    int64_t jobs, heads, kv_heads, dim, block_size, layers, layer;
    int64_t query_stride_t, query_stride_h, out_stride_t, table_stride;
    float scale;

    // Positions that a row of a job's sees: the last row sees the whole context.
    int64_t context_of(int64_t job, int64_t row) const {
        return context_lens[job] - (query_starts[job + 1] - 1 - row);
    }
};

// Up to TILE_ROWS rows of a job.
struct Tile {
    int64_t job, first, end;
};

// Of the keys of up to PAIR positions of a job.
struct Panel {
    int64_t job, first_position;
};

// Scores of M queries, which are packed in x, with `count` keys from a panel on.
template <typename T, int M>
static void score(Query* queries, const typename Dot<T>::X* x, const T* panel, int64_t steps,
                  int count, float scale) {
    for (int i = 0; i < count; i += PAIR, panel += steps * STEP_SIZE<T>) {
        Pair sums[M] = {};
        add_products<T, M>(sums, x, panel, steps, next_panel(panel, steps, 0, 1));
        for (int m = 0; m < M; ++m)
            store_in_order<T>(queries[m].weights + i, {sums[m].a * scale, sums[m].b * scale});
    }
}

// Adds `count` rows of values, by the weights of M queries.
template <typename T, int M>
static void add_values(Query* queries, const T* const* values, int64_t head_offset, int count,
                       int size) {
    for (int c = 0; c < size; c += PAIR) {
        const int width = std::min(PAIR, size - c);
        Pair sums[M];
        for (int m = 0; m < M; ++m) {
            const Pair acc = load_pair(queries[m].acc + c);
            sums[m] = {acc.a * queries[m].rescale, acc.b * queries[m].rescale};
        }
        for (int i = 0; i < count; ++i) {
            const Pair v = load_pair_n(values[i] + head_offset + c, width);
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
    static thread_local std::vector<const T*> located_values;
    const PagedCache<T> cache(a.kv, a.layers, a.layer, a.kv_heads, a.block_size, a.dim);
    const int64_t group = a.heads / a.kv_heads;
    const int64_t steps = steps_of<T>(a.dim), panel_size = steps * STEP_SIZE<T>;
    std::vector<Panel> panels;
    std::vector<int64_t> first_panels;  // of each job
    std::vector<Tile> tiles;
    for (int64_t job = 0; job < a.jobs; ++job) {
        first_panels.push_back((int64_t)panels.size());
        for (int64_t position = 0; position < a.context_lens[job]; position += PAIR)
            panels.push_back({job, position});
        const int64_t end = a.query_starts[job + 1];
        for (int64_t row = a.query_starts[job]; row < end; row += TILE_ROWS)
            tiles.push_back({job, row, std::min<int64_t>(row + TILE_ROWS, end)});
    }
    const auto context_of = [&](const Tile& tile) { return a.context_of(tile.job, tile.end - 1); };
    // Those that take longest first, so that no thread is left with one at the end.
    std::stable_sort(tiles.begin(), tiles.end(), [&](const Tile& x, const Tile& y) {
        return context_of(x) > context_of(y);
    });
    const int64_t num_panels = (int64_t)panels.size(), num_tiles = (int64_t)tiles.size();
    packed_keys.resize(a.kv_heads * num_panels * panel_size);
    T* const keys = packed_keys.data();
    located_values.resize(num_panels * PAIR);
    const T** const values = located_values.data();  // of the first head, as the panels
#pragma omp parallel
    {
#pragma omp for schedule(static)
        for (int64_t item = 0; item < num_panels; ++item) {
            const auto [job, first] = panels[item];
            const int count = (int)std::min<int64_t>(PAIR, a.context_lens[job] - first);
            const T* key_rows[PAIR];
            cache.locate(a.block_tables + job * a.table_stride, first, count, key_rows,
                         values + item * PAIR);
            for (int64_t kv_head = 0; kv_head < a.kv_heads; ++kv_head)
                pack_panel([&](int64_t n) { return key_rows[n] + kv_head * cache.head_stride; },
                           count, a.dim, keys + (kv_head * num_panels + item) * panel_size);
        }
        const int64_t pairs = (a.dim + PAIR - 1) / PAIR;
        std::vector<float> memory(TILE_ROWS * group * pairs * PAIR);
        std::vector<Query> queries(TILE_ROWS * group);
        std::vector<X> packed(TILE_ROWS * group * steps);
        // Head by head, so that its keys and values stay in the second-level cache.
#pragma omp for schedule(dynamic, 1)
        for (int64_t item = 0; item < num_tiles * a.kv_heads; ++item) {
            const Tile& tile = tiles[item % num_tiles];
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
            const int64_t first_panel = first_panels[tile.job];
            const T* panel = keys + (kv_head * num_panels + first_panel) * panel_size;
            const int64_t context = context_of(tile);
            for (int64_t position = 0; position < context; position += CHUNK) {
                const int chunk = (int)std::min<int64_t>(CHUNK, context - position);
                for_each_tile([&](int64_t first, auto height) {
                    score<T, decltype(height)::value>(
                        queries.data() + first, packed.data() + first * steps,
                        panel + position / PAIR * panel_size, steps, chunk, a.scale * LOG2E);
                });
                for (int64_t i = 0; i < count; ++i)
                    weigh(queries[i], a.context_of(tile.job, tile.first + i / group) - position,
                          chunk);
                for_each_tile([&](int64_t first, auto height) {
                    add_values<T, decltype(height)::value>(
                        queries.data() + first, values + first_panel * PAIR + position,
                        kv_head * cache.head_stride, chunk, (int)a.dim);
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

extern "C" void fs_paged_prefill(
    int64_t dtype, const void* query, const void* kv, void* out, const int32_t* block_tables,
    const int32_t* context_lens, const int32_t* query_starts, int64_t jobs, int64_t heads,
    int64_t kv_heads, int64_t dim, int64_t block_size, int64_t layers, int64_t layer,
    int64_t query_stride_t, int64_t query_stride_h, int64_t out_stride_t, int64_t table_stride,
    double scale) {
    const fastserve::PrefillArgs args{
        query, kv, out, block_tables, context_lens, query_starts, jobs, heads, kv_heads, dim,
        block_size, layers, layer, query_stride_t, query_stride_h, out_stride_t, table_stride,
        (float)scale};
    fastserve::with_type(dtype, [&](auto type) { fastserve::prefill<decltype(type)>(args); });
}
