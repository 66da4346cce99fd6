// SPDX-License-Identifier: Apache-2.0
// Kernels with one fault each, and kernels without a fault. The first argument names a kernel. The
// emulator must stop the program in a kernel with a fault; otherwise the program prints "ran".
#include <cstdio>
#include <cstdlib>
#include <string>

#include "cuda_on_cpu.h"
#include "memory_check.h"

namespace {

constexpr int kThreads = 64;

// Each thread passes a number to its neighbour.
void neighbours(float* out, bool wait, bool fill) {
  static float place[kThreads];
  declare_shared(place, sizeof place);
  const unsigned t = threadIdx.x;
  if (fill || t > 0) place[t] = t;
  if (wait) __syncthreads();
  out[t] = place[(t + 1) % kThreads];
}

// Overwrites, without a barrier, values that other threads have read.
void write_after_read(float* out) {
  static float place[kThreads];
  declare_shared(place, sizeof place);
  const unsigned t = threadIdx.x;
  place[t] = t;
  __syncthreads();
  out[t] = place[(t + 1) % kThreads];
  place[t] = 0;
}

// Lanes overwrite a value that a neighbour reads; `wait`: after a barrier of the warp.
void within_a_warp(float* out, bool wait) {
  static float place[kThreads];
  declare_shared(place, sizeof place);
  const unsigned t = threadIdx.x;
  place[t] = t;
  __syncwarp();
  const float right = place[t ^ 1];
  if (wait) __syncwarp();
  place[t] = right;
  out[t] = __shfl_xor_sync(0xffffffffu, right, 1);
}

// The second warp reads what the first one wrote; `announced`: after waiting for it. With `early`,
// the first warp writes again after it has announced.
void two_warps(float* out, bool announced, bool early) {
  static float place[kThreads / 2];
  declare_shared(place, sizeof place);
  const unsigned lane = threadIdx.x % 32;
  if (threadIdx.x < 32) {
    place[lane] = lane;
    if (announced) announce(1);
    if (early) place[lane] = 0;
  } else {
    if (announced) wait_for_other(1);
    out[lane] = place[lane];
  }
}

void one_address(float* out, bool in_turn) {
  const unsigned writer = in_turn ? blockIdx.x * kThreads + threadIdx.x : 0;
  out[writer] = 1;
}
void one_thread(float* out) {
  if (threadIdx.x == 0) *out = 1;
}

void largest(int* out, bool atomic) {
  if (atomic)
    atomicMax(out, threadIdx.x);
  else
    *out = max(*out, static_cast<int>(threadIdx.x));
}

void copy(const float* from, float* out, bool commit, bool wait, int64_t shift) {
  float4* place = emulated_shared() + threadIdx.x;
  copy_async<4>(place, from + 4 * threadIdx.x + shift, 4);
  if (commit) copy_async_commit();
  if (wait) copy_async_wait(0);
  out[threadIdx.x] = place->x;
}

struct alignas(16) Four {
  float at[4];
};
void vectors(const float* from, float* out) {
  out[threadIdx.x] = reinterpret_cast<const Four*>(from)[threadIdx.x].at[1];
}

void part_of_a_block(float* out) {
  if (threadIdx.x < 3) {
    __syncthreads();
  } else {
    __syncthreads_or(1);
  }
  out[threadIdx.x] = 1;
}

}  // namespace

int main(int, char** arguments) {
  const std::string name = arguments[1];
  // Separate allocations, so that there is unregistered memory between them.
  auto *in = new Four[kThreads + 1](), *odd = new Four[kThreads + 1]();
  auto* out = new float[2 * kThreads]();
  auto* most = new int();
  memory_check::add_memory(in, sizeof(Four) * (kThreads + 1));
  memory_check::add_memory(odd, sizeof(Four) * (kThreads + 1));
  memory_check::add_memory(out, sizeof(float) * 2 * kThreads);
  memory_check::add_memory(most, sizeof *most);
  const auto launch = [&](auto kernel, auto... a) {
    launch_on_cpu(name.c_str(), kernel, name.find("blocks") == 0 ? 2 : 1, kThreads,
                  16 * kThreads)(a...);
  };
  if (name == "neighbours") launch(neighbours, out, true, true);
  if (name == "no_barrier") launch(neighbours, out, false, true);
  if (name == "unwritten") launch(neighbours, out, true, false);
  if (name == "write_after_read") launch(write_after_read, out);
  if (name == "blocks_apart") launch(one_address, out, true);
  if (name == "blocks_together") launch(one_address, out, false);
  if (name == "blocks_and_one_thread") launch(one_thread, out);
  if (name == "warp_barrier") launch(within_a_warp, out, true);
  if (name == "no_warp_barrier") launch(within_a_warp, out, false);
  if (name == "two_warps") launch(two_warps, out, true, false);
  if (name == "not_announced") launch(two_warps, out, false, false);
  if (name == "announced_too_early") launch(two_warps, out, true, true);
  if (name == "atomic") launch(largest, most, true);
  if (name == "not_atomic") launch(largest, most, false);
  if (name == "copy") launch(copy, in->at, out, true, true, int64_t{0});
  if (name == "copy_not_committed") launch(copy, in->at, out, false, true, int64_t{0});
  if (name == "copy_not_waited") launch(copy, in->at, out, true, false, int64_t{0});
  if (name == "copy_too_far") launch(copy, in->at, out, true, true, int64_t{5});
  if (name == "past_the_end") launch(one_address, out + 2 * kThreads, true);
  if (name == "aligned") launch(vectors, odd->at, out);
  if (name == "misaligned") launch(vectors, odd->at + 1, out);
  if (name == "part_of_a_block") launch(part_of_a_block, out);
  std::puts("ran");
}
