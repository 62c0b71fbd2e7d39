// Runs the operations of a step one after the other, in one parallel region.
#include "team.h"

#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace fastserve {

// See program.py. Places are those of words.
struct Instruction {
    void (*operation)(const Team*, const Argument*);
    int64_t first_argument;
    int64_t rows;   // place of the number of rows; with none there is nothing to do
    int64_t joins;  // whether each thread needs only what it has done itself in the operation before
};

}  // namespace fastserve

extern "C" void fs_run(const fastserve::Instruction* instructions, int64_t count,
                       const fastserve::Argument* words) {
    using namespace fastserve;
    in_team(nullptr, true, [&](const Team& team) {
        for (int64_t i = 0; i < count; ++i) {
            const Instruction& one = instructions[i];
            if ((int64_t)words[one.rows] == 0) continue;
            if (!one.joins) team.barrier();
            one.operation(&team, words + one.first_argument);
        }
    });
}

#if defined(__linux__)
// Linux's ids of a parallel region's threads, `count` of them.
extern "C" void fs_thread_ids(int64_t* ids, int64_t count) {
#pragma omp parallel num_threads(count)
    ids[omp_get_thread_num()] = syscall(SYS_gettid);
}
#endif
