// The threads that share the work of a pass.
#pragma once
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <mutex>
#include <thread>
#include <type_traits>
#include <vector>

namespace foredraft {

// Runs regions: a pass has some two hundred, so entering one costs about a microsecond. The calling thread works too.
// Workers spin for a moment between regions, then sleep; with more threads than processors they sleep at once, and a
// region wakes no more than there are processors. A region waits only for workers that have entered it: one that
// is asleep or descheduled misses it and costs nothing. A second region at the same time, nested or from another
// thread, runs on its caller alone.
class ThreadPool {
  public:
    explicit ThreadPool(int num_threads);
    ~ThreadPool();
    ThreadPool(const ThreadPool&) = delete;
    ThreadPool& operator=(const ThreadPool&) = delete;

    int num_threads() const { return int(workers_.size()) + 1; }

    // Calls body(begin, end, thread) for chunks, of at least `grain` items but the last, until [0, count) is done; thread is in
    // 0..num_threads-1 and no two running calls share it. Which thread gets which chunk is not determined. The first
    // exception is rethrown here, after the chunks under way have ended; those not yet begun are dropped.
    template <class Body>
    void parallel_for(int count, int grain, Body&& body) {
        if (count <= 0) return;
        if (count <= grain || workers_.empty() || !enter()) {
            body(0, count, 0);
            return;
        }
        using Plain = std::remove_reference_t<Body>;
        run(
            count, grain, [](void* b, int begin, int end, int thread) { (*static_cast<Plain*>(b))(begin, end, thread); },
            const_cast<void*>(static_cast<const void*>(&body)));
    }

  private:
    using Call = void (*)(void* body, int begin, int end, int thread);

    bool enter() { return !busy_.exchange(true, std::memory_order_acquire); }
    void run(int count, int grain, Call call, void* body);
    void work(int thread);
    void worker_loop(int thread);
    uint64_t await_region(uint64_t seen_epoch);

    // Region number << 16 | open bit | workers inside. The caller alone opens and closes; workers enter only while open.
    static constexpr uint64_t kOpen = 1 << 15, kInside = kOpen - 1;
    alignas(64) std::atomic<uint64_t> state_{0};
    alignas(64) std::atomic<int64_t> next_{0};
    // Written by the caller while nobody is inside.
    alignas(64) Call call_ = nullptr;
    void* body_ = nullptr;
    int count_ = 0, grain_ = 1;

    const int num_processors_;
    const bool spins_;
    std::atomic<bool> busy_{false}, failed_{false}, stop_{false};
    std::atomic<int> sleepers_{0};
    std::mutex mutex_;
    std::condition_variable wake_;
    std::exception_ptr error_;
    std::vector<std::thread> workers_;
};

// Processors that this process may use: its affinity mask, cut by the cgroup's quota (v1 and v2). At least 1.
int default_threads();

// The IEEE environment that all kernels assume (round to nearest, subnormals kept) for a scope; restores the caller's.
class FloatEnvironment {
  public:
    FloatEnvironment();
    ~FloatEnvironment();
    FloatEnvironment(const FloatEnvironment&) = delete;
    FloatEnvironment& operator=(const FloatEnvironment&) = delete;

  private:
    uint64_t saved_;
};

}  // namespace foredraft
