// Memory from the start of a cache line on: loads across lines take up to three times as long.
#pragma once

#include <new>
#include <vector>

namespace fastserve {

constexpr int SECOND_LEVEL = 2;  // cache, as __builtin_prefetch names it

template <typename T>
struct LineAllocator {
    using value_type = T;
    static constexpr std::align_val_t LINE{64};

    LineAllocator() = default;
    template <typename U>
    LineAllocator(const LineAllocator<U>&) {}
    T* allocate(size_t count) { return (T*)::operator new(count * sizeof(T), LINE); }
    void deallocate(T* memory, size_t) { ::operator delete(memory, LINE); }
    bool operator==(const LineAllocator&) const { return true; }
    bool operator!=(const LineAllocator&) const { return false; }
};

template <typename T>
using AlignedVector = std::vector<T, LineAllocator<T>>;

}  // namespace fastserve
