// Threads that share the items of a loop. Every calling thread has its own, which wait for it between two loops.
//
// OpenMP's wait in a way that suits one caller in a process: as soon as a second thread has called it too, as whoever
// loads a model does, its threads go to sleep between any two loops, and waking them costs more than a product with few
// rows. Loops can be given to it all the same, to compare, or where its threads are bound to processors (akv_use_openmp).
#pragma once

#include <cstdint>
#include <type_traits>

// Calls of(with, item) once for each item below count, on up to `threads` threads, the caller's among them. Items must
// neither throw nor begin a loop of their own. Where threads cannot be made, fewer do the work.
void team_run(int threads, int64_t count, void (*of)(void *with, int64_t item), void *with);

namespace {

template <class Of> inline void for_each(int threads, int64_t count, Of &&of) {
    if (threads < 2 || count < 2) {
        for (int64_t item = 0; item < count; ++item) of(item);
        return;
    }
    using Body = std::remove_reference_t<Of>;
    team_run(threads, count, [](void *with, int64_t item) { (*static_cast<Body *>(with))(item); }, &of);
}

}  // namespace
