// SPDX-License-Identifier: Apache-2.0
#include "kernels.h"
#include "launch.cuh"
#include "similar_layout.h"

namespace fastagg::cuda {
namespace {

// Vectors of k int8 numbers, some of them in an order.
//   ids   // [any], or null: position i is vector i
struct Vectors {
  const int8_t* numbers;
  const int64_t* ids;

  __device__ __forceinline__ int64_t id(int64_t position) const {
    return ids ? ids[position] : position;
  }
};

// Copies columns [column, column + 64) of the vectors at positions [begin, end), at most 64 of
// them, to shared memory, with zeros past the end and past k.
//   words   // [kSimilarTile * kSimilarStride]
__device__ __forceinline__ void copy_tile(int32_t* words, const Vectors& from, int64_t begin,
                                          int64_t end, int64_t k, int64_t column, bool aligned) {
  const int thread = static_cast<int>(threadIdx.x), row = copied_row(thread);
  const int8_t* x = begin + row < end ? from.numbers + from.id(begin + row) * k : nullptr;
  int32_t* const to = words + row * kSimilarStride + copied_word(thread);
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    const int64_t first = column + 4 * (copied_word(thread) + w);
    uint32_t word = 0;
    if (x && aligned && first < k) {  // k is a multiple of 4
      word = *reinterpret_cast<const uint32_t*>(x + first);
    } else if (x && !aligned) {
#pragma unroll
      for (int b = 0; b < 4; ++b)
        if (first + b < k) word |= uint32_t{static_cast<uint8_t>(x[first + b])} << (8 * b);
    }
    to[w] = static_cast<int32_t>(word);
  }
}

// Whether a value at a position is better than the best so far; the lower position wins ties.
__device__ __forceinline__ bool better(float value, int64_t at, float best, int64_t best_at) {
  return value > best || (value == best && at < best_at);
}

// A task is a tile of queries of one group.
//   spans   // [tasks, 4]: begin and end of its queries, begin and end of its rows
__global__ void __launch_bounds__(kSimilarThreads)
    most_similar_kernel(Vectors queries, Vectors rows, const float* factors, const int64_t* spans,
                        int64_t tasks, int64_t k, bool aligned, int64_t* best, float* similarity) {
  __shared__ int32_t a[kSimilarTile * kSimilarStride];
  __shared__ int32_t b[kSimilarTile * kSimilarStride];
  const int thread = static_cast<int>(threadIdx.x);
  for (int64_t task = blockIdx.x; task < tasks; task += gridDim.x) {
    const int64_t begin = spans[4 * task], end = spans[4 * task + 1];
    const int64_t first_row = spans[4 * task + 2], last_row = spans[4 * task + 3];
    float value[4];
    int64_t at[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      value[i] = -INFINITY;
      at[i] = -1;
    }
    for (int64_t row = first_row; row < last_row; row += kSimilarTile) {
      int32_t sums[4][4] = {};
      for (int64_t column = 0; column < k; column += 4 * kSimilarWords) {
        copy_tile(a, queries, begin, end, k, column, aligned);
        copy_tile(b, rows, row, last_row, k, column, aligned);
        __syncthreads();
#pragma unroll
        for (int w = 0; w < kSimilarWords; ++w) {
          int32_t x[4], y[4];
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            x[i] = a[similar_query(thread, i) * kSimilarStride + w];
            y[i] = b[similar_row(thread, i) * kSimilarStride + w];
          }
#pragma unroll
          for (int i = 0; i < 4; ++i)
#pragma unroll
            for (int j = 0; j < 4; ++j) sums[i][j] = __dp4a(x[i], y[j], sums[i][j]);
        }
        __syncthreads();
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) {  // ascending
        const int64_t position = row + similar_row(thread, j);
        if (position >= last_row) continue;
        const float factor = factors[rows.id(position)];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float product = static_cast<float>(sums[i][j]) * factor;
          if (at[i] < 0 || product > value[i]) {
            value[i] = product;
            at[i] = position;
          }
        }
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      for (int offset = kSimilarSide / 2; offset > 0; offset /= 2) {
        const float other = __shfl_xor_sync(kAllLanes, value[i], offset);
        const int64_t other_at = __shfl_xor_sync(kAllLanes, at[i], offset);
        if (other_at >= 0 && (at[i] < 0 || better(other, other_at, value[i], at[i]))) {
          value[i] = other;
          at[i] = other_at;
        }
      }
      const int64_t query = begin + similar_query(thread, i);
      if (thread % kSimilarSide == 0 && query < end) {
        best[query] = at[i];
        similarity[query] = value[i];
      }
    }
  }
}

}  // namespace

cudaError_t most_similar(const int8_t* queries, const int64_t* query_ids, const int8_t* rows,
                         const float* factors, const int64_t* row_ids, const int64_t* spans,
                         int64_t tasks, int64_t k, int64_t* best, float* similarity,
                         cudaStream_t stream) {
  if (tasks == 0) return cudaSuccess;
  const auto bits = reinterpret_cast<std::uintptr_t>(queries) |
                    reinterpret_cast<std::uintptr_t>(rows) | static_cast<std::uintptr_t>(k);
  int blocks = 0;
  if (cudaError_t error = resident_blocks(most_similar_kernel, kSimilarThreads, tasks, &blocks))
    return error;
  most_similar_kernel<<<blocks, kSimilarThreads, 0, stream>>>(
      Vectors{queries, query_ids}, Vectors{rows, row_ids}, factors, spans, tasks, k, bits % 4 == 0,
      best, similarity);
  return cudaGetLastError();
}

}  // namespace fastagg::cuda
