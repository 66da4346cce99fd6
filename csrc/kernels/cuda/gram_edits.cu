// SPDX-License-Identifier: Apache-2.0
// Gram matrices from others: with some rows replaced, of means of rows, and parts of them. A thread
// block takes a row of the result, threads take its columns.
#include "kernels.h"
#include "launch.cuh"

namespace fastagg::cuda {
namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads)
    replace_rows_kernel(const double* before, int64_t m, const double* rows, const int64_t* fresh,
                        int64_t n, double* out) {
  for (int64_t i = blockIdx.x; i < n; i += gridDim.x) {
    const int64_t own = fresh[i];
    for (int64_t j = threadIdx.x; j < n; j += kThreads) {
      const int64_t other = fresh[j];
      out[i * n + j] = own >= 0     ? rows[own * n + j]
                       : other >= 0 ? rows[other * n + i]
                                    : before[i * m + j];
    }
  }
}

// The rows of bucket b are members[begins[b]] to members[begins[b + 1] - 1], ascending.
struct Buckets {
  const int64_t* begins;   // [m + 1]
  const int64_t* members;  // [n]
};

// sums[b] = the weights of the rows of bucket b, and shares[i] = the part of row i in it. The
// buckets from `count` on have one row each, with a share of 1.
__global__ void __launch_bounds__(kThreads)
    bucket_shares_kernel(Buckets buckets, int64_t count, int64_t m, const double* weights,
                         double* shares, double* sums) {
  for (int64_t b = int64_t{blockIdx.x} * kThreads + threadIdx.x; b < m;
       b += int64_t{gridDim.x} * kThreads) {
    const int64_t begin = buckets.begins[b], end = buckets.begins[b + 1];
    double sum = 0.0;
    if (b < count) {
      for (int64_t t = begin; t < end; ++t) sum += weights[buckets.members[t]];
      sums[b] = sum;
    }
    for (int64_t t = begin; t < end; ++t) {
      const int64_t i = buckets.members[t];
      shares[i] = b < count ? weights[i] / sum : 1.0;
    }
  }
}

// The weighted mean of value(i) over the rows i of a bucket, in ascending order.
template <class Value>
__device__ __forceinline__ double mean_of(const Buckets& buckets, int64_t bucket,
                                          const double* shares, const Value& value) {
  double mean = 0.0;
  for (int64_t t = buckets.begins[bucket]; t < buckets.begins[bucket + 1]; ++t) {
    const int64_t i = buckets.members[t];
    mean += shares[i] * value(i);
  }
  return mean;
}

// half [m, n]: the means of rows of a Gram matrix [n, n].
__global__ void __launch_bounds__(kThreads)
    mean_rows_kernel(const double* gram, int64_t n, Buckets buckets, int64_t m,
                     const double* shares, double* half) {
  for (int64_t b = blockIdx.x; b < m; b += gridDim.x)
    for (int64_t j = threadIdx.x; j < n; j += kThreads)
      half[b * n + j] = mean_of(buckets, b, shares, [&](int64_t i) { return gram[i * n + j]; });
}

// out [m, m]: the means of columns of `half`.
__global__ void __launch_bounds__(kThreads)
    mean_columns_kernel(const double* half, int64_t n, Buckets buckets, int64_t m,
                        const double* shares, double* out) {
  for (int64_t a = blockIdx.x; a < m; a += gridDim.x)
    for (int64_t b = threadIdx.x; b < m; b += kThreads)
      out[a * m + b] = mean_of(buckets, b, shares, [&](int64_t j) { return half[a * n + j]; });
}

// gram = (gram + its transpose) / 2.
__global__ void __launch_bounds__(kThreads) symmetric_kernel(double* gram, int64_t n) {
  for (int64_t i = blockIdx.x; i < n; i += gridDim.x)
    for (int64_t j = threadIdx.x; j < i; j += kThreads)
      gram[i * n + j] = gram[j * n + i] = (gram[i * n + j] + gram[j * n + i]) / 2.0;
}

// The pairs that have one of the first `count` of S rows.
__global__ void __launch_bounds__(kThreads)
    first_pairs_kernel(int64_t S, int64_t count, uint8_t* pairs) {
  for (int64_t i = blockIdx.x; i < S; i += gridDim.x)
    for (int64_t j = threadIdx.x; j < S; j += kThreads) pairs[i * S + j] = i < count || j < count;
}

// out[i][j] = gram[i][places[j]], for the first `count` rows of a matrix [S, S].
__global__ void __launch_bounds__(kThreads)
    take_columns_kernel(const double* gram, int64_t S, int64_t count, const int64_t* places,
                        double* out) {
  for (int64_t i = blockIdx.x; i < count; i += gridDim.x)
    for (int64_t j = threadIdx.x; j < S; j += kThreads) out[i * S + j] = gram[i * S + places[j]];
}

// Launches kernel(args...) with a thread block for each row, or as many as run at the same time.
template <class... Parameters, class... Args>
cudaError_t launch_by_row(void (*kernel)(Parameters...), int64_t rows, cudaStream_t stream,
                          Args... args) {
  if (rows == 0) return cudaSuccess;
  int blocks = 0;
  if (cudaError_t error = resident_blocks(kernel, kThreads, rows, &blocks)) return error;
  kernel<<<blocks, kThreads, 0, stream>>>(args...);
  return cudaGetLastError();
}

}  // namespace

cudaError_t replace_rows(const double* before, int64_t m, const double* rows, const int64_t* fresh,
                         int64_t n, double* out, cudaStream_t stream) {
  return launch_by_row(replace_rows_kernel, n, stream, before, m, rows, fresh, n, out);
}

cudaError_t bucketed_gram(const double* gram, int64_t n, const int64_t* begins,
                          const int64_t* members, int64_t count, int64_t m, const double* weights,
                          double* out, double* shares, double* sums, double* half,
                          cudaStream_t stream) {
  const Buckets buckets{begins, members};
  if (cudaError_t error = launch_by_row(bucket_shares_kernel, ceil_div(m, kThreads), stream,
                                        buckets, count, m, weights, shares, sums))
    return error;
  if (cudaError_t error =
          launch_by_row(mean_rows_kernel, m, stream, gram, n, buckets, m, shares, half))
    return error;
  if (cudaError_t error =
          launch_by_row(mean_columns_kernel, m, stream, half, n, buckets, m, shares, out))
    return error;
  return make_symmetric(out, m, stream);
}

cudaError_t make_symmetric(double* gram, int64_t n, cudaStream_t stream) {
  return launch_by_row(symmetric_kernel, n, stream, gram, n);
}

cudaError_t first_pairs(int64_t S, int64_t count, uint8_t* pairs, cudaStream_t stream) {
  return launch_by_row(first_pairs_kernel, S, stream, S, count, pairs);
}

cudaError_t take_columns(const double* gram, int64_t S, int64_t count, const int64_t* places,
                         double* out, cudaStream_t stream) {
  return launch_by_row(take_columns_kernel, count, stream, gram, S, count, places, out);
}

}  // namespace fastagg::cuda
