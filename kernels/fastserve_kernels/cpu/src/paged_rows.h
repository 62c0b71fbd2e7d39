// Where the rows of one job's K and V lie in the paged cache.
#pragma once

#include <algorithm>
#include <cstdint>

namespace fastserve {

// The cache of one layer. Strides in elements.
template <typename T>
struct PagedCache {
    const T *key, *value;
    int64_t head_stride, row_stride, block_stride, block_size;

    // kv: [blocks, layers, 2, kv_heads, block_size, dim].
    PagedCache(const void* kv, int64_t layers, int64_t layer, int64_t kv_heads, int64_t block_size,
               int64_t dim)
        : head_stride(block_size * dim), row_stride(dim), block_size(block_size) {
        const int64_t part = kv_heads * head_stride;  // K (or V) of one layer of one block
        key = (const T*)kv + layer * 2 * part;
        value = key + part;
        block_stride = layers * 2 * part;
    }

    // The rows of the first head, of `count` positions from `first` on, of a job with this table.
    void locate(const int32_t* table, int64_t first, int count, const T** k, const T** v) const {
        int64_t block = first / block_size, offset = first % block_size;
        for (int i = 0; i < count; ++block, offset = 0) {
            const int64_t base = table[block] * block_stride + offset * row_stride;
            const int run = (int)std::min<int64_t>(count - i, block_size - offset);
            for (int j = 0; j < run; ++j, ++i) {
                k[i] = key + base + j * row_stride;
                v[i] = value + base + j * row_stride;
            }
        }
    }
};

}  // namespace fastserve
