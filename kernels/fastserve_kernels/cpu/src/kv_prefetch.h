// Fetches keys and values from memory ahead of their use.
#pragma once

#include <algorithm>
#include <cstdint>

#include "aligned.h"
#include "attention_rule.h"
#include "paged_rows.h"

namespace fastserve {

// What a thread works on at a time: some KV heads of one token.
struct Item {
    int64_t token, first_head, heads;
};

// All KV heads of all tokens, in items of up to so many heads.
struct Items {
    int64_t tokens, kv_heads, heads_each;

    int64_t per_token() const { return (kv_heads + heads_each - 1) / heads_each; }
    int64_t count() const { return tokens * per_token(); }
    Item operator[](int64_t number) const {
        const int64_t first = number % per_token() * heads_each;
        return {number / per_token(), first, std::min(heads_each, kv_heads - first)};
    }
};

// Each token's context, and the blocks that it lies in.
struct Contexts {
    const int32_t *block_tables, *table_starts, *lengths;

    const int32_t* table(int64_t token) const { return block_tables + table_starts[token]; }
};

// Goes over the rows of some items in the order in which they are read: CHUNK positions at a time, the keys of
// all heads and then their values. It fetches to the second level, where more lines than in the first may be
// on their way at once.
template <typename S, int CHUNK>
class KvPrefetch {
   public:
    KvPrefetch(const PagedCache<S>& cache, const AttentionRule& rule, const Contexts& contexts,
               const Items& items, int64_t first_item, int64_t end_item)
        : cache_(cache),
          rule_(rule),
          contexts_(contexts),
          items_(items),
          number_(first_item),
          end_number_(end_item) {
        begin_item();
    }

    // Cache lines that so many rows of a head take.
    int64_t lines(int64_t rows) const {
        return rows * cache_.head_stride * (int64_t)sizeof(S) / (cache_.block_size * LINE);
    }
    // The next cache lines, as long as there are any. Not inlined: it would take its callers' registers.
    __attribute__((noinline)) void fetch(int64_t lines) {
        while (lines > 0) {
            if (at_ >= end_ && !next_run()) return;
            const int64_t some = std::min(lines, (end_ - at_ + LINE - 1) / LINE);
            lines -= some;
            for (int64_t i = 0; i < some; ++i, at_ += LINE) __builtin_prefetch(at_, 0, SECOND_LEVEL);
        }
    }

   private:
    static constexpr int64_t LINE = 64;

    void begin_item() {
        if (number_ == end_number_) return;
        item_ = items_[number_];
        context_ = contexts_.lengths[item_.token];
        first_ = position_ = rule_.first_visible(context_);
        head_ = 0;
    }

    // To the next rows that lie one after the other.
    bool next_run() {
        int64_t end;
        for (;;) {
            if (number_ == end_number_) return false;
            end = std::min(first_ + CHUNK, context_);
            if (position_ < end) break;
            position_ = first_;
            if (++head_ == 2 * item_.heads) {
                head_ = 0;
                first_ = position_ = end;
                if (end == context_) {
                    ++number_;
                    begin_item();
                }
            }
        }
        const int64_t block = position_ / cache_.block_size, row = position_ % cache_.block_size;
        const int64_t rows = std::min(cache_.block_size - row, end - position_);
        const S* const head = (head_ < item_.heads ? cache_.key : cache_.value) +
                              contexts_.table(item_.token)[block] * cache_.block_stride +
                              (item_.first_head + head_ % item_.heads) * cache_.head_stride;
        at_ = (const char*)(head + row * cache_.row_stride);
        // Scales follow the last row of a block.
        const bool ends_block = row + rows == cache_.block_size;
        end_ = (const char*)(head + (ends_block ? cache_.head_stride
                                                : (row + rows) * cache_.row_stride));
        position_ += rows;
        return true;
    }

    const PagedCache<S>& cache_;
    const AttentionRule& rule_;
    const Contexts contexts_;
    const Items items_;
    int64_t number_;  // of the item
    const int64_t end_number_;
    Item item_{};
    int64_t context_ = 0;
    int64_t first_ = 0;     // of the chunk's positions
    int64_t head_ = 0;      // the heads of keys, and then those of values
    int64_t position_ = 0;  // after this run
    const char *at_ = nullptr, *end_ = nullptr;  // what is left of this run
};

}  // namespace fastserve
