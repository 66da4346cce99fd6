// SPDX-License-Identifier: Apache-2.0
// Iterations that move a linear combination z of rows, given their Gram matrix. A step is two
// launches: one for the products with all rows, which all thread blocks compute, and one thread
// block that computes the new factors from them.
#include "kernels.h"
#include "launch.cuh"
#include "warp_sum.cuh"

namespace fastagg::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;

// products[i] = <x_i, z>. A warp takes a row.
__global__ void __launch_bounds__(kThreads)
    products_kernel(const double* gram, int64_t n, const double* factors, double* products) {
  const int64_t warps = int64_t{gridDim.x} * kWarps;
  for (int64_t i = int64_t{blockIdx.x} * kWarps + threadIdx.x / kWarp; i < n; i += warps) {
    const double* row = gram + i * n;
    const double product = warp_sum(n, [&](int64_t j) { return row[j] * factors[j]; });
    if (lane_of_warp() == 0) products[i] = product;
  }
}

// |z|^2, in all threads.
__device__ __forceinline__ double square_of(int64_t n, const double* factors,
                                            const double* products) {
  return warp_sum(n, [&](int64_t i) { return factors[i] * products[i]; });
}

// |x_i - z|. A NaN stays NaN.
__device__ __forceinline__ double distance_of(double row_square, double product, double square) {
  const double distance2 = row_square - 2.0 * product + square;
  return sqrt(distance2 < 0.0 ? 0.0 : distance2);
}

// factors[i] = weights[i] / max(nu, |x_i - z|), divided by their sum.
__global__ void __launch_bounds__(kThreads)
    weiszfeld_kernel(const double* gram, int64_t n, const double* weights, double nu,
                     const double* products, double* factors) {
  const double square = square_of(n, factors, products);
  __syncthreads();  // every warp has read the old factors
  for (int64_t i = threadIdx.x; i < n; i += kThreads) {
    const double distance = distance_of(gram[i * (n + 1)], products[i], square);
    factors[i] = weights[i] / (distance < nu ? nu : distance);
  }
  __syncthreads();
  const double sum = warp_sum(n, [&](int64_t i) { return factors[i]; });
  __syncthreads();
  for (int64_t i = threadIdx.x; i < n; i += kThreads) factors[i] /= sum;
}

// factors = 0, ..., 0, 1: z is the last row.
__global__ void __launch_bounds__(kThreads) last_row_kernel(int64_t rows, double* factors) {
  for (int64_t i = threadIdx.x; i < rows; i += kThreads) factors[i] = i == rows - 1 ? 1.0 : 0.0;
}

// z += sum_i weights[i] (x_i - z) min(1, tau / |x_i - z|), over the first n of n + 1 rows. Changes
// `products`, too.
__global__ void __launch_bounds__(kThreads)
    clip_kernel(const double* gram, int64_t n, const double* weights, double tau, double* products,
                double* factors) {
  const double square = square_of(n + 1, factors, products);
  __syncthreads();  // every warp has read the old factors and products
  for (int64_t i = threadIdx.x; i < n; i += kThreads) {
    const double ratio = tau / distance_of(gram[i * (n + 2)], products[i], square);
    products[i] = ratio > 1.0 ? 1.0 : ratio;
  }
  __syncthreads();
  // The factor of the last row is computed in a form that is exactly 0 if all ratios are 1.
  const double rest = warp_sum(n, [&](int64_t i) { return weights[i] * (1.0 - products[i]); });
  for (int64_t i = threadIdx.x; i <= n; i += kThreads)
    factors[i] = factors[i] * rest + (i < n ? weights[i] * products[i] : 0.0);
}

// Runs `iterations` steps for `rows` rows; step() launches the second half of one.
template <class Step>
cudaError_t iterate(const double* gram, int64_t rows, int64_t iterations, const double* factors,
                    double* products, cudaStream_t stream, const Step& step) {
  int blocks = 0;
  if (cudaError_t error =
          resident_blocks(products_kernel, kThreads, ceil_div(rows, kWarps), &blocks))
    return error;
  for (int64_t iteration = 0; rows > 0 && iteration < iterations; ++iteration) {
    products_kernel<<<blocks, kThreads, 0, stream>>>(gram, rows, factors, products);
    if (cudaError_t error = cudaGetLastError()) return error;
    step();
    if (cudaError_t error = cudaGetLastError()) return error;
  }
  return cudaSuccess;
}

}  // namespace

cudaError_t weiszfeld(const double* gram, int64_t n, const double* weights, double nu,
                      int64_t iterations, double* factors, double* products, cudaStream_t stream) {
  return iterate(gram, n, iterations, factors, products, stream, [&] {
    weiszfeld_kernel<<<1, kThreads, 0, stream>>>(gram, n, weights, nu, products, factors);
  });
}

cudaError_t clip_towards(const double* gram, int64_t n, const double* weights, double tau,
                         int64_t iterations, double* factors, double* products,
                         cudaStream_t stream) {
  last_row_kernel<<<1, kThreads, 0, stream>>>(n + 1, factors);
  if (cudaError_t error = cudaGetLastError()) return error;
  return iterate(gram, n + 1, iterations, factors, products, stream, [&] {
    clip_kernel<<<1, kThreads, 0, stream>>>(gram, n, weights, tau, products, factors);
  });
}

}  // namespace fastagg::cuda
