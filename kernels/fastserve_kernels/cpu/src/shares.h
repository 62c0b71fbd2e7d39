// Work for threads of which each goes through memory in order.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

namespace fastserve {

// The numbers from `begin` up to `end`; its owner takes the first of them, other threads the last.
class alignas(64) Share {
   public:
    void set(uint64_t begin, uint64_t end) { range_.store(end << 32 | begin); }

    // -1: none is left.
    int64_t take_first() {
        uint64_t range = range_.load();
        while (begin_of(range) < end_of(range))
            if (range_.compare_exchange_weak(range, range + 1)) return begin_of(range);
        return -1;
    }
    int64_t take_last() {
        uint64_t range = range_.load();
        while (begin_of(range) < end_of(range))
            if (range_.compare_exchange_weak(range, range - (1ull << 32)))
                return (int64_t)end_of(range) - 1;
        return -1;
    }

   private:
    static uint32_t begin_of(uint64_t range) { return (uint32_t)range; }
    static uint32_t end_of(uint64_t range) { return (uint32_t)(range >> 32); }

    std::atomic<uint64_t> range_{0};
};

// The numbers from 0, an equal share for each thread. Who is done takes from the others, since a
// thread may lose its core to another process for longer than all of the work takes.
class Shares {
   public:
    void make_room(int threads) {
        if (threads > room_) shares_ = std::make_unique<Share[]>(room_ = threads);
    }

    // By each thread, before it takes one.
    void deal(int64_t count, int thread, int threads) {
        shares_[thread].set(count * thread / threads, count * (thread + 1) / threads);
    }

    // -1: none is left.
    int64_t take(int thread, int threads) {
        int64_t taken = shares_[thread].take_first();
        for (int i = 1; i < threads && taken < 0; ++i)
            taken = shares_[(thread + i) % threads].take_last();
        return taken;
    }

   private:
    std::unique_ptr<Share[]> shares_;
    int room_ = 0;
};

}  // namespace fastserve
