// How the attention of decodes is divided among threads, and in which order an item reads its contexts.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "attention_rule.h"

namespace fastserve {

// Each row's context, and the blocks that it lies in. Rows that begin with the same blocks have neighbouring
// places.
struct Contexts {
    const int32_t *block_tables, *table_starts, *lengths;
    // Null: no rows begin alike, and a row's number is its place.
    const int32_t* order;   // the row at each place
    const int32_t* common;  // first positions that it reads from the same memory as the row before it

    int64_t row(int64_t place) const { return order ? order[place] : place; }
    int64_t length(int64_t place) const { return lengths[row(place)]; }
    const int32_t* table(int64_t place) const { return block_tables + table_starts[row(place)]; }
};

// What a thread works on at a time: some KV heads of rows that begin alike, or of one row.
struct Item {
    int64_t first_place, rows, first_head, heads;

    int64_t end_place() const { return first_place + rows; }
};

// All KV heads of all rows. CHUNK: positions that are read at a time.
template <int CHUNK>
class Items {
   public:
    Items(const Contexts& contexts, const AttentionRule& rule, int64_t rows, int64_t kv_heads)
        : contexts_(contexts), rule_(rule), rows_(rows), kv_heads_(kv_heads) {}

    // With so many heads of all rows in each as fit, but enough items to feed every thread.
    // group: query heads of a KV head.
    std::vector<Item> divide(int64_t most_heads, int64_t group, int64_t threads) const {
        for (int64_t most = std::max<int64_t>(1, most_heads / group);; most = (most + 1) / 2) {
            std::vector<Item> items = divide(most);
            if (most == 1 || (int64_t)items.size() >= ITEMS_A_THREAD * threads) return items;
        }
    }

   private:
    static constexpr int64_t ITEMS_A_THREAD = 2;

    // With up to so many KV heads of all rows in each.
    std::vector<Item> divide(int64_t most) const {
        std::vector<Item> items;
        for (int64_t first = 0, end; first < rows_; first = end) {
            end = first + 1;
            while (end < rows_ && begins_like_before(end)) ++end;
            in_equal_parts(first, end, most, [&](int64_t place, int64_t rows) {
                in_equal_parts(0, kv_heads_, most / rows, [&](int64_t head, int64_t heads) {
                    items.push_back({place, rows, head, heads});
                });
            });
        }
        return items;
    }

    // Whether it shares a chunk with the row before it. A window would have them begin elsewhere.
    bool begins_like_before(int64_t place) const {
        const auto sees_all = [&](int64_t one) {
            return rule_.first_visible(contexts_.length(one)) == 0;
        };
        return contexts_.order && contexts_.common[place] >= CHUNK && sees_all(place) &&
               sees_all(place - 1);
    }

    // f(begin, count) of as few parts as possible, of up to `most` each.
    template <typename F>
    static void in_equal_parts(int64_t begin, int64_t end, int64_t most, const F& f) {
        const int64_t count = end - begin, parts = (count + most - 1) / most;
        for (int64_t part = 0; part < parts; ++part) {
            const int64_t first = count * part / parts;
            f(begin + first, count * (part + 1) / parts - first);
        }
    }

    const Contexts& contexts_;
    const AttentionRule& rule_;
    const int64_t rows_, kv_heads_;
};

// The reads of an item: a chunk of positions at a time, and of each chunk the rows that have it in common at
// once. A row's chunks are the same whatever rows are beside it.
template <int CHUNK>
class Reads {
   public:
    Reads(const Contexts& contexts, const AttentionRule& rule, const Item& item)
        : contexts_(contexts),
          item_(item),
          end_place_(item.first_place),
          first_(rule.first_visible(contexts.length(item.first_place))) {}

    // To the first or next read; false: there is none.
    bool next() {
        for (place_ = end_place_;; ++place_) {
            if (place_ == item_.end_place()) {
                if (!chunk_has_reads_) return false;
                chunk_has_reads_ = false;
                first_ += CHUNK;
                place_ = item_.first_place;
            }
            if (first_ < contexts_.length(place_)) break;
        }
        chunk_has_reads_ = true;
        count_ = (int)std::min<int64_t>(CHUNK, contexts_.length(place_) - first_);
        end_place_ = place_ + 1;
        while (end_place_ < item_.end_place() && contexts_.common[end_place_] >= first_ + CHUNK)
            ++end_place_;
        return true;
    }

    int64_t place() const { return place_; }             // of the first row
    int64_t rows() const { return end_place_ - place_; }
    int64_t first() const { return first_; }             // position
    int count() const { return count_; }                 // of positions
    const int32_t* table() const { return contexts_.table(place_); }

   private:
    const Contexts& contexts_;
    const Item item_;
    int64_t place_ = 0, end_place_, first_;
    int count_ = 0;
    bool chunk_has_reads_ = false;
};

}  // namespace fastserve
