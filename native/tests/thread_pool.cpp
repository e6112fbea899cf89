// The thread pool under contention: every item once, exceptions, nesting, two callers, sleeping workers.
#include "pool.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <thread>
#include <vector>

namespace {

void require(bool condition, const char* what) {
    if (condition) return;
    std::fprintf(stderr, "failed: %s\n", what);
    std::exit(1);
}

using foredraft::ThreadPool;

void every_item_runs_once(int threads) {
    ThreadPool pool(threads);
    for (int region = 0; region < 3000; ++region) {
        const int count = region % 37, grain = 1 + region % 5;
        std::vector<int> runs(size_t(count), 0);  // plain integers: TSan sees an item or a thread number used twice
        std::vector<int> calls(size_t(threads), 0);
        pool.parallel_for(count, grain, [&](int begin, int end, int thread) {
            ++calls[size_t(thread)];
            for (int i = begin; i < end; ++i) ++runs[size_t(i)];
        });
        for (const int n : runs) require(n == 1, "every item once");
    }
}

void workers_wake_from_sleep() {
    ThreadPool pool(3);
    for (int region = 0; region < 20; ++region) {
        std::this_thread::sleep_for(std::chrono::milliseconds(2));  // longer than workers spin
        std::atomic<int> waiting{0};
        // Two chunks that wait for each other: only two threads together can finish.
        pool.parallel_for(2, 1, [&](int, int, int) {
            ++waiting;
            while (waiting < 2) std::this_thread::yield();
        });
    }
}

void first_exception_reaches_the_caller() {
    ThreadPool pool(3);
    for (int region = 0; region < 500; ++region) {
        bool caught = false;
        try {
            pool.parallel_for(40, 1, [&](int begin, int, int) {
                if (begin % 7 == 3) throw std::runtime_error("item");
            });
        } catch (const std::runtime_error&) {
            caught = true;
        }
        require(caught, "an exception is rethrown");
        std::atomic<int> done{0};
        pool.parallel_for(40, 1, [&](int begin, int end, int) { done += end - begin; });
        require(done == 40, "the pool works after an exception");
    }
}

void nested_and_concurrent_regions_run_alone() {
    ThreadPool pool(2);
    std::atomic<int> done{0};
    const auto call = [&] {
        for (int region = 0; region < 500; ++region)
            pool.parallel_for(4, 1, [&](int begin, int end, int) {
                for (int i = begin; i < end; ++i) pool.parallel_for(3, 1, [&](int b, int e, int) { done += e - b; });
            });
    };
    std::thread other(call);
    call();
    other.join();
    require(done == 2 * 500 * 4 * 3, "nested regions of two callers");
}

void idle_workers_can_be_joined() {
    for (int i = 0; i < 50; ++i) ThreadPool pool(1 + i % 4);
}

void print_cost_of_a_region(int threads, int regions) {
    ThreadPool pool(threads);
    std::atomic<int> sum{0};
    const auto begin = std::chrono::steady_clock::now();
    for (int i = 0; i < regions; ++i) pool.parallel_for(2, 1, [&](int b, int, int) { sum.fetch_add(b, std::memory_order_relaxed); });
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    std::printf("%.2f us a region on %d threads\n", seconds / regions * 1e6, threads);
}

}  // namespace

int main() {
    for (int threads = 1; threads <= 4; ++threads) every_item_runs_once(threads);
    workers_wake_from_sleep();
    first_exception_reaches_the_caller();
    nested_and_concurrent_regions_run_alone();
    idle_workers_can_be_joined();
    every_item_runs_once(256);  // far more than processors: surplus threads sleep
    print_cost_of_a_region(2, 20000);
    print_cost_of_a_region(64, 2000);
}
