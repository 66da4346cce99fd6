// SPDX-License-Identifier: Apache-2.0
#undef NDEBUG  // the assertion below guards memory
#include <cassert>

#include "kernels.h"
#include "launch.cuh"
#include "pair_math.h"

namespace fastagg::cuda {
namespace {

constexpr int kThreads = 256;

// Thread blocks take rows of the matrix, threads take its columns.
template <bool kCosine>
__global__ void __launch_bounds__(kThreads)
    scores_kernel(const double* gram, int64_t S, double* out) {
  for (int64_t i = blockIdx.x; i < S; i += gridDim.x) {
    const double square = gram[i * (S + 1)];
    for (int64_t j = threadIdx.x; j < S; j += blockDim.x) {
      const double product = gram[i * S + j], other = gram[j * (S + 1)];
      out[i * S + j] = kCosine ? cosine_score(product, square, other, i == j)
                               : distance_score(product, square, other, i == j);
    }
  }
}

template <bool kCosine>
cudaError_t launch_scores(const double* gram, int64_t S, double* out, cudaStream_t stream) {
  if (S == 0) return cudaSuccess;
  int blocks = 0;
  if (cudaError_t error = resident_blocks(scores_kernel<kCosine>, kThreads, S, &blocks))
    return error;
  scores_kernel<kCosine><<<blocks, kThreads, 0, stream>>>(gram, S, out);
  return cudaGetLastError();
}

__device__ __forceinline__ int64_t checked_id(int64_t id, int64_t K) {
  assert(id >= 0 && id < K && "clients: expected ids in [0, K)");
  return id;
}

template <class Count>
__global__ void __launch_bounds__(kThreads)
    update_kernel(float* scores, Count* counts, int64_t K, const double* round_scores,
                  const int64_t* clients, int64_t S, const uint8_t* pairs, const uint8_t* when) {
  if (called_off(when)) return;
  constexpr Count kMost = static_cast<Count>((uint64_t{1} << (8 * sizeof(Count) - 1)) - 1);
  for (int64_t i = blockIdx.x; i < S; i += gridDim.x) {
    const int64_t row = checked_id(clients[i], K) * K;
#pragma unroll 1
    for (int64_t j = threadIdx.x; j < S; j += blockDim.x) {
      const int64_t pair = row + checked_id(clients[j], K);
      if (i == j || (pairs && !pairs[i * S + j])) continue;
      Count count = counts[pair];
      count = static_cast<Count>(count + (count < kMost));
      counts[pair] = count;
      scores[pair] = moved_mean(scores[pair], round_scores[i * S + j], count);
    }
  }
}

}  // namespace

cudaError_t cosine_scores(const double* gram, int64_t S, double* out, cudaStream_t stream) {
  return launch_scores<true>(gram, S, out, stream);
}

cudaError_t distance_scores(const double* gram, int64_t S, double* out, cudaStream_t stream) {
  return launch_scores<false>(gram, S, out, stream);
}

template <class Count>
cudaError_t update_scores(float* scores, Count* counts, int64_t K, const double* round_scores,
                          const int64_t* clients, int64_t S, const uint8_t* pairs,
                          const uint8_t* when, cudaStream_t stream) {
  if (S == 0) return cudaSuccess;
  int blocks = 0;
  if (cudaError_t error = resident_blocks(update_kernel<Count>, kThreads, S, &blocks)) return error;
  update_kernel<Count>
      <<<blocks, kThreads, 0, stream>>>(scores, counts, K, round_scores, clients, S, pairs, when);
  return cudaGetLastError();
}

template cudaError_t update_scores(float*, int16_t*, int64_t, const double*, const int64_t*,
                                   int64_t, const uint8_t*, const uint8_t*, cudaStream_t);
template cudaError_t update_scores(float*, int32_t*, int64_t, const double*, const int64_t*,
                                   int64_t, const uint8_t*, const uint8_t*, cudaStream_t);

}  // namespace fastagg::cuda
