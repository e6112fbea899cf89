// The thread pool: every item once, exceptions, regions within and beside regions. Run under TSan by scripts/check.
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <thread>
#include <vector>

#include "pool.h"

namespace {

using foredraft::ThreadPool;

void require(bool condition, const char* what) {
    if (condition) return;
    std::fprintf(stderr, "test_thread_pool: %s\n", what);
    std::exit(1);
}

void every_item_runs_once(ThreadPool& pool) {
    for (int count : {0, 1, 2, 7, 64, 1000}) {
        for (int grain : {1, 3, 64, 2000}) {
            std::vector<int> runs(size_t(count), 0);  // not atomic: TSan sees it if two threads take one item
            pool.parallel_for(count, grain, [&](int begin, int end, int) {
                for (int i = begin; i < end; ++i) ++runs[size_t(i)];
            });
            for (int n : runs) require(n == 1, "an item ran never or twice");
        }
    }
}

void what_a_region_wrote_is_seen_after_it(ThreadPool& pool) {
    std::vector<int> values(256, 0);
    for (int round = 1; round <= 2000; ++round) {
        pool.parallel_for(256, 16, [&](int begin, int end, int) {
            for (int i = begin; i < end; ++i) values[size_t(i)] += round & 1;
        });
        require(values[0] == values[255], "a region ended before its work");
    }
}

void no_two_running_calls_share_a_thread_number(ThreadPool& pool) {
    std::vector<int> scratch(size_t(pool.num_threads()), 0);  // not atomic, as above
    pool.parallel_for(512, 1, [&](int begin, int end, int thread) {
        require(thread >= 0 && thread < pool.num_threads(), "a thread number is out of range");
        scratch[size_t(thread)] += end - begin;
    });
    int total = 0;
    for (int n : scratch) total += n;
    require(total == 512, "a chunk is missing");
}

void an_exception_reaches_the_caller_and_the_pool_goes_on(ThreadPool& pool) {
    for (int round = 0; round < 50; ++round) {
        bool caught = false;
        try {
            pool.parallel_for(64, 1, [&](int begin, int end, int) {
                if (begin <= round && round < end) throw std::runtime_error("stop");
            });
        } catch (const std::runtime_error&) {
            caught = true;
        }
        require(caught, "an exception was lost");
        every_item_runs_once(pool);
    }
}

void a_region_within_a_region_runs(ThreadPool& pool) {
    std::atomic<int> total{0};
    pool.parallel_for(8, 1, [&](int first, int last, int) {
        for (int i = first; i < last; ++i) pool.parallel_for(8, 1, [&](int begin, int end, int) { total += end - begin; });
    });
    require(total == 64, "a nested region lost work");
}

void two_callers_may_share_the_pool(ThreadPool& pool) {
    std::thread other([&] {
        for (int i = 0; i < 20; ++i) every_item_runs_once(pool);
    });
    for (int i = 0; i < 20; ++i) every_item_runs_once(pool);
    other.join();
}

}  // namespace

int main() {
    for (int threads : {1, 2, 4}) {
        ThreadPool pool(threads);
        require(pool.num_threads() == threads, "a pool has another number of threads than asked for");
        every_item_runs_once(pool);
        what_a_region_wrote_is_seen_after_it(pool);
        no_two_running_calls_share_a_thread_number(pool);
        an_exception_reaches_the_caller_and_the_pool_goes_on(pool);
        a_region_within_a_region_runs(pool);
        two_callers_may_share_the_pool(pool);
    }
    for (int i = 0; i < 200; ++i) ThreadPool idle(3);  // ends while its workers start, spin or sleep
}
