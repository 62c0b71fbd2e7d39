// Fetches keys and values from memory ahead of their use.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <vector>

#include "aligned.h"
#include "attention_rule.h"
#include "decode_items.h"
#include "paged_rows.h"

namespace fastserve {

// Goes over the rows of some items in the order in which they are read: the keys of all heads of a read, and
// then their values. It fetches to the second level, where more lines than in the first may be on their way at
// once.
template <typename S, int CHUNK>
class KvPrefetch {
   public:
    // items: they must outlive this.
    KvPrefetch(const PagedCache<S>& cache, const AttentionRule& rule, const Contexts& contexts,
               const std::vector<Item>& items, int64_t first_item, int64_t end_item)
        : cache_(cache),
          rule_(rule),
          contexts_(contexts),
          item_(items.data() + first_item),
          end_item_(items.data() + end_item) {}

    // Cache lines that so many rows of a head take, rounded up: what is fetched must not fall behind.
    int64_t lines(int64_t rows) const {
        const int64_t rows_in_lines = cache_.block_size * LINE;
        const int64_t bytes = rows * cache_.head_stride * (int64_t)sizeof(S);
        return (bytes + rows_in_lines - 1) / rows_in_lines;
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

    // To the next read of the items.
    bool next_read() {
        for (; item_ != end_item_; ++item_, reads_.reset()) {
            if (!reads_) reads_.emplace(contexts_, rule_, *item_);
            if (reads_->next()) return true;
        }
        return false;
    }

    // To the next rows that lie one after the other.
    bool next_run() {
        if (position_ == end_position_ && ++head_ < num_heads_)
            position_ = reads_->first();
        if (position_ == end_position_) {
            if (!next_read()) return false;
            head_ = 0;
            num_heads_ = 2 * item_->heads;
            position_ = reads_->first();
            end_position_ = position_ + reads_->count();
        }
        const int64_t block = position_ / cache_.block_size, row = position_ % cache_.block_size;
        const int64_t rows = std::min(cache_.block_size - row, end_position_ - position_);
        const S* const head = (head_ < item_->heads ? cache_.key : cache_.value) +
                              reads_->table()[block] * cache_.block_stride +
                              (item_->first_head + head_ % item_->heads) * cache_.head_stride;
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
    const Contexts& contexts_;
    const Item* item_;
    const Item* const end_item_;
    std::optional<Reads<CHUNK>> reads_;  // of the item
    int64_t head_ = 0, num_heads_ = 0;   // of a read: those of keys, and then those of values
    int64_t position_ = 0;               // after this run
    int64_t end_position_ = 0;           // of the read
    const char *at_ = nullptr, *end_ = nullptr;  // what is left of this run
};

}  // namespace fastserve
