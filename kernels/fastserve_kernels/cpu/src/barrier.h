// Where threads of a team wait for each other.
#pragma once

#include <atomic>
#include <cstdint>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#else
#include <sched.h>
#endif

namespace fastserve {

// Waits awake for as long as an operation of a small model takes, then asleep. OpenMP's own barrier stays
// awake for milliseconds: too long where another process has taken a core from a thread, which could go on
// with the core of one that sleeps.
class Barrier {
   public:
    void wait(uint32_t threads) {
        const uint32_t round = round_.load();
        if (arrived_.fetch_add(1) + 1 == threads) {
            arrived_.store(0);
            round_.store(round + 1);
            if (sleepers_.load() > 0) wake();
            return;
        }
        for (int i = 0; i < MOST_PAUSES; ++i) {
            if (round_.load(std::memory_order_acquire) != round) return;
            pause();
        }
        sleepers_.fetch_add(1);
        while (round_.load() == round) sleep(round);
        sleepers_.fetch_sub(1);
    }

   private:
    static constexpr int MOST_PAUSES = 2000;

    static void pause() {
#if defined(__x86_64__)
        __builtin_ia32_pause();
#elif defined(__aarch64__)
        asm volatile("isb");
#endif
    }
#if defined(__linux__)
    // Until `round` has ended, or shorter.
    void sleep(uint32_t round) {
        syscall(SYS_futex, &round_, FUTEX_WAIT_PRIVATE, round, nullptr, nullptr, 0);
    }
    void wake() { syscall(SYS_futex, &round_, FUTEX_WAKE_PRIVATE, INT32_MAX, nullptr, nullptr, 0); }
#else
    void sleep(uint32_t) { sched_yield(); }
    void wake() {}
#endif

    alignas(64) std::atomic<uint32_t> arrived_{0};
    alignas(64) std::atomic<uint32_t> round_{0};
    std::atomic<uint32_t> sleepers_{0};
};

}  // namespace fastserve
