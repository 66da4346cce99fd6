// SPDX-License-Identifier: Apache-2.0
#include <setjmp.h>
#include <signal.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <cstdio>
#include <cstdlib>
#include <deque>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

#include "cuda_on_cpu.h"
#include "memory_check.h"
#include "tensor_core.h"

using memory_check::Access;

dim3 gridDim, blockDim;
Index threadIdx, blockIdx;

namespace {

constexpr int kMostThreads = 1024, kWarp = 32;
constexpr size_t kStackBytes = 128 << 10;

enum class Wait {
  kNothing,
  kBarrier,
  kBarrierOr,
  kWarpBarrier,
  kAnnounce,
  kOther,
  kShuffle,
  kBf16,
  kTf32
};  // the block waits for the first ones, warps for the others

struct Copy {
  float* to;
  float values[4];
};

struct Fiber {
  ucontext_t context;
  jmp_buf jump;
  bool started, done;
  Index index;
  Wait wait;
  uint64_t shuffled;
  int partner;
  int predicate;
  int barrier;
  MmaLane* mma;
  std::vector<Copy> copies;              // of the group that is still open
  std::deque<std::vector<Copy>> groups;  // closed ones, the oldest first
};

std::vector<Fiber> fibers(kMostThreads);
Fiber* current = nullptr;
jmp_buf scheduler;
ucontext_t scheduler_context;
void (*thread_body)(const void*);
const void* thread_arguments;
size_t dynamic_limit = 48 << 10;
char* dynamic_shared = nullptr;
size_t dynamic_bytes = 0;
int announcing[16];  // for each barrier of two warps, the warp that has announced, or -1
std::mt19937 random_order;
bool in_order = true;
TensorCore tensor_core;

// setcontext and swapcontext ask the kernel for the signal mask; only the first switch needs them.
void run(Fiber& fiber) {
  current = &fiber;
  threadIdx = fiber.index;
  memory_check::begin_thread(static_cast<int>(&fiber - fibers.data()));
  if (_setjmp(scheduler) == 0) {
    if (fiber.started) _longjmp(fiber.jump, 1);
    fiber.started = true;
    setcontext(&fiber.context);
  }
  memory_check::end_thread();
  current = nullptr;
}

void wait_for(Wait wait) {
  Fiber* me = current;
  me->wait = wait;
  if (_setjmp(me->jump) == 0) _longjmp(scheduler, 1);
}

void thread_main() {
  thread_body(thread_arguments);
  current->done = true;
  _longjmp(scheduler, 1);
}

// Handles the traps that the compiler inserts for UndefinedBehaviorSanitizer.
void on_trap(int) {
  memory_check::fail("does what C++ leaves undefined: a misaligned access, an overflow, a shift");
}

void prepare(int threads) {
  static char* stacks = nullptr;
  if (!stacks) {
    void* data = mmap(nullptr, kStackBytes * kMostThreads, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (data == MAP_FAILED) memory_check::fail("no memory for stacks");
    stacks = static_cast<char*>(data);
    memory_check::set_stacks(stacks, kStackBytes, kMostThreads);
    signal(SIGILL, on_trap);
    signal(SIGTRAP, on_trap);
  }
  for (int t = 0; t < threads; ++t) {
    Fiber& f = fibers[t];
    const unsigned x = t % blockDim.x, y = t / blockDim.x;
    f.started = f.done = false;
    f.index = {x, y, 0};
    f.wait = Wait::kNothing;
    f.copies.clear();
    f.groups.clear();
    getcontext(&f.context);
    f.context.uc_stack.ss_sp = stacks + t * kStackBytes;
    f.context.uc_stack.ss_size = kStackBytes;
    f.context.uc_link = nullptr;
    makecontext(&f.context, thread_main, 0);
  }
}

template <class T>
void into_order(std::vector<T>& items) {
  if (!in_order) std::shuffle(items.begin(), items.end(), random_order);
}

// Returns whether all 32 threads of a warp have reached the same barrier, shuffle or product, and
// if so resumes them.
bool release_warp(Fiber* lanes) {
  const Wait wait = lanes[0].wait;
  if (wait < Wait::kWarpBarrier) return false;
  for (int l = 0; l < kWarp; ++l)
    if (lanes[l].done || lanes[l].wait != wait) return false;
  const int warp = static_cast<int>(lanes - fibers.data()) / kWarp;
  if (wait == Wait::kWarpBarrier) {
    memory_check::barrier_of_warp(warp);
  } else if (wait == Wait::kAnnounce || wait == Wait::kOther) {
    int& other = announcing[lanes[0].barrier];
    for (int l = 0; l < kWarp; ++l)
      if (lanes[l].barrier != lanes[0].barrier) memory_check::fail("lanes are at two barriers");
    if (wait == Wait::kAnnounce) {
      if (other >= 0)
        memory_check::fail("warp %d announces what warp %d has announced", warp, other);
      other = warp;
      memory_check::announced(warp);
    } else {
      if (other < 0) return false;
      memory_check::other_seen(warp, other);
      other = -1;
    }
  } else if (wait == Wait::kShuffle) {
    uint64_t values[kWarp];
    for (int l = 0; l < kWarp; ++l) values[l] = lanes[lanes[l].partner].shuffled;
    for (int l = 0; l < kWarp; ++l) lanes[l].shuffled = values[l];
  } else {
    MmaLane all[kWarp];
    for (int l = 0; l < kWarp; ++l) all[l] = *lanes[l].mma;
    multiply(tensor_core, wait == Wait::kBf16, all);
    for (int l = 0; l < kWarp; ++l) *lanes[l].mma = all[l];
  }
  for (int l = 0; l < kWarp; ++l) lanes[l].wait = Wait::kNothing;
  return true;
}

// Returns whether all threads that have not ended are at the same barrier, and if so resumes them.
bool release_block(int threads) {
  Wait wait = Wait::kNothing;
  int any = 0;
  for (int t = 0; t < threads; ++t) {
    const Fiber& f = fibers[t];
    if (f.done) continue;
    if (wait == Wait::kNothing) wait = f.wait;
    if (f.wait != wait || (wait != Wait::kBarrier && wait != Wait::kBarrierOr)) return false;
    any |= f.predicate;
  }
  if (wait == Wait::kNothing) return false;
  for (int t = 0; t < threads; ++t) {
    fibers[t].predicate = any;
    fibers[t].wait = Wait::kNothing;
  }
  memory_check::barrier();
  return true;
}

void run_block(int threads) {
  prepare(threads);
  std::fill(std::begin(announcing), std::end(announcing), -1);
  std::vector<int> order(threads);
  std::iota(order.begin(), order.end(), 0);
  for (;;) {
    bool progress = false, all_done = true;
    into_order(order);
    for (const int t : order) {
      Fiber& f = fibers[t];
      if (!f.done && f.wait == Wait::kNothing) {
        run(f);
        progress = true;
      }
      all_done = all_done && f.done;
    }
    if (all_done) return;
    for (int warp = 0; warp < threads / kWarp; ++warp)
      progress = release_warp(&fibers[warp * kWarp]) || progress;
    progress = release_block(threads) || progress;
    if (!progress) memory_check::fail("deadlock: not all threads come to a barrier");
  }
}

TensorCore chosen_tensor_core() {
  const char* name = std::getenv("FASTAGG_EMULATED_TENSOR_CORE");
  if (!name || !std::strcmp(name, "sm_90")) return TensorCore::kSm90;
  if (!std::strcmp(name, "sm_80")) return TensorCore::kSm80;
  memory_check::fail("FASTAGG_EMULATED_TENSOR_CORE is %s", name);
}

}  // namespace

int shared_limit() {
  const char* kib = std::getenv("FASTAGG_EMULATED_SHARED");
  return (kib ? std::atoi(kib) : 163) << 10;
}

void allow_dynamic_shared(int bytes) {
  if (bytes > shared_limit()) memory_check::fail("%d bytes of shared memory", bytes);
  dynamic_limit = bytes;
}

void run_grid(const char* kernel, dim3 grid, dim3 block, size_t shared, void (*body)(const void*),
              const void* arguments, size_t argument_bytes) {
  memory_check::begin_launch(kernel, arguments, argument_bytes);
  if (const char* path = std::getenv("FASTAGG_EMULATED_LAUNCHES")) {
    std::FILE* const file = std::fopen(path, "a");
    if (!file) memory_check::fail("cannot open %s", path);
    std::fprintf(file, "%s\n", kernel);
    std::fclose(file);
  }
  const char* order = std::getenv("FASTAGG_EMULATED_ORDER");
  const int seed = order ? std::atoi(order) : 0;
  in_order = seed == 0;
  random_order.seed(seed);
  tensor_core = chosen_tensor_core();
  gridDim = grid;
  blockDim = block;
  const unsigned threads = block.x * block.y;
  if (threads == 0 || threads > kMostThreads || grid.x == 0 || grid.y == 0 || grid.y > 65535)
    memory_check::fail("a launch of (%u, %u) blocks of (%u, %u) threads", grid.x, grid.y, block.x,
                       block.y);
  if (shared > dynamic_limit) memory_check::fail("%zu bytes of shared memory", shared);
  // Aligned to 16 bytes, but not larger than requested, so that any access beyond is found.
  std::vector<char> memory(shared + 16);
  dynamic_shared = memory.data() + (16 - reinterpret_cast<uintptr_t>(memory.data()) % 16) % 16;
  dynamic_bytes = shared;
  thread_body = body;
  thread_arguments = arguments;
  std::vector<Index> blocks;
  for (unsigned y = 0; y < grid.y; ++y)
    for (unsigned x = 0; x < grid.x; ++x) blocks.push_back({x, y, 0});
  into_order(blocks);
  for (const Index& index : blocks) {
    blockIdx = index;
    std::memset(dynamic_shared, 0xff, dynamic_bytes);
    memory_check::begin_block(index.x, index.y, dynamic_shared, dynamic_bytes);
    run_block(static_cast<int>(threads));
  }
  memory_check::end_launch();
  dynamic_limit = 48 << 10;
}

float4* emulated_shared() {
  return reinterpret_cast<float4*>(dynamic_shared);
}
void declare_shared(void* data, size_t bytes) {
  memory_check::add_shared(data, bytes);
}

void __syncthreads() {
  wait_for(Wait::kBarrier);
}
int __syncthreads_or(int predicate) {
  current->predicate = predicate != 0;
  wait_for(Wait::kBarrierOr);
  return current->predicate;
}
void __syncwarp() {
  wait_for(Wait::kWarpBarrier);
}
void announce(int barrier) {
  current->barrier = barrier;
  wait_for(Wait::kAnnounce);
}
void wait_for_other(int barrier) {
  current->barrier = barrier;
  wait_for(Wait::kOther);
}
int lane_of_thread() {
  return static_cast<int>(current - fibers.data()) % kWarp;
}
uint64_t shuffle(uint64_t value, int source) {
  Fiber* me = current;
  me->shuffled = value;
  me->partner = source;
  wait_for(Wait::kShuffle);
  return me->shuffled;
}
int32_t atomicMax(int32_t* p, int32_t v) {
  memory_check::check(p, sizeof *p, Access::kAtomic);
  const int32_t old = *p;
  *p = std::max(old, v);
  return old;
}
int32_t atomicAdd(int32_t* p, int32_t v) {
  memory_check::check(p, sizeof *p, Access::kAtomic);
  const int32_t old = *p;
  *p = old + v;
  return old;
}
int32_t __ldcg(const int32_t* p) {
  memory_check::check(p, sizeof *p, Access::kAtomic);
  return *p;
}

static void multiply_in_warp(Wait wait, float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                             uint32_t b1) {
  MmaLane lane;
  std::copy(c, c + 4, lane.c);
  std::copy(a, a + 4, lane.a);
  lane.b[0] = b0;
  lane.b[1] = b1;
  current->mma = &lane;
  wait_for(wait);
  std::copy(lane.c, lane.c + 4, c);
}
void mma_bf16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  multiply_in_warp(Wait::kBf16, c, a, b0, b1);
}
void mma_tf32(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  multiply_in_warp(Wait::kTf32, c, a, b0, b1);
}

// Reads the source now and writes the destination as late as possible: when the thread waits.
void copy_async(float4* to, const float* from, int64_t valid, int bytes) {
  if (reinterpret_cast<uintptr_t>(from) % bytes || reinterpret_cast<uintptr_t>(to) % 16)
    memory_check::fail("copies asynchronously from %p to %p, %d bytes at a time",
                       static_cast<const void*>(from), static_cast<void*>(to), bytes);
  const int there = static_cast<int>(std::max<int64_t>(std::min<int64_t>(valid, 4), 0));
  Copy copy{reinterpret_cast<float*>(to), {}};
  memory_check::check(from, there * sizeof(float), Access::kRead);
  memory_check::check(to, sizeof *to, Access::kCopy);
  std::copy(from, from + there, copy.values);
  std::memset(to, 0xff, sizeof *to);
  current->copies.push_back(copy);
}
void copy_async_commit() {
  current->groups.emplace_back(std::move(current->copies));
  current->copies.clear();
}
void copy_async_wait(int groups_left) {
  while (static_cast<int>(current->groups.size()) > groups_left) {
    for (const Copy& copy : current->groups.front()) {
      std::copy(copy.values, copy.values + 4, copy.to);
      memory_check::copy_landed(copy.to, sizeof copy.values);
    }
    current->groups.pop_front();
  }
}
