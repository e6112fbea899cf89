#include "pool.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <fstream>
#include <stdexcept>
#include <string>
#include <utility>
#if defined(__linux__)
#include <sched.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace foredraft {
namespace {

constexpr auto kSpin = std::chrono::microseconds(100);
constexpr int kMaxThreads = 256;

void relax() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Spins while done() is false; returns whether it became true within kSpin.
template <class Done>
bool spin(Done done) {
    const auto begin = std::chrono::steady_clock::now();
    do {
        for (int i = 0; i < 64; ++i) {
            if (done()) return true;
            relax();
        }
    } while (std::chrono::steady_clock::now() - begin < kSpin);
    return done();
}

}  // namespace

ThreadPool::ThreadPool(int num_threads) : num_processors_(default_threads()), spins_(num_threads <= num_processors_) {
    if (num_threads < 1 || num_threads > kMaxThreads)
        throw std::invalid_argument("threads must be in 1.." + std::to_string(kMaxThreads) + ", got " + std::to_string(num_threads));
    workers_.reserve(num_threads - 1);
    for (int t = 1; t < num_threads; ++t) workers_.emplace_back([this, t] { worker_loop(t); });
}

ThreadPool::~ThreadPool() {
    {
        std::lock_guard lock(mutex_);
        stop_.store(true);
    }
    wake_.notify_all();
    for (auto& worker : workers_) worker.join();
}

void ThreadPool::run(int count, int grain, Call call, void* body) {
    call_ = call;
    body_ = body;
    count_ = count;
    grain_ = std::max(grain, 1);
    next_.store(0, std::memory_order_relaxed);
    failed_.store(false, std::memory_order_relaxed);
    const uint64_t epoch = (state_.load(std::memory_order_relaxed) >> 16) + 1;
    // Sequentially consistent with sleepers_: either the caller sees the sleeper or the sleeper sees the region.
    state_.store(epoch << 16 | kOpen);
    if (sleepers_.load() > 0) {
        {
            std::lock_guard lock(mutex_);
        }
        if (spins_) {
            wake_.notify_all();
        } else {  // more would only queue for the processors
            for (int i = 0; i < std::max(1, num_processors_ - 1); ++i) wake_.notify_one();
        }
    }
    work(0);
    state_.fetch_and(~kOpen, std::memory_order_acq_rel);
    const auto empty = [&] { return (state_.load(std::memory_order_acquire) & kInside) == 0; };
    while (!(spins_ ? spin(empty) : empty())) std::this_thread::yield();
    std::exception_ptr error = std::exchange(error_, nullptr);
    busy_.store(false, std::memory_order_release);
    if (error) std::rethrow_exception(error);
}

void ThreadPool::work(int thread) {
    for (;;) {
        // Long chunks first, so that each thread reads long stretches; short ones last, so that all end together.
        int64_t begin = next_.load(std::memory_order_relaxed), size;
        do {
            if (begin >= count_ || failed_.load(std::memory_order_relaxed)) return;
            size = std::min<int64_t>(count_ - begin, std::max<int64_t>(grain_, (count_ - begin) / (2 * num_threads())));
        } while (!next_.compare_exchange_weak(begin, begin + size, std::memory_order_relaxed));
        try {
            call_(body_, int(begin), int(begin + size), thread);
        } catch (...) {
            std::lock_guard lock(mutex_);
            if (!failed_.exchange(true)) error_ = std::current_exception();
        }
    }
}

void ThreadPool::worker_loop(int thread) {
    const FloatEnvironment environment;
    uint64_t seen = 0;
    while (!stop_.load(std::memory_order_relaxed)) {
        uint64_t state = await_region(seen);
        seen = state >> 16;
        while ((state & kOpen) && state >> 16 == seen) {
            if (!state_.compare_exchange_weak(state, state + 1, std::memory_order_acq_rel)) continue;
            work(thread);
            state_.fetch_sub(1, std::memory_order_release);
            break;
        }
    }
}

// The state once its region is another than the last one seen, or once the pool stops.
uint64_t ThreadPool::await_region(uint64_t seen_epoch) {
    uint64_t state = 0;
    const auto changed = [&] {
        state = state_.load();
        return state >> 16 != seen_epoch || stop_.load(std::memory_order_relaxed);
    };
    if (spins_ ? spin(changed) : changed()) return state;
    std::unique_lock lock(mutex_);
    sleepers_.fetch_add(1);
    wake_.wait(lock, changed);
    sleepers_.fetch_sub(1);
    return state;
}

namespace {

// "max 100000" (v2) or a quota and a period in two files (v1): processors' worth of time, or infinity.
double read_quota(const std::string& folder) {
    double quota = 0, period = 0;
    if (std::ifstream v2(folder + "/cpu.max"); v2) {
        if (v2 >> quota >> period && quota > 0 && period > 0) return quota / period;
        return INFINITY;
    }
    std::ifstream v1_quota(folder + "/cpu.cfs_quota_us"), v1_period(folder + "/cpu.cfs_period_us");
    if (v1_quota >> quota && v1_period >> period && quota > 0 && period > 0) return quota / period;
    return INFINITY;
}

// The smallest quota on the way from this process's group to the root.
double cgroup_quota() {
    double quota = INFINITY;
    std::ifstream groups("/proc/self/cgroup");
    for (std::string line; std::getline(groups, line);) {
        // "0::/path" (v2) or "4:cpu,cpuacct:/path" (v1)
        const size_t first = line.find(':'), second = line.find(':', first + 1);
        if (second == std::string::npos) continue;
        const std::string controllers = "," + line.substr(first + 1, second - first - 1) + ",";
        const bool v2 = controllers == ",,", v1 = controllers.find(",cpu,") != std::string::npos;
        if (!v2 && !v1) continue;
        const std::string mount = v2 ? "/sys/fs/cgroup" : "/sys/fs/cgroup/cpu";
        for (std::string path = line.substr(second + 1);; path.erase(path.rfind('/'))) {
            quota = std::min(quota, read_quota(mount + (path == "/" ? "" : path)));
            if (path.find('/') == std::string::npos) break;
        }
    }
    return quota;
}

}  // namespace

int default_threads() {
    int threads = int(std::thread::hardware_concurrency());
#if defined(__linux__)
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof(set), &set) == 0) threads = CPU_COUNT(&set);
#endif
    const double quota = cgroup_quota();
    if (quota < threads) threads = int(std::ceil(quota));
    return std::clamp(threads, 1, kMaxThreads);
}

#if defined(__x86_64__)
FloatEnvironment::FloatEnvironment() : saved_(_mm_getcsr()) { _mm_setcsr(0x1f80); }
FloatEnvironment::~FloatEnvironment() { _mm_setcsr(uint32_t(saved_)); }
#elif defined(__aarch64__)
FloatEnvironment::FloatEnvironment() {
    asm volatile("mrs %0, fpcr" : "=r"(saved_));
    asm volatile("msr fpcr, %0" : : "r"(uint64_t(0)));
}
FloatEnvironment::~FloatEnvironment() { asm volatile("msr fpcr, %0" : : "r"(saved_)); }
#else
FloatEnvironment::FloatEnvironment() : saved_(0) {}
FloatEnvironment::~FloatEnvironment() {}
#endif

}  // namespace foredraft
