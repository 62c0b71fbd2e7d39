// Attention of one query row a job over the paged cache: queries walk over the positions in chunks, an
// online softmax per query, reading every K and V row in place. Those of rows that begin with the same blocks
// walk together. A query's result depends on its own context only, never on what else is in the batch.
#include <algorithm>
#include <vector>

#include "decode_items.h"
#include "decode_products.h"
#include "kv_prefetch.h"
#include "online_softmax.h"
#include "paged_rows.h"
#include "products.h"
#include "row_reader.h"
#include "team.h"
#include "vec.h"

namespace fastserve {

// Positions at a time. (128: a tenth slower from memory. 32: a fourteenth slower from the caches.)
constexpr int CHUNK = 64;
// So far ahead memory is fetched.
constexpr int64_t LINES_AHEAD = 384;
// Query heads of all rows that one work item walks together; bounds its state to the second-level cache.
constexpr int MAX_ITEM_HEADS = 32;

struct CacheQuery : Query<CHUNK> {
    float* q;  // [pairs] of QueryPart
};

// Vectors of sums that stay in registers, and the queries that share one read of values.
#if defined(__AVX512F__)
constexpr int SUMS = 16, QUERIES = 4;
#else
constexpr int SUMS = 8, QUERIES = 2;
#endif

// Adds `count` rows of values to N Pairs of the outputs of Q queries of one head, from `pair` on. IS_TAIL: to
// the last Pair, which has `width` elements. Not inlined, nor are the dot products: their loops need all
// registers.
template <typename T, int Q, int N, bool IS_TAIL = false>
__attribute__((noinline)) static void accumulate(CacheQuery* queries, int pair, HeadRows<T> rows,
                                                 int count, int width = PAIR) {
    using Values = ValueRows<T>;
    using X = typename Values::X;
    const int64_t offset = rows.offset + pair * PAIR;
    if (!IS_TAIL) width = PAIR;  // a constant for the compiler
    const X* weights[Q];
    Pair x[Q][N];
    for (int q = 0; q < Q; ++q) {
        weights[q] = (const X*)queries[q].weights;
        for (int c = 0; c < N; ++c) {
            const Pair before = load_pair(queries[q].acc + (pair + c) * PAIR);
            x[q][c] = {before.a * queries[q].rescale, before.b * queries[q].rescale};
        }
    }
    for (int i = 0; i < count; i += Values::DEPTH)
        for (int c = 0; c < N; ++c) {
            const auto values = Values::load(rows.at + i, offset + c * PAIR, width);
            for (int q = 0; q < Q; ++q)
                Values::add(x[q][c], values, weights[q][i / Values::DEPTH]);
        }
    for (int q = 0; q < Q; ++q)
        for (int c = 0; c < N; ++c) store_pair(queries[q].acc + (pair + c) * PAIR, x[q][c]);
}

// Queries of T over a cache of S. D > 0: head size known at compile time; D == 0: taken from `dim`.
template <typename T, typename S, int D>
struct Attend {
    using Part = QueryPart<T>;
    using Places = Rows<S, CHUNK>;
    // Elements of a head of keys, or of values: a multiple of Pairs, and the rest.
    struct Size {
        const int dim;

        // Functions, not members: with a known D they are constants wherever they are used.
        inline int size() const { return D ? D : dim; }
        inline int pairs() const { return (size() + PAIR - 1) / PAIR; }
        inline int full() const { return size() / PAIR; }   // Pairs without padding
        inline int tail() const { return size() % PAIR; }   // elements of the padded Pair, or 0
        inline int width(int c) const { return c < full() ? PAIR : tail(); }
    };
    const Size of_key, of_value;
    const int group;  // queries of a KV head
    const AttentionRule rule;
    const PagedCache<S> cache;

    // Of Q queries of one head. lines: to fetch for W keys.
    template <int Q>
    __attribute__((noinline)) void dots(CacheQuery* queries, HeadRows<T> keys, int count,
                                        int64_t lines, KvPrefetch<S, CHUNK>& ahead) const {
        for (int at = 0; at < count; at += W) {
            ahead.fetch(lines);
            const auto sums = transpose_sums<Q>([&](auto& x, int first) __attribute__((always_inline)) {
                const auto add = [&](int c, int n) __attribute__((always_inline)) {
                    typename Part::Elements part[Q];
                    for (int q = 0; q < Q; ++q) part[q] = Part::load(queries[q].q + c * Part::FLOATS);
                    for (int i = 0; i < 4; ++i) {
                        const T* const row = keys.at[at + first + i] + keys.offset;
                        const auto key = Part::read(row + c * PAIR, n);
                        for (int q = 0; q < Q; ++q) Part::add_product(x[q][i], part[q], key);
                    }
                };
                for (int c = 0; c < of_key.full(); ++c) add(c, PAIR);
                if (of_key.tail()) add(of_key.full(), of_key.tail());
            });
            for (int q = 0; q < Q; ++q) *(vf_mem*)(queries[q].weights + at) = sums.of[q];
        }
    }

    // Of so many queries of one head.
    void score(CacheQuery* queries, int64_t num, HeadRows<T> keys, int count,
               KvPrefetch<S, CHUNK>& ahead) const {
        const int64_t lines = ahead.lines(W), parts = (num + QUERIES - 1) / QUERIES;
        for (int64_t part = 0; part < parts; ++part) {
            CacheQuery* const some = queries + part * QUERIES;
            const int64_t own_lines = lines * (part + 1) / parts - lines * part / parts;
            with_rows<QUERIES>(std::min<int64_t>(QUERIES, num - part * QUERIES), [&](auto constant) {
                dots<decltype(constant)::value>(some, keys, count, own_lines, ahead);
            });
        }
    }

    // Of so many queries of one head.
    void add_values(CacheQuery* queries, int64_t num, HeadRows<T> values, int count) const {
        for (int64_t i = 0; i < num; ++i) ValueRows<T>::pack(queries[i].weights, count);
        const int full = of_value.full(), tail = of_value.tail();
        for (int64_t first = 0; first < num; first += QUERIES)
            with_rows<QUERIES>(std::min<int64_t>(QUERIES, num - first), [&](auto constant) {
                constexpr int Q = decltype(constant)::value, MOST = SUMS / (2 * Q) >= 4 ? 4 : 2;
                CacheQuery* const some = queries + first;
                int pair = 0;
                for (; pair + MOST <= full; pair += MOST)
                    accumulate<T, Q, MOST>(some, pair, values, count);
                if (pair + 2 <= full) {
                    accumulate<T, Q, 2>(some, pair, values, count);
                    pair += 2;
                }
                if (pair < full) accumulate<T, Q, 1>(some, pair++, values, count);
                if (tail) accumulate<T, Q, 1, true>(some, pair, values, count, tail);
            });
    }

    // The queries of an item, head after head and in each row after row, attend to all that they see. Each
    // step goes over all queries of a read before the next one starts: their short dependency chains then
    // overlap. `ahead` is asked for as much as is read.
    void run(CacheQuery* queries, const Item& item, const Contexts& contexts,
             RowReader<T, S, CHUNK>& reader, KvPrefetch<S, CHUNK>& ahead) const {
        Places k, v;
        for (Reads<CHUNK> reads(contexts, rule, item); reads.next();) {
            const int count = reads.count();
            cache.locate(reads.table(), reads.first(), count, k, v);
            for (int i = count; i % W; ++i) {  // any rows, whose weights will be 0
                k.at[i] = k.at[count - 1];
                v.at[i] = v.at[count - 1];
            }
            const int64_t num = reads.rows() * group;  // queries of a head
            CacheQuery* const first = queries + (reads.place() - item.first_place) * group;
            const auto for_heads = [&](const auto& f) {
                for (int64_t h = 0; h < item.heads; ++h)
                    f(first + h * item.rows * group, (item.first_head + h) * cache.head_stride);
            };
            for_heads([&](CacheQuery* some, int64_t offset) {
                score(some, num, reader.read(k, count, offset), count, ahead);
            });
            for_heads([&](CacheQuery* some, int64_t) {
                if (rule.in_tanh != 0.f)
                    for (int64_t i = 0; i < num; ++i) some[i].cap(0, count, rule.in_tanh);
                for (int64_t i = 0; i < num; ++i)
                    some[i].template softmax<float>(FromStart(), count, rule.scale);
            });
            for_heads([&](CacheQuery* some, int64_t offset) {
                ahead.fetch(ahead.lines(count));
                add_values(some, num, reader.read(v, count, offset), count);
            });
        }
    }

    int64_t floats_of_query() const { return (of_key.pairs() + of_value.pairs()) * PAIR; }

    // `memory`: floats_of_query().
    void begin(CacheQuery& query, int64_t head, const T* source, float* memory) const {
        query.begin(memory, of_value.pairs(), rule.sink_of(head));
        query.q = memory + of_value.pairs() * PAIR;
        for (int c = 0; c < of_key.pairs(); ++c)
            Part::keep(query.q + c * Part::FLOATS, source + c * PAIR, of_key.width(c));
    }
};

struct DecodeArgs {
    const void *query, *kv;
    void* out;
    Contexts contexts;
    int64_t tokens, heads, kv_heads, key_dim, value_dim, width, block_size, layers, layer;
    int64_t query_stride_t, query_stride_h, out_stride_t;
    AttentionRule rule;
};

template <typename T, typename S, int D>
static void decode(const Team* team, const DecodeArgs& a) {
    const int64_t group = a.heads / a.kv_heads;
    const Attend<T, S, D> attend{
        {(int)a.key_dim}, {(int)a.value_dim}, (int)group, a.rule,
        PagedCache<S>(a.kv, a.layers, a.layer, a.kv_heads, a.block_size, a.width)};
    in_team(team, a.tokens * a.kv_heads > 1, [&](const Team& own) {
        const std::vector<Item> items = Items<CHUNK>(a.contexts, a.rule, a.tokens, a.kv_heads)
                                            .divide(MAX_ITEM_HEADS, group, own.threads());
        const int64_t most_queries = std::max<int64_t>(MAX_ITEM_HEADS, group);
        const int64_t stride = attend.floats_of_query();
        std::vector<float> memory(most_queries * stride);
        std::vector<CacheQuery> queries(most_queries);
        own.deal(items.size());
        const auto [first_item, end_item] = own.part(items.size());
        RowReader<T, S, CHUNK> reader(std::max(a.key_dim, a.value_dim));
        KvPrefetch<S, CHUNK> ahead(attend.cache, a.rule, a.contexts, items, first_item, end_item);
        ahead.fetch(LINES_AHEAD);
        for (int64_t number; (number = own.take()) >= 0;) {
            const Item item = items[number];
            // f(query, row, head) of each query.
            const auto for_queries = [&](const auto& f) {
                CacheQuery* query = queries.data();
                for (int64_t h = item.first_head; h < item.first_head + item.heads; ++h)
                    for (int64_t place = item.first_place; place < item.end_place(); ++place)
                        for (int64_t g = 0; g < group; ++g)
                            f(*query++, a.contexts.row(place), h * group + g);
            };
            float* next = memory.data();
            for_queries([&](CacheQuery& query, int64_t row, int64_t head) {
                const T* source = (const T*)a.query + row * a.query_stride_t;
                attend.begin(query, head, source + head * a.query_stride_h, next);
                next += stride;
            });
            attend.run(queries.data(), item, a.contexts, reader, ahead);
            for_queries([&](const CacheQuery& query, int64_t row, int64_t head) {
                T* out = (T*)a.out + row * a.out_stride_t;
                query.finish(out + head * a.value_dim, attend.of_value.size());
            });
        }
    });
}

template <typename T, typename S>
static void decode_any(const Team* team, const DecodeArgs& a) {
    const int64_t dim = a.key_dim == a.value_dim ? a.key_dim : 0;
    if (dim == 64) return decode<T, S, 64>(team, a);
    if (dim == 80) return decode<T, S, 80>(team, a);
    if (dim == 128) return decode<T, S, 128>(team, a);
    decode<T, S, 0>(team, a);
}

static void paged_decode_any(const Team* team, int64_t dtype, int64_t kv_dtype, const void* query,
                             const void* kv, void* out, const int32_t* block_tables,
                             const int32_t* table_starts, const int32_t* context_lens,
                             const int32_t* order, const int32_t* common, const float* sinks, int64_t tokens, int64_t heads, int64_t kv_heads,
                             int64_t key_dim, int64_t value_dim, int64_t width, int64_t block_size,
                             int64_t layers, int64_t layer, int64_t query_stride_t,
                             int64_t query_stride_h, int64_t out_stride_t, int64_t window,
                             double scale, double soft_cap) {
    const DecodeArgs args{
        query, kv, out, {block_tables, table_starts, context_lens, order, common}, tokens, heads, kv_heads, key_dim,
        value_dim, width, block_size, layers, layer, query_stride_t, query_stride_h, out_stride_t,
        AttentionRule(scale, window, soft_cap, sinks)};
    with_type(dtype, [&](auto type) {
        using T = decltype(type);
        if (kv_dtype == kInt8) return decode_any<T, int8_t>(team, args);
        decode_any<T, T>(team, args);
    });
}

}  // namespace fastserve

OPERATION(fs_paged_decode, paged_decode_any)
