// SPDX-License-Identifier: Apache-2.0
// The Gram kernel for more rows, which is bound by arithmetic. A thread block has one tile of
// 128 x 128 entries and one chunk. While its warps multiply one step, the next step is loaded from
// memory into registers. It is converted to words once and stored in shared memory in the order in
// which lanes read it.
#include "gram_mma.cuh"
#include "gram_parts.h"

namespace fastagg::cuda {
namespace {

constexpr int kGroups = kTileRows / 8;                       // row groups of a strip
constexpr int kStripVectors = kGroups * kWarp;               // of a step: [group, lane]
constexpr int kStageVectors = 2 * kStripVectors;             // strips I and J
constexpr int kLoads = kStageVectors / kTileThreads;         // of a thread
constexpr int kSumBytes = kTileSlots * int{sizeof(double)};  // 128 KB
constexpr int kSharedBytes = kSumBytes + 2 * kStageVectors * int{sizeof(Words4)};  // and 32 KB
static_assert(kLoads == 4 && kSharedBytes <= 163 << 10);                           // of sm_80

template <int V>
__device__ __forceinline__ float4 load_vector(const float* row, int64_t column, int64_t d) {
  float x[4] = {};
  if (row)
#pragma unroll
    for (int k = 0; k < 4; k += V) {
      const Floats<V> part = load<V>(row + column + k, d - column - k);
#pragma unroll
      for (int v = 0; v < V; ++v) x[k + v] = part.at[v];
    }
  return make_float4(x[0], x[1], x[2], x[3]);
}

template <int V, Precision kPrecision>
__global__ void __launch_bounds__(kTileThreads, 1)
    gram_many_kernel(const float* const* rows, int64_t S, int64_t d, Partition part, int64_t first,
                     const uint8_t* needed, int64_t slots, double* partials, int32_t* found) {
  if (blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0) *found = 0;
  const int64_t tile = blockIdx.x;
  if (needed && !needed[tile]) return;
  const int64_t I = triangle_row(tile), J = tile - triangle_index(I, 0);
  const int64_t begin = (first + blockIdx.y) * part.chunk;
  const int64_t end = at_most(begin + part.chunk, d);
  const int64_t steps = ceil_div(end - begin, kStep);

  extern __shared__ float4 shared[];
  auto* wide = reinterpret_cast<double*>(shared) + threadIdx.x;
  auto* stage = reinterpret_cast<Words4*>(shared + kSumBytes / int{sizeof(float4)});
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const bool diagonal = I == J;
  const int used = diagonal ? kLoads / 2 : kLoads;

  // The rows of vectors threadIdx.x + n * kTileThreads of a stage: strip I first, then J.
  const float* source[kLoads];
#pragma unroll
  for (int n = 0; n < kLoads; ++n) {
    const int vector = threadIdx.x + n * kTileThreads;
    const int64_t strip = vector < kStripVectors ? I : J;
    const int64_t s = strip * kTileRows + vector % kStripVectors / kWarp * 8 + lane_row(lane);
    source[n] = s < S && n < used ? rows[s] : nullptr;
  }
  float4 coming[kLoads];
  const auto fetch = [&](int64_t step) {
    const int64_t column = begin + step * kStep + lane_column(lane);
#pragma unroll
    for (int n = 0; n < kLoads; ++n) coming[n] = load_vector<V>(source[n], column, d);
  };
  const auto put = [&](int place) {
#pragma unroll
    for (int n = 0; n < kLoads; ++n)
      if (n < used)
        stage[place * kStageVectors + threadIdx.x + n * kTileThreads] =
            Products<kPrecision>::words(coming[n]);
  };

  const int row = warp_row(warp), column = warp_column(warp);
  const bool busy = !diagonal || column < row + 64;  // else all entries are above the diagonal
  float sums[kTileSums] = {};
#pragma unroll
  for (int n = 0; n < kTileSums; ++n) wide[n * kTileThreads] = 0.0;
  fetch(0);
  put(0);
  __syncthreads();
  for (int64_t step = 0; step < steps; ++step) {
    if (step + 1 < steps) fetch(step + 1);
    if (busy) {
      const Words4* strip_i = stage + (step % 2) * kStageVectors;
      const Words4* strip_j = diagonal ? strip_i : strip_i + kStripVectors;
      Words4 words_b[4];
#pragma unroll
      for (int b = 0; b < 4; ++b) words_b[b] = strip_j[(column / 8 + b) * kWarp + lane];
#pragma unroll
      for (int a = 0; a < 4; ++a) {
        const Words4 a0 = strip_i[(row / 8 + 2 * a) * kWarp + lane];
        const Words4 a1 = strip_i[(row / 8 + 2 * a + 1) * kWarp + lane];
#pragma unroll
        for (int b = 0; b < 4; ++b)
          add_step<kPrecision>(sums + tile_sum(a, b, 0), a0, a1, words_b[b]);
      }
      if (step % kBlockSteps == kBlockSteps - 1) flush(sums, wide, kTileThreads);
    }
    // This writes the other half of the stage, which all warps have read before the last barrier.
    if (step + 1 < steps) put((step + 1) % 2);
    __syncthreads();
  }
  flush(sums, wide, kTileThreads);
  double* out = partials + blockIdx.y * slots + tile * kTileSlots + threadIdx.x;
#pragma unroll 4
  for (int n = 0; n < kTileSums; ++n) out[n * kTileThreads] = wide[n * kTileThreads];
}

}  // namespace

cudaError_t gram_many(const float* const* rows, int64_t S, int64_t d, const GramPlan& plan,
                      int64_t first, int64_t count, const uint8_t* needed, double* partials,
                      int32_t* found, Precision precision, int width, cudaStream_t stream) {
  return with_precision(precision, [&](auto p) {
    return with_width(width, [&](auto w) {
      const auto kernel = gram_many_kernel<decltype(w)::value, decltype(p)::value>;
      if (cudaError_t error = cudaFuncSetAttribute(
              kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes))
        return error;
      const dim3 grid(static_cast<unsigned>(plan.tiles), static_cast<unsigned>(count));
      kernel<<<grid, kTileThreads, kSharedBytes, stream>>>(rows, S, d, plan.part, first, needed,
                                                           plan.slots, partials, found);
      return cudaGetLastError();
    });
  });
}

}  // namespace fastagg::cuda
