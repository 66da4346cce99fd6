// SPDX-License-Identifier: Apache-2.0
// Six threads run kernels on the pool at the same time, under ThreadSanitizer (`make sanitize`).
// Every task must run once, by a worker that exists.
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <thread>
#include <vector>

#include "../../csrc/kernels/cpu/pool.h"

namespace {

using fastagg::cpu::pool_threads;

std::atomic<int64_t> wrong{0}, helped{0};

void call_kernels(int caller) {
  for (int round = 0; round < 1000; ++round) {
    const int workers = 1 + (round * 7 + caller) % 5;
    const int64_t tasks = 1 + (round * 13 + caller) % 40;
    std::vector<int64_t> sums(tasks, 0), runs(tasks, 0);
    pool_threads(workers).for_each(tasks, [&](int64_t task, int worker) {
      ++runs[task];
      for (int64_t i = 0; i < 3000; ++i) sums[task] += i ^ task;
      if (worker >= workers) ++wrong;
      if (worker > 0) ++helped;
    });
    for (int64_t run : runs) wrong += run != 1;
  }
}

}  // namespace

int main() {
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 6; ++caller) callers.emplace_back(call_kernels, caller);
  for (auto& caller : callers) caller.join();
  std::printf("wrong: %lld, tasks run by helpers: %lld\n", static_cast<long long>(wrong),
              static_cast<long long>(helped));
  return wrong != 0 || helped == 0;
}
