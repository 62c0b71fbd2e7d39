// Rows of one head in the type of the queries, which multiply them.
#pragma once

#include <algorithm>
#include <cstdint>

#include "aligned.h"
#include "int8_tokens.h"
#include "paged_rows.h"

namespace fastserve {

template <typename T>
struct HeadRows {
    const T* const* at;
    int64_t offset;  // from there to the row's start
};

// Of a cache of S. Rows of T are read where they lie.
template <typename T, typename S, int N>
class RowReader {
   public:
    explicit RowReader(int64_t) {}

    HeadRows<T> read(const Rows<T, N>& rows, int, int64_t offset) { return {rows.at, offset}; }
};

// Codes are widened, once for all queries of the head.
template <typename T, int N>
class RowReader<T, int8_t, N> {
   public:
    explicit RowReader(int64_t dim) : dim_(dim), widened_(N * dim) {}

    // The first `count` rows, and then the last one again. Good until the next call.
    HeadRows<T> read(const Rows<int8_t, N>& rows, int count, int64_t offset) {
        for (int i = 0; i < count; ++i) {
            T* const row = widened_.data() + i * dim_;
            widen_token(rows.at[i] + offset, rows.scale(i, offset), dim_, row);
            at_[i] = row;
        }
        std::fill(at_ + count, at_ + N, at_[count - 1]);
        return {at_, 0};
    }

   private:
    const int64_t dim_;
    AlignedVector<T> widened_;
    const T* at_[N];
};

}  // namespace fastserve
