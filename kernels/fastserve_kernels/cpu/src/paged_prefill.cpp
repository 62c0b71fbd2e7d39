// Causal attention of prompts, or chunks of them, over the paged cache, as matrix products: scores of a
// tile of queries with panels of keys, then their weights with panels of values. A query's result
// depends on its own context only, never on what else is in the batch or how a prompt is cut.
#include <algorithm>
#include <type_traits>
#include <vector>

#include "aligned.h"
#include "int8_tokens.h"
#include "online_softmax.h"
#include "paged_rows.h"
#include "products.h"
#include "team.h"

namespace fastserve {

// Positions at a time. (64 at a time: up to a fifth slower.)
constexpr int CHUNK = 256;
static_assert(CHUNK % PAIR == 0);

using PromptQuery = Query<CHUNK>;

struct PrefillArgs {
    const void *query, *kv;
    void* out;
    const int32_t *block_tables, *table_starts, *context_lens;
    const int32_t* query_starts;  // [jobs + 1]
    int64_t jobs, heads, kv_heads, key_dim, value_dim, width, block_size, layers, layer;
    int64_t query_stride_t, query_stride_h, out_stride_t;
    AttentionRule rule;

    // A row of a job's sees positions up to there: the last row sees the whole context.
    int64_t context_of(int64_t job, int64_t row) const {
        return context_lens[job] - (query_starts[job + 1] - 1 - row);
    }
    int64_t first_visible(int64_t job, int64_t row) const {
        return rule.first_visible(context_of(job, row));
    }
};

// Up to Product::ROWS rows of a job.
struct Tile {
    int64_t job, first, end;
};

// Up to CHUNK positions of a job. The first one is a multiple of CHUNK, so that a row's sums do not
// depend on the rows beside it.
struct Chunk {
    int64_t job, first_position;
    int64_t first_panel;  // of keys, of each head
    int unseen;           // of the positions, the first ones, which are not read
    int count;            // of positions

    int64_t num_panels() const { return (count + PAIR - 1) / PAIR; }
};

// A head's rows of a chunk, as T. Of the unseen ones, any number will do: they are the first seen one.
template <typename T, typename S>
class RowsOfType {
   public:
    // rows: those that are seen.
    RowsOfType(const Rows<S, CHUNK>& rows, const Chunk& chunk, int64_t offset, int64_t dim) {
        const int seen = chunk.count - chunk.unseen;
        if constexpr (std::is_same_v<T, S>) {
            for (int i = 0; i < seen; ++i) {
                const T* const row = rows_[chunk.unseen + i] = rows.at[i] + offset;
                // Blocks are far apart: the processor does not see which rows come next.
                for (int64_t line = 0; line < dim; line += 64 / (int64_t)sizeof(T))
                    __builtin_prefetch(row + line);
            }
        } else {
            widened_.resize(seen * dim);
            for (int i = 0; i < seen; ++i) {
                T* row = widened_.data() + i * dim;
                widen_token(rows.at[i] + offset, rows.scale(i, offset), dim, row);
                rows_[chunk.unseen + i] = row;
            }
        }
        std::fill_n(rows_, chunk.unseen, rows_[chunk.unseen]);
    }
    const T* operator[](int64_t i) const { return rows_[i]; }

   private:
    const T* rows_[CHUNK];
    std::vector<T> widened_;
};

// Apart from `weigh`, whose other branch nearly all chunks take.
template <typename T>
__attribute__((noinline)) static void softmax_within(PromptQuery& query, int begin, int end,
                                                     float scale) {
    query.softmax<T>(begin, end, scale);
}

// From the scores [first, count) of a chunk's to packed weights, and makes the output ready to add to.
// `first` is a multiple of PAIR. The query sees the positions [begin, end), counted from the chunk's first.
template <typename T>
static void weigh(PromptQuery& query, int64_t begin, int64_t end, int first, int count, float scale,
                  int64_t acc_size) {
    int seen_end = (int)std::clamp<int64_t>(end, 0, count);
    int seen_begin = (int)std::clamp<int64_t>(begin, 0, seen_end);
    query.rescale = 1.f;
    if (seen_begin == seen_end)
        seen_begin = seen_end = 0;
    else if (seen_begin == 0)
        query.softmax<T>(FromStart(), seen_end, scale);
    else
        softmax_within<T>(query, seen_begin, seen_end, scale);
    const int seen_first = seen_begin / PAIR * PAIR;
    for (int i = first; i < count; i += PAIR) {
        const bool is_seen = seen_first <= i && i < seen_end;
        const Pair weights = is_seen ? load_pair(query.weights + i) : Pair{};
        Dot<T>::pack_pair((typename Dot<T>::X*)query.weights + i / Dot<T>::DEPTH, weights);
    }
    for (int64_t i = 0; i < acc_size; i += W)
        *(vf_mem*)(query.acc + i) = *(const vf_mem*)(query.acc + i) * query.rescale;
}

// Queries of T over a cache of S, whose codes are widened to T as they are packed.
template <typename T, typename S>
static void prefill(const Team* team, const PrefillArgs& a) {
    using P = Product<T>;
    using X = typename P::X;
    constexpr int64_t QUERY_SIZE = sizeof(PromptQuery) / sizeof(float);
    static_assert(sizeof(X) == sizeof(float), "packed weights take the place of scores");
    const PagedCache<S> cache(a.kv, a.layers, a.layer, a.kv_heads, a.block_size, a.width);
    const int64_t group = a.heads / a.kv_heads;
    const int64_t steps = steps_of<T>(a.key_dim), pairs = (a.value_dim + PAIR - 1) / PAIR;
    const int64_t acc_size = pairs * PAIR;
    const int64_t key_panel = steps * STEP_SIZE<T>;
    std::vector<Chunk> chunks;
    std::vector<int64_t> first_chunks;  // of each job
    int64_t num_panels = 0;
    std::vector<Tile> tiles;
    for (int64_t job = 0; job < a.jobs; ++job) {
        first_chunks.push_back((int64_t)chunks.size());
        const int64_t seen = a.first_visible(job, a.query_starts[job]);
        for (int64_t position = seen / CHUNK * CHUNK; position < a.context_lens[job];
             position += CHUNK) {
            const int unseen = (int)std::max<int64_t>(seen - position, 0);
            const int count = (int)std::min<int64_t>(CHUNK, a.context_lens[job] - position);
            chunks.push_back({job, position, num_panels, unseen, count});
            num_panels += chunks.back().num_panels();
        }
        const int64_t end = a.query_starts[job + 1];
        for (int64_t row = a.query_starts[job]; row < end; row += P::ROWS)
            tiles.push_back({job, row, std::min<int64_t>(row + P::ROWS, end)});
    }
    const auto context_of = [&](const Tile& tile) { return a.context_of(tile.job, tile.end - 1); };
    const auto seen_by = [&](const Tile& tile) {
        return context_of(tile) - a.first_visible(tile.job, tile.first);
    };
    // Those that take longest first, so that no thread is left with one at the end.
    std::stable_sort(tiles.begin(), tiles.end(), [&](const Tile& x, const Tile& y) {
        return seen_by(x) > seen_by(y);
    });
    const int64_t num_chunks = (int64_t)chunks.size(), num_tiles = (int64_t)tiles.size();
    in_team(team, true, [&](const Team& own) {
        T* const packed_keys = own.buffer<T>(0, a.kv_heads * num_panels * key_panel);
        T* const packed_values = own.buffer<T>(1, a.kv_heads * num_panels * PAIR * acc_size);
        // Of a chunk and head: keys are [num_panels()] panels, values [pairs], of as many steps.
        const auto keys_of = [&](const Chunk& chunk, int64_t kv_head) {
            return packed_keys + (kv_head * num_panels + chunk.first_panel) * key_panel;
        };
        const auto values_of = [&](const Chunk& chunk, int64_t kv_head) {
            return packed_values + (kv_head * num_panels + chunk.first_panel) * PAIR * acc_size;
        };
        const auto value_panel_of = [](const Chunk& chunk) {
            return chunk.num_panels() * PAIR * PAIR;
        };
        [[maybe_unused]] const typename P::Unit unit{};
        own.deal(num_tiles * a.kv_heads);
        const auto [first_item, end_item] = own.part(num_chunks * a.kv_heads);
        for (int64_t item = first_item; item < end_item; ++item) {
            const Chunk& chunk = chunks[item % num_chunks];
            const int64_t kv_head = item / num_chunks, offset = kv_head * cache.head_stride;
            Rows<S, CHUNK> keys, values;
            cache.locate(a.block_tables + a.table_starts[chunk.job],
                         chunk.first_position + chunk.unseen, chunk.count - chunk.unseen, keys,
                         values);
            const RowsOfType<T, S> key_rows(keys, chunk, offset, a.key_dim);
            const RowsOfType<T, S> value_rows(values, chunk, offset, a.value_dim);
            for (int64_t p = 0; p < chunk.num_panels(); ++p)
                pack_panel([&](int64_t n) { return key_rows[p * PAIR + n]; },
                           chunk.count - p * PAIR, a.key_dim,
                           keys_of(chunk, kv_head) + p * key_panel);
            for (int64_t c = 0; c < pairs; ++c)
                pack_panel_by_rows([&](int64_t k) { return value_rows[k] + c * PAIR; },
                                   a.value_dim - c * PAIR, chunk.count,
                                   values_of(chunk, kv_head) + c * value_panel_of(chunk));
        }
        own.barrier();
        AlignedVector<float> memory(P::ROWS * group * acc_size);
        std::vector<PromptQuery> queries(P::ROWS * group);
        AlignedVector<X> packed(P::ROWS * group * steps);
        // Head by head, so that its keys and values stay in the second-level cache.
        for (int64_t item; (item = own.take()) >= 0;) {
            const Tile& tile = tiles[item % num_tiles];
            const int64_t kv_head = item / num_tiles;
            const int64_t count = (tile.end - tile.first) * group;  // of queries
            // f(the first of some queries, how many these are).
            const auto for_each_tile = [&](const auto& f) {
                for (int64_t i = 0; i < count; i += P::ROWS)
                    f(i, std::min<int64_t>(P::ROWS, count - i));
            };
            for (int64_t i = 0; i < count; ++i)
                queries[i].begin(memory.data() + i * acc_size, (int)pairs,
                                 a.rule.sink_of(kv_head * group + i % group));
            for_each_tile([&](int64_t first, int64_t height) {
                const auto row_of = [&](int64_t m) {
                    const int64_t i = first + m;
                    return (const T*)a.query + (tile.first + i / group) * a.query_stride_t +
                           (kv_head * group + i % group) * a.query_stride_h;
                };
                P::pack(row_of, height, a.key_dim, packed.data() + first * steps);
            });
            const int64_t context = context_of(tile);
            const int64_t first_visible = a.first_visible(tile.job, tile.first);
            const Chunk* chunk = &chunks[first_chunks[tile.job]];
            chunk += first_visible / CHUNK - chunk->first_position / CHUNK;
            for (int64_t position = chunk->first_position; position < context;
                 position += CHUNK, ++chunk) {
                const int seen = (int)std::min<int64_t>(CHUNK, context - position);
                // Panels before it are of positions that no row of the tile sees.
                const int begin =
                    (int)std::max<int64_t>(first_visible - position, 0) / PAIR * PAIR;
                for_each_tile([&](int64_t first, int64_t height) {
                    const T* panel = keys_of(*chunk, kv_head) + begin / PAIR * key_panel;
                    for (int i = begin; i < seen; i += PAIR, panel += key_panel)
                        P::of_tile(queries[first].weights + i, QUERY_SIZE,
                                   packed.data() + first * steps, height, panel, 0, steps,
                                   next_panel<T>(panel, steps, 0, 1));
                });
                if (a.rule.in_tanh != 0.f)
                    for (int64_t i = 0; i < count; ++i) queries[i].cap(begin, seen, a.rule.in_tanh);
                for (int64_t i = 0; i < count; ++i) {
                    const int64_t end = a.context_of(tile.job, tile.first + i / group);
                    weigh<T>(queries[i], a.rule.first_visible(end) - position, end - position, begin,
                             seen, a.rule.scale, acc_size);
                }
                for_each_tile([&](int64_t first, int64_t height) {
                    const T* panel = values_of(*chunk, kv_head);
                    const int64_t all_steps = value_panel_of(*chunk) / STEP_SIZE<T>;
                    const int64_t skipped = steps_of<T>(begin);
                    for (int64_t c = 0; c < pairs; ++c, panel += value_panel_of(*chunk))
                        P::template add_rows<QUERY_SIZE>(
                            queries[first].acc + c * PAIR, acc_size,
                            (const X*)queries[first].weights + skipped, height,
                            panel + skipped * STEP_SIZE<T>, steps_of<T>(seen) - skipped,
                            next_panel<T>(panel, all_steps, 0, 1));
                });
            }
            for (int64_t i = 0; i < count; ++i)
                queries[i].finish((T*)a.out + (tile.first + i / group) * a.out_stride_t +
                                      (kv_head * group + i % group) * a.value_dim,
                                  (int)a.value_dim);
        }
    });
}

static void paged_prefill_any(const Team* team, int64_t dtype, int64_t kv_dtype, const void* query,
                              const void* kv, void* out, const int32_t* block_tables,
                              const int32_t* table_starts, const int32_t* context_lens,
                              const int32_t* query_starts, const float* sinks, int64_t jobs,
                              int64_t heads, int64_t kv_heads, int64_t key_dim, int64_t value_dim,
                              int64_t width, int64_t block_size, int64_t layers, int64_t layer,
                              int64_t query_stride_t, int64_t query_stride_h, int64_t out_stride_t,
                              int64_t window, double scale, double soft_cap) {
    const PrefillArgs args{
        query, kv, out, block_tables, table_starts, context_lens, query_starts, jobs, heads,
        kv_heads, key_dim, value_dim, width, block_size, layers, layer, query_stride_t,
        query_stride_h, out_stride_t, AttentionRule(scale, window, soft_cap, sinks)};
    with_type(dtype, [&](auto type) {
        using T = decltype(type);
        if (kv_dtype == kInt8) return prefill<T, int8_t>(team, args);
        prefill<T, T>(team, args);
    });
}

}  // namespace fastserve

OPERATION(fs_paged_prefill, paged_prefill_any)
