// SPDX-License-Identifier: Apache-2.0
// Every row has a list: its squared distances to all n rows, ascending. The first is its own, which
// is -1 there, so that entry t is the distance to its t-th nearest other row.
#include "../nearest_rows.h"

#include "kernels.h"
#include "launch.cuh"
#include "sort_layout.h"
#include "warp_sum.cuh"

namespace fastagg::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;
constexpr int64_t kMostShared = 6144;  // values of a list that are sorted in shared memory: 48 KB

// The squared distance of rows i and j. It is symmetric in them, and 0 for identical rows.
//   stride   // from one row of the Gram matrix to the next
__device__ __forceinline__ double square_distance(const double* gram, int64_t stride, int64_t i,
                                                  int64_t j) {
  const double squares = gram[i * (stride + 1)] + gram[j * (stride + 1)];
  const double distance2 = squares - 2.0 * gram[i * stride + j];
  return distance2 < 0.0 ? 0.0 : distance2;  // a NaN stays NaN
}

// Sorts n values. All threads of the thread block must call it.
__device__ __forceinline__ void sort(double* values, int64_t n) {
  for (int64_t p = 1; p < n; p *= 2)
    for (int64_t k = p; k >= 1; k /= 2) {
      __syncthreads();
      for (int64_t i = threadIdx.x;; i += kThreads) {
        const int64_t low = odd_even_low(i, p, k), high = low + k;
        if (high >= n) break;
        if (!odd_even_compares(low, p, k)) continue;
        const double a = values[low], b = values[high];
        if (b < a) values[low] = b, values[high] = a;
      }
    }
  __syncthreads();
}

// lists [n, n], of the first n rows. A thread block takes a row.
__global__ void __launch_bounds__(kThreads)
    lists_kernel(const double* gram, int64_t stride, int64_t n, double* lists) {
  extern __shared__ float4 shared[];
  for (int64_t i = blockIdx.x; i < n; i += gridDim.x) {
    double* const list = lists + i * n;
    double* const values = n <= kMostShared ? reinterpret_cast<double*>(shared) : list;
    for (int64_t j = threadIdx.x; j < n; j += kThreads)
      values[j] = i == j ? -1.0 : square_distance(gram, stride, i, j);
    sort(values, n);
    if (values == list) continue;
    for (int64_t j = threadIdx.x; j < n; j += kThreads) list[j] = values[j];
    __syncthreads();  // the next row overwrites them
  }
}

cudaError_t make_lists(const double* gram, int64_t stride, int64_t n, double* lists,
                       cudaStream_t stream) {
  const int64_t shared = n <= kMostShared ? n * int64_t{sizeof(double)} : 0;
  int blocks = 0;
  if (cudaError_t error = resident_blocks(lists_kernel, kThreads, n, &blocks, shared)) return error;
  lists_kernel<<<blocks, kThreads, shared, stream>>>(gram, stride, n, lists);
  return cudaGetLastError();
}

// The sum of a list's first `count` distances to others.
__device__ __forceinline__ double score_of(const double* list, int64_t count) {
  return warp_sum(count, [&](int64_t t) { return list[1 + t]; });
}

// A warp takes a row.
__global__ void __launch_bounds__(kThreads)
    krum_scores_kernel(const double* lists, int64_t n, int64_t count, double* scores) {
  const int64_t warps = int64_t{gridDim.x} * kWarps;
  for (int64_t i = int64_t{blockIdx.x} * kWarps + threadIdx.x / kWarp; i < n; i += warps) {
    const double score = score_of(lists + i * n, count);
    if (lane_of_warp() == 0) scores[i] = score;
  }
}

// --- krum_selection: two launches for a choice

// Removes a value from the others of a list, of which there are `others`. All threads of the thread
// block must call it.
__device__ __forceinline__ void remove(double* others_of_list, int64_t others, double value) {
  const double below =
      warp_sum(others, [&](int64_t t) { return others_of_list[t] < value ? 1.0 : 0.0; });  // exact
  const auto place = at_most(static_cast<int64_t>(below), others - 1);  // the end only with a NaN
  __syncthreads();                                                      // every warp has counted
  for (int64_t begin = place; begin < others - 1; begin += kThreads) {
    const int64_t t = begin + threadIdx.x;
    const double next = t < others - 1 ? others_of_list[t + 1] : 0.0;
    __syncthreads();  // all have read what their neighbours overwrite
    if (t < others - 1) others_of_list[t] = next;
  }
  __syncthreads();
}

// Removes the last choice from the lists of the rows that are left, and scores them. A thread block
// takes a row.
//   last     // the last choice, or null
//   left     // how many rows are left
//   is_out   // [n]
__global__ void __launch_bounds__(kThreads)
    rescore_kernel(const double* gram, int64_t n, double* lists, const int64_t* last, int64_t left,
                   int64_t count, const uint8_t* is_out, double* scores) {
  for (int64_t i = blockIdx.x; i < n; i += gridDim.x) {
    if (is_out[i]) continue;
    double* const list = lists + i * n;
    if (last) remove(list + 1, left, square_distance(gram, n, i, *last));
    const double score = score_of(list, count);
    if (threadIdx.x == 0) scores[i] = score;
  }
}

struct Choice {
  double score;
  int64_t row;
};

// The lower score wins, on ties the lower row.
__device__ __forceinline__ Choice better(Choice a, Choice b) {
  return b.score < a.score || (b.score == a.score && b.row < a.row) ? b : a;
}

// One warp chooses the row with the lowest score among those that are not out. A score that is not
// finite counts as infinite.
__global__ void __launch_bounds__(kWarp)
    choose_kernel(const double* scores, int64_t n, uint8_t* is_out, int64_t* chosen) {
  Choice best{INFINITY, n};
  for (int64_t i = threadIdx.x; i < n; i += kWarp)
    if (!is_out[i]) best = better(best, {scores[i] < INFINITY ? scores[i] : INFINITY, i});
  for (int offset = kWarp / 2; offset > 0; offset /= 2)
    best = better(best, {__shfl_xor_sync(kAllLanes, best.score, offset),
                         __shfl_xor_sync(kAllLanes, best.row, offset)});
  __syncwarp();  // all lanes have read is_out
  if (threadIdx.x == 0) {
    *chosen = best.row;
    is_out[best.row] = 1;
  }
}

// --- nearest_means

// mixing [size, size]. A thread block takes a row.
__global__ void __launch_bounds__(kThreads)
    shares_kernel(const double* gram, int64_t size, int64_t n, const double* weights, int64_t count,
                  const double* lists, double* mixing) {
  for (int64_t i = blockIdx.x; i < size; i += gridDim.x) {
    double* const shares = mixing + i * size;
    if (i >= n) {
      for (int64_t j = threadIdx.x; j < size; j += kThreads) shares[j] = i == j ? 1.0 : 0.0;
      continue;
    }
    const double* const list = lists + i * n;
    const double farthest = list[count - 1];  // its own -1 if count is 1
    const double nearer =
        warp_sum(count, [&](int64_t t) { return list[t] < farthest ? 1.0 : 0.0; });  // exact
    const auto places = count - static_cast<int64_t>(nearer);  // for rows that are as far as that
    const auto distance = [&](int64_t j) {
      return i == j ? -1.0 : square_distance(gram, size, i, j);
    };
    for (int64_t j = threadIdx.x; j < size; j += kThreads) {
      const double own = j < n ? distance(j) : INFINITY;
      bool taken = i == j || own < farthest;
      if (j < n && own == farthest) {
        int64_t before = 0;
        for (int64_t k = 0; k < j && before < places; ++k) before += distance(k) == farthest;
        taken = before < places;
      }
      shares[j] = taken ? weights[j] : 0.0;
    }
    __syncthreads();
    const double total = warp_sum(n, [&](int64_t j) { return shares[j]; });
    __syncthreads();  // every warp has the total of the old shares
    for (int64_t j = threadIdx.x; j < n; j += kThreads) shares[j] /= total;
  }
}

}  // namespace

cudaError_t krum_scores(const double* gram, int64_t n, int64_t neighbours, double* scores,
                        double* lists, cudaStream_t stream) {
  if (n == 0) return cudaSuccess;
  if (cudaError_t error = make_lists(gram, n, n, lists, stream)) return error;
  int blocks = 0;
  if (cudaError_t error =
          resident_blocks(krum_scores_kernel, kThreads, ceil_div(n, kWarps), &blocks))
    return error;
  krum_scores_kernel<<<blocks, kThreads, 0, stream>>>(lists, n, neighbours, scores);
  return cudaGetLastError();
}

cudaError_t krum_selection(const double* gram, int64_t n, int64_t num_byzantine, int64_t count,
                           int64_t* chosen, double* lists, double* scores, uint8_t* is_out,
                           cudaStream_t stream) {
  if (count == 0) return cudaSuccess;
  if (cudaError_t error = make_lists(gram, n, n, lists, stream)) return error;
  if (cudaError_t error = cudaMemsetAsync(is_out, 0, n, stream)) return error;
  int blocks = 0;
  if (cudaError_t error = resident_blocks(rescore_kernel, kThreads, n, &blocks)) return error;
  for (int64_t c = 0; c < count; ++c) {
    rescore_kernel<<<blocks, kThreads, 0, stream>>>(
        gram, n, lists, c == 0 ? nullptr : chosen + c - 1, n - c,
        cpu::krum_neighbours(n - c, num_byzantine), is_out, scores);
    if (cudaError_t error = cudaGetLastError()) return error;
    choose_kernel<<<1, kWarp, 0, stream>>>(scores, n, is_out, chosen + c);
    if (cudaError_t error = cudaGetLastError()) return error;
  }
  return cudaSuccess;
}

cudaError_t nearest_shares(const double* gram, int64_t size, int64_t n, const double* weights,
                           int64_t count, double* mixing, double* lists, cudaStream_t stream) {
  if (size == 0) return cudaSuccess;
  if (n > 0)
    if (cudaError_t error = make_lists(gram, size, n, lists, stream)) return error;
  int blocks = 0;
  if (cudaError_t error = resident_blocks(shares_kernel, kThreads, size, &blocks)) return error;
  shares_kernel<<<blocks, kThreads, 0, stream>>>(gram, size, n, weights, count, lists, mixing);
  return cudaGetLastError();
}

}  // namespace fastagg::cuda
