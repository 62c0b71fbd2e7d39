// The threads that work on an operation, and how operations are called.
#pragma once

#include <omp.h>

#include <cstdint>
#include <cstring>
#include <utility>

#include "aligned.h"
#include "barrier.h"
#include "shares.h"

namespace fastserve {

// Below this many elements of rows, waking the other threads costs more than the work.
constexpr int64_t PARALLEL_ELEMENTS = 1 << 15;

// What the threads of a team share. Kept between calls: a fresh large buffer would be page-faulted in
// every time.
struct SharedMemory {
    static constexpr int NUM_BUFFERS = 2;
    Barrier barrier;
    Shares shares;
    AlignedVector<char> buffers[NUM_BUFFERS];
};

// A thread's view of the threads that work together, all those of a parallel region. Each calls the same
// functions of the team in the same order.
class Team {
   public:
    explicit Team(SharedMemory& shared)
        : shared_(shared), thread_(omp_get_thread_num()), threads_(omp_get_num_threads()) {}

    struct Range {
        int64_t begin, end;
    };

    int threads() const { return threads_; }
    bool is_first() const { return thread_ == 0; }
    void barrier() const { shared_.barrier.wait(threads_); }
    // This thread's part of the numbers up to `count`.
    Range part(int64_t count) const {
        return {count * thread_ / threads_, count * (thread_ + 1) / threads_};
    }
    // Deal out the numbers up to `count`, to be taken one by one. All of those dealt before are taken.
    void deal(int64_t count) const { shared_.shares.deal(count, thread_, threads_); }
    // -1: none is left.
    int64_t take() const { return shared_.shares.take(thread_, threads_); }
    // Memory for `count` elements, the same for all threads; it holds anything. Good until an operation
    // asks for the buffer again.
    template <typename T>
    T* buffer(int number, int64_t count) const {
        AlignedVector<char>& buffer = shared_.buffers[number];
        const size_t bytes = count * sizeof(T);
        if (buffer.size() < bytes) {
            barrier();
            if (is_first()) buffer = AlignedVector<char>(bytes);
            barrier();
        }
        return (T*)buffer.data();
    }

   private:
    SharedMemory& shared_;
    const int thread_, threads_;
};

inline SharedMemory& memory_of_caller() {
    static thread_local SharedMemory memory;
    return memory;
}

// f(team) by each thread of `team`, or, without one, of a new parallel region, if that is worth it.
template <typename F>
static void in_team(const Team* team, bool is_worth_it, const F& f) {
    if (team) return f(*team);
    SharedMemory& shared = memory_of_caller();
    shared.shares.make_room(omp_get_max_threads());
#pragma omp parallel if (is_worth_it)
    f(Team(shared));
}

// f(row) of each row, of so many elements. A thread always gets the same rows.
template <typename F>
static void for_rows(const Team* team, int64_t rows, int64_t elements, const F& f) {
    in_team(team, rows > 1 && rows * elements >= PARALLEL_ELEMENTS, [&](const Team& own) {
        const F own_f = f;  // no other thread sees it, so what it has captured stays in registers
        const auto [begin, end] = own.part(rows);
        for (int64_t row = begin; row < end; ++row) own_f(row);
    });
}

// An argument of an operation, 8 bytes: an int64_t, a double or a pointer.
struct Argument {
    char bytes[8];

    template <typename A>
    operator A() const {
        static_assert(sizeof(A) == sizeof bytes);
        A value;
        std::memcpy(&value, bytes, sizeof value);
        return value;
    }
};

template <typename... A, size_t... I>
static void call(void (*f)(const Team*, A...), const Team* team, const Argument* arguments,
                 std::index_sequence<I...>) {
    f(team, arguments[I].operator A()...);
}

template <typename... A>
static void call(void (*f)(const Team*, A...), const Team* team, const Argument* arguments) {
    call(f, team, arguments, std::index_sequence_for<A...>());
}

}  // namespace fastserve

// Exports a function as an operation: called by each thread of a team, or without one, and then with
// threads of its own. Its results are whole when all threads of the team have returned.
#define OPERATION(name, function)                                                             \
    extern "C" void name(const fastserve::Team* team, const fastserve::Argument* arguments) { \
        fastserve::call(fastserve::function, team, arguments);                                \
    }
