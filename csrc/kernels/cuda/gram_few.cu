// SPDX-License-Identifier: Apache-2.0
// The Gram kernel for few rows, which is bound by memory. Each warp has one chunk and the whole
// triangle of products, so warps share nothing and never wait for each other. A lane copies exactly
// the 16 bytes of each row group that it will use, asynchronously and several steps ahead, into a
// ring in shared memory that no other lane uses. The A operand of 16 rows is also the B operand of
// two tiles, so nothing is loaded twice.
#include "gram_mma.cuh"
#include "gram_parts.h"

namespace fastagg::cuda {
namespace {

constexpr int kWarps = 4;

template <int M>  // strips of 16 rows
struct Few {
  static constexpr int kSums = few_tiles(M) * 4;              // accumulators of a lane
  static constexpr int kSteps = M == 1 ? 4 : M == 2 ? 2 : 1;  // of a stage, 3 to 4 KB of rows
  static constexpr int kStages = M == 3 ? 6 : 5;              // of the ring, 18 or 20 KB
  static constexpr int kStageVectors = kSteps * 2 * M;        // that a lane loads
  static constexpr int kRingBytes = kStages * kStageVectors * kWarp * int{sizeof(float4)};
  static constexpr int kSumBytes = kSums * kWarp * int{sizeof(double)};
  static constexpr int kTableBytes = 16 * M * int{sizeof(const float*)};
  static constexpr int kSharedBytes = kTableBytes + kWarps * (kRingBytes + kSumBytes);
  static_assert(kBlockSteps % kSteps == 0 && kTableBytes % 16 == 0);
  static_assert(kSharedBytes <= 163 << 10);  // limit of sm_80
};

// Copies 4 floats in accesses of kBytes bytes. Only the first `valid` floats are read; the others
// become 0. `from` must be an address in a row even if valid <= 0.
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

template <int M, int kBytes, Precision kPrecision>
__global__ void __launch_bounds__(kWarps* kWarp)
    gram_few_kernel(const float* const* rows, int64_t S, int64_t d, Partition part,
                    double* partials, int32_t* found) {
  using T = Few<M>;
  extern __shared__ float4 shared[];
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  auto* table = reinterpret_cast<const float**>(shared);  // null past S
  for (int s = threadIdx.x; s < 16 * M; s += blockDim.x) table[s] = s < S ? rows[s] : nullptr;
  if (blockIdx.x == 0 && threadIdx.x == 0) *found = 0;
  __syncthreads();

  const int64_t chunk = int64_t{blockIdx.x} * kWarps + warp;
  if (chunk >= part.chunks) return;
  const int64_t begin = chunk * part.chunk, end = at_most(begin + part.chunk, d);
  const int64_t stages = ceil_div(end - begin, T::kSteps * kStep);
  float4* ring = shared + (T::kTableBytes + warp * T::kRingBytes) / int{sizeof(float4)} + lane;
  double* wide =
      reinterpret_cast<double*>(shared) +
      (T::kTableBytes + kWarps * T::kRingBytes + warp * T::kSumBytes) / int{sizeof(double)} + lane;

  // Vector v of a stage is step v / 2M, row group v % 2M. Past the last stage, an empty group of
  // copies is committed, so that wait_group still counts correctly.
  const auto fetch = [&](int64_t stage, int place) {
    if (stage < stages)
#pragma unroll
      for (int v = 0; v < T::kStageVectors; ++v) {
        const float* row = table[v % (2 * M) * 8 + lane_row(lane)];
        const int64_t column =
            begin + (stage * T::kSteps + v / (2 * M)) * kStep + lane_column(lane);
        const int64_t valid = row ? d - column : 0;
        copy_async<kBytes>(ring + (place * T::kStageVectors + v) * kWarp,
                           valid > 0 ? row + column : table[0], valid);
      }
    asm volatile("cp.async.commit_group;" ::: "memory");
  };

  float sums[T::kSums] = {};
#pragma unroll
  for (int n = 0; n < T::kSums; ++n) wide[n * kWarp] = 0.0;
#pragma unroll
  for (int stage = 0; stage < T::kStages - 1; ++stage) fetch(stage, stage);

  int place = 0;  // of this stage in the ring
  int steps = 0;  // since the last flush
  for (int64_t stage = 0; stage < stages; ++stage) {
    asm volatile("cp.async.wait_group %0;" ::"n"(T::kStages - 2) : "memory");
    // This overwrites the stage before this one, which has been read.
    fetch(stage + T::kStages - 1, place == 0 ? T::kStages - 1 : place - 1);
#pragma unroll
    for (int step = 0; step < T::kSteps; ++step) {
      Words4 words[2 * M];
#pragma unroll
      for (int group = 0; group < 2 * M; ++group)
        words[group] = Products<kPrecision>::words(
            ring[(place * T::kStageVectors + step * 2 * M + group) * kWarp]);
#pragma unroll
      for (int a = 0; a < M; ++a)
#pragma unroll
        for (int b = 0; b <= 2 * a + 1; ++b)
          add_step<kPrecision>(sums + 4 * few_tile(a, b), words[2 * a], words[2 * a + 1], words[b]);
    }
    place = place + 1 == T::kStages ? 0 : place + 1;
    steps += T::kSteps;
    if (steps == kBlockSteps) {
      flush(sums, wide, kWarp);
      steps = 0;
    }
  }
  flush(sums, wide, kWarp);
  double* out = partials + chunk * T::kSums * kWarp + lane;
#pragma unroll 4
  for (int n = 0; n < T::kSums; ++n) out[n * kWarp] = wide[n * kWarp];
}

template <int M, int kBytes, Precision kPrecision>
cudaError_t launch(const float* const* rows, int64_t S, int64_t d, Partition part, double* partials,
                   int32_t* found, cudaStream_t stream) {
  const auto kernel = gram_few_kernel<M, kBytes, kPrecision>;
  if (cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                               Few<M>::kSharedBytes))
    return error;
  const auto blocks = static_cast<unsigned>(ceil_div(part.chunks, kWarps));
  kernel<<<blocks, kWarps * kWarp, Few<M>::kSharedBytes, stream>>>(rows, S, d, part, partials,
                                                                   found);
  return cudaGetLastError();
}

}  // namespace

cudaError_t gram_few(const float* const* rows, int64_t S, int64_t d, const GramPlan& plan,
                     double* partials, int32_t* found, Precision precision, int width,
                     cudaStream_t stream) {
  return with_precision(precision, [&](auto p) {
    return with_width(width, [&](auto w) {
      constexpr Precision kPrecision = decltype(p)::value;
      constexpr int kBytes = 4 * decltype(w)::value;
      const auto call = plan.row_tiles == 1   ? launch<1, kBytes, kPrecision>
                        : plan.row_tiles == 2 ? launch<2, kBytes, kPrecision>
                        : plan.row_tiles == 3 ? launch<3, kBytes, kPrecision>
                                              : launch<4, kBytes, kPrecision>;
      return call(rows, S, d, plan.part, partials, found, stream);
    });
  });
}

}  // namespace fastagg::cuda
