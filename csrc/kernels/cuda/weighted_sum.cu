// SPDX-License-Identifier: Apache-2.0
#include <cmath>

#include "kernels.h"
#include "rows.cuh"

namespace fastagg::cuda {
namespace {

//   kMinus   // rows minus `base`, rounded to float32, instead of rows
template <bool kMinus, class T, int V>
__global__ void __launch_bounds__(kSumThreads, 2)
    weighted_sum_kernel(int64_t tasks, float* out, const T* const* rows, int S, int64_t d,
                        const double* weights, double beta, const uint8_t* when,
                        const float* base) {
  if (called_off(when)) return;
  extern __shared__ float4 shared[];
  const int batches = row_batches(S, blockDim.y);
  const double factor = factor_of(weights, S), inverse = 1.0 / factor;
  TablePlaces places(shared, V, S);
  const Staged from(places, [&](int s) { return rows[s]; });
  const Staged quotients(places,
                         [&](int s) { return static_cast<float>(__dmul_rn(weights[s], inverse)); });
  __syncthreads();
  SplitSums<V> splits(shared, S);
  // The next rows are loaded before these are added, so that loads are always in flight.
  constexpr bool kAhead = V < 8;  // as registers allow
  Batch<T, V> next;
  Floats<V> next_result{};
  const auto load_task = [&](int64_t task) {
    if (task >= tasks) return;
    next.load_rows(from, S, 0, Columns<V>::of(task, d));
    if (beta != 0.0) next_result = load_share<V>(out, share_of_thread<V>(task, d));
  };
  if (kAhead) load_task(blockIdx.x);
  for (int64_t task = blockIdx.x; task < tasks; task += gridDim.x) {
    const auto columns = Columns<V>::of(task, d);
    Floats<V> result = next_result;
    if (kAhead && batches == 0) load_task(task + gridDim.x);  // there are no rows
    Floats<V> minus{};
    if (kMinus) minus = load<V>(base + columns.begin, columns.count);
    double sums[V] = {};
    for (int b = 0; b < batches; ++b) {
      if (!kAhead) next.load_rows(from, S, b, columns);
      const Batch<T, V> batch = next;
      if (kAhead && b + 1 < batches)
        next.load_rows(from, S, b + 1, columns);
      else if (kAhead)
        load_task(task + gridDim.x);
      const auto factor = [&](int s) { return quotients[s]; };
      if constexpr (kMinus)
        batch.minus(minus).add_to(sums, S, b, factor);
      else
        batch.add_to(sums, S, b, factor);
    }
    const Share share = share_of_thread<V>(task, d);
    if (!kAhead && beta != 0.0) result = load_share<V>(out, share);
    splits.add_up(sums);
#pragma unroll
    for (int n = 0; n < V; ++n) {
      const double old = beta == 0.0 ? 0.0 : __dmul_rn(beta, result.at[n]);
      result.at[n] = static_cast<float>(__dadd_rn(old, __dmul_rn(factor, sums[n])));
    }
    store_share<V>(out, result, share);
  }
}

template <bool kMinus, class T>
cudaError_t launch_sum(float* out, const T* const* rows, int64_t S, int64_t d,
                       const double* weights, double beta, const uint8_t* when, const float* base,
                       int width, cudaStream_t stream) {
  return with_width<16 / sizeof(T)>(width, [&](auto w) {
    constexpr int V = decltype(w)::value;
    return launch_rows<V>(sum_block(S), weighted_sum_kernel<kMinus, T, V>, 2, S, d, stream, out,
                          rows, S, d, weights, beta, when, base);
  });
}

constexpr int kApplyThreads = 256;

// Every thread decides from the peaks, so nobody has to wait for a decision.
//   peaks   // [2], of params and sum
__global__ void __launch_bounds__(kApplyThreads)
    apply_kernel(float* params, float* before, bool* applied, const float* sum, const float* peaks,
                 int64_t d, double lr, double factor, float quotient, double largest,
                 double limit) {
  const double known = peaks[0], added = peaks[1];
  const bool fits = known < INFINITY && added < INFINITY && added <= largest &&  // not with a NaN
                    known + lr * added <= limit;
  if (blockIdx.x == 0 && threadIdx.x == 0) *applied = fits;
  const int64_t stride = int64_t{gridDim.x} * kApplyThreads;
  for (int64_t k = int64_t{blockIdx.x} * kApplyThreads + threadIdx.x; k < d; k += stride) {
    const float p = params[k];
    if (before) before[k] = p;
    const double step = __dmul_rn(factor, static_cast<double>(quotient * sum[k]));
    if (fits) params[k] = static_cast<float>(__dadd_rn(p, step));
  }
}

}  // namespace

template <class T>
cudaError_t weighted_sum(float* out, const T* const* rows, int64_t S, int64_t d,
                         const double* weights, double beta, const uint8_t* when, int width,
                         cudaStream_t stream) {
  return launch_sum<false>(out, rows, S, d, weights, beta, when, nullptr, width, stream);
}

template <class T>
cudaError_t weighted_difference(float* out, const T* const* rows, const float* base, int64_t S,
                                int64_t d, const double* weights, int width, cudaStream_t stream) {
  return launch_sum<true>(out, rows, S, d, weights, 0.0, nullptr, base, width, stream);
}

cudaError_t apply_sum(float* params, float* before, bool* applied, const float* sum,
                      const float* peaks, int64_t d, double lr, double largest, double limit,
                      cudaStream_t stream) {
  const double magnitude = std::abs(lr);
  const double factor = common_factor(magnitude > 0.0 ? magnitude : INFINITY, magnitude, magnitude);
  const auto quotient = static_cast<float>(lr * (1.0 / factor));
  int blocks = 0;
  if (cudaError_t error = resident_blocks(apply_kernel, kApplyThreads,
                                          at_least(ceil_div(d, kApplyThreads), 1), &blocks))
    return error;
  apply_kernel<<<blocks, kApplyThreads, 0, stream>>>(params, before, applied, sum, peaks, d, lr,
                                                     factor, quotient, largest, limit);
  return cudaGetLastError();
}

template cudaError_t weighted_sum(float*, const float* const*, int64_t, int64_t, const double*,
                                  double, const uint8_t*, int, cudaStream_t);
template cudaError_t weighted_sum(float*, const Bfloat16* const*, int64_t, int64_t, const double*,
                                  double, const uint8_t*, int, cudaStream_t);
template cudaError_t weighted_sum(float*, const Half* const*, int64_t, int64_t, const double*,
                                  double, const uint8_t*, int, cudaStream_t);

template cudaError_t weighted_difference(float*, const float* const*, const float*, int64_t,
                                         int64_t, const double*, int, cudaStream_t);
template cudaError_t weighted_difference(float*, const Bfloat16* const*, const float*, int64_t,
                                         int64_t, const double*, int, cudaStream_t);
template cudaError_t weighted_difference(float*, const Half* const*, const float*, int64_t, int64_t,
                                         const double*, int, cudaStream_t);

}  // namespace fastagg::cuda
