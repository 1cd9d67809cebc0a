#include "team.h"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>
#include <vector>

#if defined(__unix__) || defined(__APPLE__)
#include <dlfcn.h>
#include <pthread.h>
#include <signal.h>
#endif

#include "interface.h"

namespace {

// How long a thread looks for the next loop before it sleeps: longer than Python needs between two calls, and much
// shorter than a step.
constexpr auto PATIENCE = std::chrono::microseconds(200);
constexpr int LOOKS = 64;  // between two readings of the clock

// Raised in a child that was forked, where the threads of its parent are not.
std::atomic<uint64_t> generation{0};

inline void pause() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// A program that waits for a signal has blocked it in its own threads; it must not find one of ours instead. Faults of
// a thread's own stay with it.
void leave_signals_to_others() {
#if defined(__unix__) || defined(__APPLE__)
    sigset_t signals;
    sigfillset(&signals);
    for (const int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT}) sigdelset(&signals, fault);
    pthread_sigmask(SIG_BLOCK, &signals, nullptr);
#endif
}

// What debuggers, profilers and `top -H` show.
void name(std::thread &thread) {
#if defined(__linux__)
    pthread_setname_np(thread.native_handle(), "agentkv");
#else
    static_cast<void>(thread);
#endif
}

struct alignas(64) Worker {
    std::atomic<uint64_t> calls{0};  // raised to call it to a loop, or to its end
    std::atomic<bool> sleeps{false};
    std::mutex mutex;
    std::condition_variable called;
    std::thread thread;

    void call() {
        calls.fetch_add(1);
        if (sleeps.load()) {
            const std::lock_guard<std::mutex> lock(mutex);
            called.notify_one();
        }
    }

    // Returns once it was called more often than `answered`.
    uint64_t wait(uint64_t answered) {
        const auto end = std::chrono::steady_clock::now() + PATIENCE;
        do {
            for (int look = 0; look < LOOKS; ++look) {
                if (const uint64_t now = calls.load(std::memory_order_acquire); now != answered) return now;
                pause();
            }
        } while (std::chrono::steady_clock::now() < end);
        std::unique_lock<std::mutex> lock(mutex);
        sleeps.store(true);
        called.wait(lock, [&] { return calls.load() != answered; });
        sleeps.store(false);
        return calls.load();
    }
};

class Team {
  public:
    const uint64_t born = generation.load();

    ~Team() {
        ends_.store(true);
        for (const auto &worker : workers_) worker->call();
        for (const auto &worker : workers_) worker->thread.join();
    }

    void run(int threads, int64_t count, void (*of)(void *, int64_t), void *with) {
        of_ = of;
        with_ = with;
        count_ = count;
        const int64_t wanted = threads < count ? threads : count;
        grow(static_cast<size_t>(wanted - 1));
        const int helpers = static_cast<int>(wanted - 1) < static_cast<int>(workers_.size())
                                ? static_cast<int>(wanted - 1)
                                : static_cast<int>(workers_.size());
        helpers_ = helpers;
        next_.store(0, std::memory_order_relaxed);
        inside_.store(0, std::memory_order_release);
        for (int i = 0; i < helpers; ++i) workers_[static_cast<size_t>(i)]->call();
        work();
        // Who is still inside finishes an item; who comes too late finds the door shut.
        for (int nobody = 0, looks = 0; !inside_.compare_exchange_weak(nobody, SHUT, std::memory_order_acq_rel); nobody = 0) {
            if (++looks < 4096)
                pause();
            else
                std::this_thread::yield();
        }
    }

  private:
    static constexpr int SHUT = -1;

    std::vector<std::unique_ptr<Worker>> workers_;
    std::atomic<bool> ends_{false};
    alignas(64) std::atomic<int> inside_{SHUT};
    alignas(64) std::atomic<int64_t> next_{0};
    void (*of_)(void *, int64_t) = nullptr;
    void *with_ = nullptr;
    int64_t count_ = 0;
    int helpers_ = 0;

    // Up to so many workers; fewer where the system gives no more.
    void grow(size_t wanted) {
        try {
            workers_.reserve(wanted);
            while (workers_.size() < wanted) {
                auto worker = std::make_unique<Worker>();
                const int number = static_cast<int>(workers_.size());
                worker->thread = std::thread([this, number, mine = worker.get()] { serve(number, *mine); });
                name(worker->thread);
                workers_.push_back(std::move(worker));
            }
        } catch (const std::system_error &) {
        } catch (const std::bad_alloc &) {
        }
    }

    void serve(int number, Worker &mine) {
        leave_signals_to_others();
        for (uint64_t answered = 0;;) {
            answered = mine.wait(answered);
            if (ends_.load()) return;
            if (!enter()) continue;
            if (number < helpers_) work();
            inside_.fetch_sub(1, std::memory_order_acq_rel);
        }
    }

    bool enter() {
        int now = inside_.load(std::memory_order_relaxed);
        do {
            if (now == SHUT) return false;
        } while (!inside_.compare_exchange_weak(now, now + 1, std::memory_order_acq_rel));
        return true;
    }

    void work() {
        for (int64_t item; (item = next_.fetch_add(1, std::memory_order_relaxed)) < count_;) of_(with_, item);
    }
};

struct Mine {
    std::unique_ptr<Team> team;

    ~Mine() { forget_if_forked(); }
    void forget_if_forked() {
        // Its threads live in the parent: they can be neither called nor joined.
        if (team && team->born != generation.load()) static_cast<void>(team.release());
    }
};

thread_local Mine mine;

#if defined(__unix__) || defined(__APPLE__)
const int watches_forks = pthread_atfork(nullptr, nullptr, [] { generation.fetch_add(1); });
#endif

// What compilers make of "#pragma omp parallel": GCC's runtime has it, and LLVM's and Intel's have it too. That of torch is in
// the process; one that this library was linked with would be a second, with threads of its own.
using Parallel = void (*)(void (*of)(void *), void *with, unsigned threads, unsigned flags);
std::atomic<Parallel> openmp{nullptr};

struct Loop {
    std::atomic<int64_t> next;
    int64_t count;
    void (*of)(void *, int64_t);
    void *with;

    static void work(void *loop) {
        Loop &mine = *static_cast<Loop *>(loop);
        for (int64_t item; (item = mine.next.fetch_add(1, std::memory_order_relaxed)) < mine.count;) mine.of(mine.with, item);
    }
};

}  // namespace

void team_run(int threads, int64_t count, void (*of)(void *with, int64_t item), void *with) {
    if (const Parallel parallel = openmp.load(std::memory_order_relaxed)) {
        Loop loop{{0}, count, of, with};
        return parallel(Loop::work, &loop, static_cast<unsigned>(threads < count ? threads : count), 0);
    }
    mine.forget_if_forked();
    if (!mine.team) mine.team.reset(new (std::nothrow) Team);
    if (mine.team)
        mine.team->run(threads, count, of, with);
    else
        for (int64_t item = 0; item < count; ++item) of(with, item);
}

// Has the process's OpenMP run all loops from now on, or teams again. AKV_NO_OPENMP: there is none, and teams run them.
extern "C" int32_t akv_use_openmp(int32_t use) {
    Parallel found = nullptr;
#if defined(__unix__) || defined(__APPLE__)
    if (use) found = reinterpret_cast<Parallel>(dlsym(RTLD_DEFAULT, "GOMP_parallel"));
#endif
    openmp.store(found);
    return use && !found ? AKV_NO_OPENMP : AKV_OK;
}
