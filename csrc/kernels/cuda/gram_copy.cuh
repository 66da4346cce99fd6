// SPDX-License-Identifier: Apache-2.0
// Asynchronous copies of rows to shared memory, for gram_few.
//
// An access of a warp takes whole cache lines: 8 lanes copy the 128 bytes of two steps of a row.
// Half a line would cost the L2 cache as much as a whole one, which would halve the speed of
// memory. The vectors are stored in the order in which lanes use them, [step, row group, lane]. So
// a lane reads what other lanes of its warp have copied.
#pragma once

#include "gram_layout.h"
#include "launch.cuh"

namespace fastagg::cuda {

// Copies 4 floats in accesses of kBytes bytes. Only the first `valid` floats are read; the others
// become 0. `from` must be an address in a row even if valid <= 0. compute-sanitizer checks an
// access as a whole, so the end of a row is copied with kBytes = 4.
template <int kBytes>
__device__ __forceinline__ void copy_async(float4* to, const float* from, int64_t valid) {
  const auto shared = static_cast<uint32_t>(__cvta_generic_to_shared(to));
#pragma unroll
  for (int part = 0; part < 16; part += kBytes) {
    const int there = static_cast<int>(
        at_least(at_most(valid * 4 - part, kBytes), 0));  // bytes to read; the others become 0
    const float* address = there > 0 ? from + part / 4 : from;
    if constexpr (kBytes == 16)
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(address),
                   "r"(there)
                   : "memory");
    else
      asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(shared + part),
                   "l"(address), "n"(kBytes), "r"(there)
                   : "memory");
  }
}

// What a lane copies in one access: row `row` of 4 or 8 rows and the columns from `column` on, to
// the place `target` of a stage with `groups` row groups.
struct LineAccess {
  int row, column, target;

  __device__ LineAccess(int lane, int lanes_of_row, int groups)
      : row(lane / lanes_of_row),
        column(lane % lanes_of_row * 4),
        target(lane % lanes_of_row / 4 * groups * kWarp + lane / lanes_of_row * 4 + lane % 4) {}
};

}  // namespace fastagg::cuda
