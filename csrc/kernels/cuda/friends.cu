// SPDX-License-Identifier: Apache-2.0
// One warp for each client k: its lanes share row k of the state.
#include <type_traits>

#include "kernels.h"
#include "launch.cuh"
#include "pair_math.h"

namespace fastagg::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kBlocks = 4;    // of a multiprocessor at least: 64 registers
constexpr int64_t kByte = 8;  // clients in a byte of packed flags

// Flag (k, i) of a set of pairs; set if there is no data.
__device__ __forceinline__ bool flag(Flags flags, int64_t K, int64_t k, int64_t i) {
  if (!flags.data) return true;
  if (!flags.packed) return flags.data[k * K + i] != 0;
  return flags.data[k * ceil_div(K, kByte) + i / kByte] >> (i % kByte) & 1;
}

__device__ __forceinline__ Ranked best_of_warp(Ranked mine) {
  for (int offset = kWarp / 2; offset > 0; offset /= 2) {
    const Ranked other{__shfl_xor_sync(kAllLanes, mine.score, offset),
                       __shfl_xor_sync(kAllLanes, mine.client, offset)};
    mine = better(mine, other);
  }
  return mine;
}

// Clients for which a warp loads all that it needs before it uses the first of it.
constexpr int kLoads = 4;

// The best of the candidates of client k that have been scored and for which `eligible` holds.
template <class Count, class Condition>
__device__ __forceinline__ Ranked best_scored(const float* scores, const Count* counts,
                                              Flags candidates, int64_t K, int64_t k, int lane,
                                              const Condition& eligible) {
  Ranked best{0.0f, -1};
#pragma unroll kLoads
  for (int64_t i = lane; i < K; i += kWarp) {
    // Nothing is loaded on a condition, so that the loads of several iterations are in flight.
    const Count count = counts[k * K + i];
    const float score = scores[k * K + i];
    const bool allowed = eligible(i), wanted = flag(candidates, K, k, i);
    if (count > 0 && allowed && wanted) best = better(best, {score, i});
  }
  return best_of_warp(best);
}

template <class Count>
__global__ void __launch_bounds__(kThreads, kBlocks)
    select_kernel(const float* scores, const Count* counts, const uint8_t* active, Flags candidates,
                  int64_t K, int64_t* friends) {
  const int lane = threadIdx.x % kWarp;
  const int64_t warps = int64_t{gridDim.x} * blockDim.x / kWarp;
  for (int64_t k = (int64_t{blockIdx.x} * blockDim.x + threadIdx.x) / kWarp; k < K; k += warps) {
    int64_t chosen = k;
    if (!active[k])
      chosen = best_scored(scores, counts, candidates, K, k, lane, [&](int64_t i) {
                 return active[i] != 0;
               }).client;
    if (lane == 0) friends[k] = chosen;
  }
}

// With packed flags, the ballot of a warp has the flags of 32 clients, and lane b has byte b of it.
template <class Count>
__global__ void __launch_bounds__(kThreads, kBlocks)
    eliminate_kernel(uint8_t* candidates, bool packed, const float* scores, const Count* counts,
                     int64_t K, double threshold, const uint8_t* when) {
  if (called_off(when)) return;
  const int lane = threadIdx.x % kWarp;
  const int64_t warps = int64_t{gridDim.x} * blockDim.x / kWarp;
  const int64_t row_bytes = packed ? ceil_div(K, kByte) : K;
  for (int64_t k = (int64_t{blockIdx.x} * blockDim.x + threadIdx.x) / kWarp; k < K; k += warps) {
    const Ranked best = best_scored(scores, counts, {candidates, packed}, K, k, lane,
                                    [&](int64_t i) { return i != k; });
    if (best.client < 0) continue;
    __syncwarp();  // every lane has read the row
    uint8_t* const row = candidates + k * row_bytes;
#pragma unroll 1
    for (int64_t first = 0; first < K; first += kLoads * kWarp) {
      Count count[kLoads];
      float score[kLoads];
#pragma unroll
      for (int n = 0; n < kLoads; ++n) {
        const int64_t i = at_most(first + n * kWarp + lane, K - 1);
        count[n] = counts[k * K + i];
        score[n] = scores[k * K + i];
      }
#pragma unroll
      for (int n = 0; n < kLoads; ++n) {
        const int64_t begin = first + n * kWarp, i = begin + lane;
        const bool removed = i < K && i != k && i != best.client && count[n] > 0 &&
                             far_below(best.score, score[n], threshold);
        const unsigned all = __ballot_sync(kAllLanes, removed);
        if (!packed) {
          if (removed) row[i] = 0;
        } else if (lane < kWarp / kByte) {
          const unsigned byte = all >> (lane * kByte) & 0xff;
          if (byte) row[begin / kByte + lane] &= static_cast<uint8_t>(~byte);
        }
      }
    }
  }
}

// call(counts in their type)
template <class Call>
cudaError_t with_counts(Counts counts, const Call& call) {
  if (counts.is_short) return call(static_cast<const int16_t*>(counts.data));
  return call(static_cast<const int32_t*>(counts.data));
}

}  // namespace

cudaError_t select_friends(const float* scores, Counts counts, const uint8_t* active,
                           Flags candidates, int64_t K, int64_t* friends, cudaStream_t stream) {
  if (K == 0) return cudaSuccess;
  return with_counts(counts, [&](auto* n) {
    const auto kernel = select_kernel<std::remove_const_t<std::remove_pointer_t<decltype(n)>>>;
    int blocks = 0;
    if (cudaError_t error =
            resident_blocks(kernel, kThreads, ceil_div(K * kWarp, kThreads), &blocks))
      return error;
    kernel<<<blocks, kThreads, 0, stream>>>(scores, n, active, candidates, K, friends);
    return cudaGetLastError();
  });
}

cudaError_t eliminate(uint8_t* candidates, bool packed, const float* scores, Counts counts,
                      int64_t K, double threshold, const uint8_t* when, cudaStream_t stream) {
  if (K == 0) return cudaSuccess;
  return with_counts(counts, [&](auto* n) {
    const auto kernel = eliminate_kernel<std::remove_const_t<std::remove_pointer_t<decltype(n)>>>;
    int blocks = 0;
    if (cudaError_t error =
            resident_blocks(kernel, kThreads, ceil_div(K * kWarp, kThreads), &blocks))
      return error;
    kernel<<<blocks, kThreads, 0, stream>>>(candidates, packed, scores, n, K, threshold, when);
    return cudaGetLastError();
  });
}

}  // namespace fastagg::cuda
