// Loops on threads: every item once, whoever calls, in a forked child too, and an end that waits for nobody.
#pragma once

#include <sys/wait.h>
#include <unistd.h>

#include <thread>

#include "../../../kernels/agentkv_kernels/cpu/src/team.h"

namespace {

// Whether every item of many loops, of more and fewer threads and items than before, was done once.
bool does_each_once(uint64_t seed) {
    for (int loop = 0; loop < 300; ++loop) {
        seed = seed * 6364136223846793005ull + 1442695040888963407ull;
        const int threads = 1 + static_cast<int>(seed >> 33) % 5, count = static_cast<int>(seed >> 40) % 40;
        std::vector<int> done(static_cast<size_t>(count) + 1);  // By nobody but who has the item, so without atomics.
        for_each(threads, count, [&](int64_t item) { done[static_cast<size_t>(item)] += 1 + loop; });
        for (int item = 0; item < count; ++item)
            if (done[static_cast<size_t>(item)] != 1 + loop) return false;
        // Longer than threads wait for before they sleep.
        if (loop % 100 == 99) usleep(1000);
    }
    return true;
}

void all_teams() {
    expect(does_each_once(1), "each item is done once");
    const pid_t child = fork();
    if (child == 0) {
        alarm(30);
        exit(does_each_once(2) ? 0 : 1);  // With the ends of its threads, and of those that it does not have.
    }
    expect(does_each_once(3), "each item is done once beside a child");
    int status = 1;
    waitpid(child, &status, 0);
    expect(status == 0, "each item is done once in a child, which ends");
    std::vector<std::thread> callers;
    bool done[3] = {};
    for (int i = 0; i < 3; ++i) callers.emplace_back([i, &done] { done[i] = does_each_once(4 + static_cast<uint64_t>(i)); });
    for (std::thread &caller : callers) caller.join();
    expect(done[0] && done[1] && done[2], "each item is done once for every caller");
}

}  // namespace
