// SPDX-License-Identifier: Apache-2.0
#include "../int8_rows.h"

#include "kernels.h"
#include "rows.cuh"
#include "total_sums.cuh"

namespace fastagg::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;

// The tasks of a warp: scale blocks of S rows, which the warps of the grid take in turn.
struct BlockTasks {
  int64_t s, block;

  __device__ explicit BlockTasks(int64_t blocks) {
    const int64_t first = int64_t{blockIdx.x} * kWarps + threadIdx.x / kWarp;
    const int64_t stride = int64_t{gridDim.x} * kWarps;
    s = first / blocks;
    block = first % blocks;
    rows_ = stride / blocks;
    blocks_ = stride % blocks;
  }
  __device__ __forceinline__ void next(int64_t blocks) {
    s += rows_;
    block += blocks_;
    if (block < blocks) return;
    block -= blocks;
    ++s;
  }

 private:
  int64_t rows_, blocks_;  // from one task to the next
};

// Whether lanes may load and store the kLaneColumns columns from `lane_column` on as vectors:
// whether the addresses are aligned, and all columns of the scale block exist.
__device__ __forceinline__ bool has_vectors(const float* row, const int8_t* numbers, int64_t block,
                                            int64_t d) {
  const auto wide = reinterpret_cast<std::uintptr_t>(row) % sizeof(float4);
  const auto narrow = reinterpret_cast<std::uintptr_t>(numbers) % kLaneColumns;
  return (wide | narrow) == 0 && (block + 1) * kScaleBlock <= d;
}
__device__ __forceinline__ int64_t lane_column(int64_t block, int lane) {
  return block * kScaleBlock + lane * kLaneColumns;
}

// A task is a scale block of one row, and has one warp.
//   peaks   // [S], raised to the largest magnitudes of the rounded rows, or nullptr
__global__ void __launch_bounds__(kThreads)
    quantize_kernel(int8_t* const* numbers, float* const* scales, const float* const* rows,
                    int64_t blocks, int64_t S, int64_t d, int32_t* peaks) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  for (BlockTasks task(blocks); task.s < S; task.next(blocks)) {
    const int64_t s = task.s, block = task.block;
    const float* const row = rows[s];
    int8_t* const to = numbers[s];
    const bool vectors = has_vectors(row, to, block, d);
    Vector<float, kLaneColumns> x;
    if (vectors)
      x = *reinterpret_cast<const Vector<float, kLaneColumns>*>(row + lane_column(block, lane));
    else
#pragma unroll
      for (int j = 0; j < kLaneColumns; ++j) {
        const int64_t k = scale_column(block, lane, j);
        x.at[j] = k < d ? row[k] : 0.0f;
      }
    int32_t bits = 0;
#pragma unroll
    for (int j = 0; j < kLaneColumns; ++j) bits = max(bits, magnitude_bits(x.at[j]));
    for (int offset = kWarp / 2; offset > 0; offset /= 2)
      bits = max(bits, __shfl_xor_sync(kAllLanes, bits, offset));
    const Int8Scale scale = int8_scale(float_of_bits(static_cast<uint32_t>(bits)));
    Vector<int8_t, kLaneColumns> rounded;
#pragma unroll
    for (int j = 0; j < kLaneColumns; ++j)
      rounded.at[j] = static_cast<int8_t>(int8_number(x.at[j], scale.halves));
    if (vectors)
      *reinterpret_cast<Vector<int8_t, kLaneColumns>*>(to + lane_column(block, lane)) = rounded;
    else
#pragma unroll
      for (int j = 0; j < kLaneColumns; ++j) {
        const int64_t k = scale_column(block, lane, j);
        if (k < d) to[k] = rounded.at[j];
      }
    if (lane > 0) continue;
    scales[s][block] = scale.step;
    // The largest element of a block is 127 steps. Most blocks find a peak that is high enough:
    // reading it costs less than raising it, and an old value only costs the raising.
    const int32_t peak = magnitude_bits(127.0f * scale.step);
    if (peaks && peak > __ldcg(peaks + s)) atomicMax(peaks + s, peak);
  }
}

// A task is a scale block of one row, and has one warp.
__global__ void __launch_bounds__(kThreads)
    dequantize_kernel(float* const* out, const int8_t* const* numbers, const float* const* scales,
                      int64_t blocks, int64_t S, int64_t d) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  for (BlockTasks task(blocks); task.s < S; task.next(blocks)) {
    const int64_t s = task.s, block = task.block;
    const float scale = scales[s][block];
    float* const to = out[s];
    const int8_t* const from = numbers[s];
    if (has_vectors(to, from, block, d)) {
      const int64_t k = lane_column(block, lane);
      const auto x = *reinterpret_cast<const Vector<int8_t, kLaneColumns>*>(from + k);
      Vector<float, kLaneColumns> wide;
#pragma unroll
      for (int j = 0; j < kLaneColumns; ++j) wide.at[j] = static_cast<float>(x.at[j]) * scale;
      *reinterpret_cast<Vector<float, kLaneColumns>*>(to + k) = wide;
      continue;
    }
#pragma unroll
    for (int j = 0; j < kLaneColumns; ++j) {
      const int64_t k = scale_column(block, lane, j);
      if (k < d) to[k] = static_cast<float>(from[k]) * scale;
    }
  }
}

// out = total + sum_s weights[s] * (kept[s] - memory[s]), in the order of memory_total_kernel. The
// columns of a thread share a scale.
template <int V, bool kFaded>
__global__ void __launch_bounds__(kBlockThreads, 1)
    total_kernel(int64_t tasks, double* out, const double* total, const int8_t* const* kept,
                 const float* const* kept_scales, const int8_t* const* memory,
                 const float* const* memory_scales, int S, int64_t d, const double* weights,
                 FadedTotal faded) {
  static_assert(kScaleBlock % V == 0);
  extern __shared__ float4 shared[];
  const int batches = row_batches(S, blockDim.y);
  TablePlaces places(shared, V, S);
  const Staged rows(places, [&](int s) { return kept[s]; });
  const Staged olds(places, [&](int s) { return memory[s]; });
  const Staged scales(places, [&](int s) { return kept_scales[s]; });
  const Staged old_scales(places, [&](int s) { return memory_scales[s]; });
  const Staged factors(places, [&](int s) { return weights[s]; });
  __syncthreads();
  SplitSums<V> splits(shared, S);
  for (int64_t task = blockIdx.x; task < tasks; task += gridDim.x) {
    const auto columns = Columns<V>::of(task, d);
    const Share share = share_of_thread<V>(task, d);
    const int64_t block = columns.begin / kScaleBlock;
    double now[V];
    TotalSums<V, kFaded> sums;
    load_share<V>(now, total, share);
    for (int b = 0; b < batches; ++b) {
      Batch<int8_t, V> fresh, old;
      fresh.load_rows(rows, S, b, columns);
      old.load_rows(olds, S, b, columns);
#pragma unroll
      for (int j = 0; j < kHeldRows; ++j) {
        const int s = row_of(blockDim.y, threadIdx.y, b, j);
        if (s >= S || columns.count <= 0) continue;
        const float scale = scales[s][block], old_scale = old_scales[s][block];
        const double weight = factors[s];
#pragma unroll
        for (int v = 0; v < V; ++v) {
          const float row = static_cast<float>(fresh.x[j].at[v]) * scale;
          const float before = static_cast<float>(old.x[j].at[v]) * old_scale;
          sums.add(v, weight, faded, s, row, before);
        }
      }
    }
    sums.store(splits, now, out, faded, share);
  }
}

// Launches a kernel whose tasks are the scale blocks of S rows.
template <class... Parameters, class... Args>
cudaError_t launch_blocks(void (*kernel)(Parameters...), int64_t tasks, cudaStream_t stream,
                          Args... args) {
  if (tasks == 0) return cudaSuccess;
  int blocks = 0;
  if (cudaError_t error = resident_blocks(kernel, kThreads, ceil_div(tasks, kWarps), &blocks))
    return error;
  kernel<<<blocks, kThreads, 0, stream>>>(args...);
  return cudaGetLastError();
}

cudaError_t quantize(int8_t* const* numbers, float* const* scales, const float* const* rows,
                     int64_t S, int64_t d, int32_t* peaks, cudaStream_t stream) {
  const int64_t blocks = ceil_div(d, kScaleBlock);
  return launch_blocks(quantize_kernel, S * blocks, stream, numbers, scales, rows, blocks, S, d,
                       peaks);
}

}  // namespace

cudaError_t quantize(int8_t* const* numbers, float* const* scales, const float* const* rows,
                     int64_t S, int64_t d, cudaStream_t stream) {
  return quantize(numbers, scales, rows, S, d, nullptr, stream);
}

cudaError_t dequantize(float* const* out, const int8_t* const* numbers, const float* const* scales,
                       int64_t S, int64_t d, cudaStream_t stream) {
  const int64_t blocks = ceil_div(d, kScaleBlock);
  return launch_blocks(dequantize_kernel, S * blocks, stream, out, numbers, scales, blocks, S, d);
}

cudaError_t quantized_total(double* out, float* peaks, const double* total,
                            const float* const* updates, const int8_t* const* memory,
                            const float* const* memory_scales, int64_t S, int64_t d,
                            const double* weights, int8_t* const* kept, float* const* kept_scales,
                            const FadedTotal& faded, int width, cudaStream_t stream) {
  auto* bits = reinterpret_cast<int32_t*>(peaks);
  if (cudaError_t error = cudaMemsetAsync(bits, 0, S * sizeof(int32_t), stream)) return error;
  if (cudaError_t error = quantize(kept, kept_scales, updates, S, d, bits, stream)) return error;
  return with_width(width, [&](auto w) {
    constexpr int V = decltype(w)::value;
    return with_faded(faded, [&](auto fades) {
      return launch_rows<V>(total_kernel<V, fades()>, 5, S, d, stream, out, total, kept,
                            kept_scales, memory, memory_scales, S, d, weights, faded);
    });
  });
}

}  // namespace fastagg::cuda
