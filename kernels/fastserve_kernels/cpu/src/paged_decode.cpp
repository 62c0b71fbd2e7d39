// Attention of one query row a job over the paged cache: a group of queries walks over the positions
// in chunks, an online softmax per query, reading every K and V row in place. A query's result depends
// on its own context only, never on what else is in the batch.
#include <algorithm>
#include <type_traits>
#include <vector>

#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

#include "online_softmax.h"
#include "paged_rows.h"
#include "team.h"
#include "vec.h"

namespace fastserve {

// Positions at a time: a few blocks, whose heads lie one after the other, so that the hardware sees
// long streams. (64 at a time: 15% slower from memory; 16: 5 to 10%.)
constexpr int CHUNK = 32;
// Query heads that one work item walks together; bounds its state to the second-level cache.
constexpr int MAX_ITEM_HEADS = 32;

struct CacheQuery : Query<CHUNK> {
    float* q;  // [pairs] of QueryPart
    int64_t kv_head;
};

// Sums of neighbours of x and y; `step` lanes count as one element. Step 1 stays within 128-bit
// lanes (one cheap shuffle), step 4 moves whole ones.
template <int STEP>
static inline vf add_neighbours(vf x, vf y) {
    vi even, odd;
    for (int i = 0; i < W; ++i) {
        if (STEP == 1) {
            even[i] = i / 4 * 4 + i % 2 * 2 + (i % 4 / 2) * W;
        } else {
            const int lane = i / 4 * 2;  // counted over x and y together
            even[i] = lane * 4 + i % 4;
        }
        odd[i] = even[i] + STEP;
    }
    return __builtin_shuffle(x, y, even) + __builtin_shuffle(x, y, odd);
}

// Lane i of the result is the sum over the lanes of x[i]. Overwrites x.
static inline vf transpose_sum(vf* x) {
    for (int i = 0; i < W / 2; ++i) x[i] = add_neighbours<1>(x[2 * i], x[2 * i + 1]);
    for (int i = 0; i < W / 4; ++i) x[i] = add_neighbours<1>(x[2 * i], x[2 * i + 1]);
    for (int n = W / 8; n > 0; n /= 2)
        for (int i = 0; i < n; ++i) x[i] = add_neighbours<4>(x[2 * i], x[2 * i + 1]);
    return x[0];
}

// A query's part of a score: PAIR elements of T times those of a key, which the cache has as S.
template <typename T, typename S>
struct QueryPart {
    static constexpr int FLOATS = PAIR;  // that it takes

    static void keep(float* part, const T* source, int n) {
        const Pair x = load_pair_n(source, n);
        if constexpr (std::is_same_v<T, S>) store_pair(part, x);
        else store_in_order<T>(part, x);
    }
    static inline Pair load(const float* part) { return load_pair(part); }
    static inline void add_product(vf& sum, const Pair& q, const S* key, int n) {
        const Pair k = load_pair_n(key, n);
        sum += q.a * k.a;
        sum += q.b * k.b;
    }
};

#if defined(__AVX512BF16__)
// By dot products of bfloat16 pairs, without widening.
template <>
struct QueryPart<bf16, bf16> {
    static constexpr int FLOATS = W;

    static void keep(float* part, const bf16* source, int n) {
        _mm512_storeu_si512(part, read(source, n));
    }
    static inline __m512i load(const float* part) { return _mm512_loadu_si512(part); }
    static inline void add_product(vf& sum, __m512i q, const bf16* key, int n) {
        sum = (vf)_mm512_dpbf16_ps((__m512)sum, (__m512bh)q, (__m512bh)read(key, n));
    }
    static inline __m512i read(const bf16* p, int n) {
        return n == PAIR ? _mm512_loadu_si512(p)
                         : _mm512_maskz_loadu_epi16((__mmask32)((1u << n) - 1), p);
    }
};
#endif

// Queries of T over a cache of S. D > 0: head size known at compile time; D == 0: taken from `dim`.
template <typename T, typename S, int D>
struct Attend {
    using Part = QueryPart<T, S>;
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
    const AttentionRule rule;

    __attribute__((always_inline)) inline vf dots(const float* q, const S* const* rows,
                                                  int64_t head_offset) const {
        vf acc[W] = {};
        const auto add = [&](int c, int n) __attribute__((always_inline)) {
            const auto part = Part::load(q + c * Part::FLOATS);
            for (int i = 0; i < W; ++i)
                Part::add_product(acc[i], part, rows[i] + head_offset + c * PAIR, n);
        };
        for (int c = 0; c < of_key.full(); ++c) add(c, PAIR);
        if (of_key.tail()) add(of_key.full(), of_key.tail());
        return transpose_sum(acc);
    }

    // The N Pairs of the output from `pair` on; the last one has `last` elements.
    template <int N>
    __attribute__((always_inline)) inline void accumulate(CacheQuery& query, int pair,
                                                          const S* const* rows,
                                                          int64_t head_offset, int count,
                                                          int last = PAIR) const {
        float* acc = query.acc + pair * PAIR;
        const float* p = query.weights;
        const float rescale = query.rescale;
        const int64_t offset = head_offset + pair * PAIR;
        Pair x[N];
        for (int c = 0; c < N; ++c) {
            x[c].a = *(const vf_mem*)(acc + c * PAIR) * rescale;
            x[c].b = *(const vf_mem*)(acc + c * PAIR + W) * rescale;
        }
        for (int i = 0; i < count; ++i) {
            const S* row = rows[i] + offset;
            for (int c = 0; c < N; ++c) {
                const Pair v =
                    c == N - 1 ? load_pair_n(row + c * PAIR, last) : load_pair(row + c * PAIR);
                x[c].a += p[i] * v.a;
                x[c].b += p[i] * v.b;
            }
        }
        for (int c = 0; c < N; ++c) {
            *(vf_mem*)(acc + c * PAIR) = x[c].a;
            *(vf_mem*)(acc + c * PAIR + W) = x[c].b;
        }
    }

    void score(CacheQuery& query, const Places& k, int count, int64_t head_offset) const {
        for (int i = 0; i < count; i += W)
            *(vf_mem*)(query.weights + i) = dots(query.q, k.at + i, head_offset);
        scale_weights(query, k, count, head_offset);
    }

    void add_values(CacheQuery& query, const Places& v, int count, int64_t head_offset) const {
        scale_weights(query, v, count, head_offset);
        // Four Pairs of accumulators at a time: they fit the registers of every target.
        int c = 0;
        const int full = of_value.full(), tail = of_value.tail();
        for (; c + 4 <= full; c += 4) accumulate<4>(query, c, v.at, head_offset, count);
        for (; c + 2 <= full; c += 2) accumulate<2>(query, c, v.at, head_offset, count);
        for (; c < full; ++c) accumulate<1>(query, c, v.at, head_offset, count);
        if (tail) accumulate<1>(query, c, v.at, head_offset, count, tail);
    }

    // Codes stand for themselves times their row's scale.
    void scale_weights(CacheQuery& query, const Places& rows, int count, int64_t head_offset) const {
        if constexpr (Places::HAS_SCALES)
            for (int i = 0; i < count; ++i) query.weights[i] *= rows.scale(i, head_offset);
    }

    // All queries attend to the same positions of `context`. Each step goes over all of them before the
    // next one starts: their short dependency chains then overlap, and K and V are each read in address
    // order.
    void run(CacheQuery* queries, int count, int64_t context, const PagedCache<S>& cache,
             const int32_t* table) const {
        const int64_t begin = rule.first_visible(context);
        Places places[2][2];  // of keys and values, of this chunk and the next
        const auto places_of = [&](int64_t first) -> auto& {
            return places[(first - begin) / CHUNK % 2];
        };
        const auto locate = [&](int64_t first) {
            auto& [k, v] = places_of(first);
            const int located = (int)std::clamp<int64_t>(context - first, 0, CHUNK);
            cache.locate(table, first, located, k, v);
            for (int i = located; i % W; ++i) k.at[i] = k.at[located - 1];
            return located;
        };
        int located = locate(begin);
        for (int64_t first = begin; first < context; first += CHUNK) {
            const auto& [k, v] = places_of(first);
            const int64_t next = first + CHUNK;
            const int next_located = locate(next);
            const Places& next_k = places_of(next)[0];
            const auto begins_head = [&](int i) {
                return i == 0 || queries[i].kv_head != queries[i - 1].kv_head;
            };
            for (int i = 0; i < count; ++i) {
                const int64_t head_offset = queries[i].kv_head * cache.head_stride;
                if (begins_head(i)) fetch(v, located, head_offset, of_value.size());
                score(queries[i], k, located, head_offset);
            }
            if (rule.in_tanh != 0.f)
                for (int i = 0; i < count; ++i) queries[i].cap(0, located, rule.in_tanh);
            for (int i = 0; i < count; ++i)
                queries[i].template softmax<float>(FromStart(), located, rule.scale);
            for (int i = 0; i < count; ++i) {
                const int64_t head_offset = queries[i].kv_head * cache.head_stride;
                if (begins_head(i)) fetch(next_k, next_located, head_offset, of_key.size());
                add_values(queries[i], v, located, head_offset);
            }
            located = next_located;
        }
    }

    // Into the caches, ahead of their use. Rows of fp32 are long enough for the hardware to do so.
    void fetch(const Places& rows, int count, int64_t head_offset, int size) const {
        if (sizeof(S) == sizeof(float)) return;
        for (int i = 0; i < count; ++i)
            for (int64_t byte = 0; byte < size * (int64_t)sizeof(S); byte += 64)
                __builtin_prefetch((const char*)(rows.at[i] + head_offset) + byte);
    }

    int64_t floats_of_query() const { return (of_key.pairs() + of_value.pairs()) * PAIR; }

    // `memory`: floats_of_query().
    void begin(CacheQuery& query, int64_t head, const T* source, float* memory) const {
        query.begin(memory, of_value.pairs(), rule.sink_of(head));
        query.q = memory + of_value.pairs() * PAIR;
        for (int c = 0; c < of_key.pairs(); ++c)
            Part::keep(query.q + c * Part::FLOATS, source + c * PAIR, of_key.width(c));
    }

    void finish(CacheQuery& query, T* target) const {
        if constexpr (!std::is_same_v<T, S>)  // the output's Pairs are those of S
            for (int c = 0; c < of_value.pairs(); ++c)
                store_pair(query.acc + c * PAIR,
                           spread_like(target, query.acc + c * PAIR, PAIR));
        query.finish(target, of_value.size());
    }
};

// How many KV heads one work item takes: all that fit, but enough items to feed every thread.
static int64_t heads_per_item(int64_t tokens, int64_t kv_heads, int64_t group, int64_t threads) {
    int64_t most = std::max<int64_t>(1, MAX_ITEM_HEADS / group);
    const int64_t wanted_items = 2 * threads;
    while (most > 1 && tokens * ((kv_heads + most - 1) / most) < wanted_items)
        most = (most + 1) / 2;
    return std::min(most, kv_heads);
}

struct DecodeArgs {
    const void *query, *kv;
    void* out;
    const int32_t *block_tables, *table_starts, *context_lens;
    int64_t tokens, heads, kv_heads, key_dim, value_dim, width, block_size, layers, layer;
    int64_t query_stride_t, query_stride_h, out_stride_t;
    AttentionRule rule;
};

template <typename T, typename S, int D>
static void decode(const Team* team, const DecodeArgs& a) {
    const Attend<T, S, D> attend{{(int)a.key_dim}, {(int)a.value_dim}, a.rule};
    const PagedCache<S> cache(a.kv, a.layers, a.layer, a.kv_heads, a.block_size, a.width);
    const int64_t group = a.heads / a.kv_heads;
    in_team(team, a.tokens * a.kv_heads > 1, [&](const Team& own) {
        const int64_t per_item = heads_per_item(a.tokens, a.kv_heads, group, own.threads());
        const int64_t splits = (a.kv_heads + per_item - 1) / per_item;
        const int64_t stride = attend.floats_of_query();
        std::vector<float> memory(per_item * group * stride);
        std::vector<CacheQuery> queries(per_item * group);
        own.deal(a.tokens * splits);
        for (int64_t item; (item = own.take()) >= 0;) {
            const int64_t t = item / splits, first = item % splits * per_item;
            const int64_t end = std::min(first + per_item, a.kv_heads);
            const T* query = (const T*)a.query + t * a.query_stride_t;
            T* out = (T*)a.out + t * a.out_stride_t;
            const int count = (int)((end - first) * group);
            for (int i = 0; i < count; ++i) {
                const int64_t head = first * group + i;
                queries[i].kv_head = head / group;
                attend.begin(queries[i], head, query + head * a.query_stride_h,
                             memory.data() + i * stride);
            }
            attend.run(queries.data(), count, a.context_lens[t], cache,
                       a.block_tables + a.table_starts[t]);
            for (int i = 0; i < count; ++i)
                attend.finish(queries[i], out + (first * group + i) * a.value_dim);
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
                             const float* sinks, int64_t tokens, int64_t heads, int64_t kv_heads,
                             int64_t key_dim, int64_t value_dim, int64_t width, int64_t block_size,
                             int64_t layers, int64_t layer, int64_t query_stride_t,
                             int64_t query_stride_h, int64_t out_stride_t, int64_t window,
                             double scale, double soft_cap) {
    const DecodeArgs args{
        query, kv, out, block_tables, table_starts, context_lens, tokens, heads, kv_heads, key_dim,
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
