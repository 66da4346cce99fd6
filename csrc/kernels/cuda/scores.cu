// SPDX-License-Identifier: Apache-2.0
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

// *wrong = 1 if an id is outside [0, K) or comes twice. Each id is compared with those before it: S
// S / 2 reads from caches, fewer than those of update_kernel, and no scratch memory of K flags.
__global__ void __launch_bounds__(kThreads)
    ids_kernel(const int64_t* clients, int64_t S, int64_t K, const uint8_t* when, int32_t* wrong) {
  if (called_off(when)) return;
  for (int64_t i = blockIdx.x; i < S; i += gridDim.x) {
    const int64_t id = clients[i];
    bool refused = id < 0 || id >= K;
    for (int64_t j = threadIdx.x; j < i; j += blockDim.x) refused = refused || clients[j] == id;
    refused = __syncthreads_or(refused);
    if (threadIdx.x == 0 && refused) atomicMax(wrong, 1);
  }
}

//   wrong   // nullptr: the ids are known to be right
template <class Count>
__global__ void __launch_bounds__(kThreads)
    update_kernel(float* scores, Count* counts, int64_t K, const double* round_scores,
                  const int64_t* clients, int64_t S, const uint8_t* pairs, const uint8_t* when,
                  const int32_t* wrong) {
  if (called_off(when) || (wrong && *wrong)) return;
  constexpr Count kMost = static_cast<Count>((uint64_t{1} << (8 * sizeof(Count) - 1)) - 1);
  for (int64_t i = blockIdx.x; i < S; i += gridDim.x) {
    const int64_t row = clients[i] * K;
#pragma unroll 1
    for (int64_t j = threadIdx.x; j < S; j += blockDim.x) {
      const int64_t pair = row + clients[j];
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
                          const uint8_t* when, int32_t* wrong, cudaStream_t stream) {
  if (S == 0) return cudaSuccess;
  int blocks = 0;
  if (wrong) {
    if (cudaError_t error = cudaMemsetAsync(wrong, 0, sizeof(int32_t), stream)) return error;
    if (cudaError_t error = resident_blocks(ids_kernel, kThreads, S, &blocks)) return error;
    ids_kernel<<<blocks, kThreads, 0, stream>>>(clients, S, K, when, wrong);
    if (cudaError_t error = cudaGetLastError()) return error;
  }
  if (cudaError_t error = resident_blocks(update_kernel<Count>, kThreads, S, &blocks)) return error;
  update_kernel<Count><<<blocks, kThreads, 0, stream>>>(scores, counts, K, round_scores, clients, S,
                                                        pairs, when, wrong);
  return cudaGetLastError();
}

template cudaError_t update_scores(float*, int16_t*, int64_t, const double*, const int64_t*,
                                   int64_t, const uint8_t*, const uint8_t*, int32_t*, cudaStream_t);
template cudaError_t update_scores(float*, int32_t*, int64_t, const double*, const int64_t*,
                                   int64_t, const uint8_t*, const uint8_t*, int32_t*, cudaStream_t);

}  // namespace fastagg::cuda
