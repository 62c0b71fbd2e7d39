// Where the rows of one job's K and V lie in the paged cache.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

namespace fastserve {

// Rows of the first head: keys, or values, of up to N positions. S is what the cache holds, float, bf16,
// or int8_t: codes, and then each row has a scale.
template <typename S, int N>
struct Rows {
    static constexpr bool HAS_SCALES = std::is_same_v<S, int8_t>;
    const S* at[N];
    const S* scales[HAS_SCALES ? N : 1];  // floats at these bytes

    // offset: of another head, in elements of the cache.
    float scale(int i, int64_t offset) const { return *(const float*)(scales[i] + offset); }
};

// The cache of one layer. Strides in elements.
template <typename S>
struct PagedCache {
    static constexpr int64_t SCALE_SIZE = std::is_same_v<S, int8_t> ? sizeof(float) : 0;
    const S *key, *value;
    int64_t head_stride, row_stride, block_stride, block_size;

    // kv: [blocks, layers, 2, kv_heads, block_size, width]; with codes and scales, see int8_cache.py.
    PagedCache(const void* kv, int64_t layers, int64_t layer, int64_t kv_heads, int64_t block_size,
               int64_t width)
        : head_stride(block_size * width),
          row_stride(width - SCALE_SIZE),
          block_size(block_size) {
        const int64_t part = kv_heads * head_stride;  // K (or V) of one layer of one block
        key = (const S*)kv + layer * 2 * part;
        value = key + part;
        block_stride = layers * 2 * part;
    }

    // The rows of `count` positions from `first` on, of a job with this table.
    template <int N>
    void locate(const int32_t* table, int64_t first, int count, Rows<S, N>& k, Rows<S, N>& v) const {
        int64_t block = first / block_size, offset = first % block_size;
        for (int i = 0; i < count; ++block, offset = 0) {
            const int64_t base = table[block] * block_stride;
            const int run = (int)std::min<int64_t>(count - i, block_size - offset);
            for (int64_t row = offset; row < offset + run; ++row, ++i) {
                k.at[i] = key + base + row * row_stride;
                v.at[i] = value + base + row * row_stride;
                if constexpr (SCALE_SIZE > 0) {
                    const int64_t scale = block_size * row_stride + row * SCALE_SIZE;
                    k.scales[i] = key + base + scale;
                    v.scales[i] = value + base + scale;
                }
            }
        }
    }
};

}  // namespace fastserve
