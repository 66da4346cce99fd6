// SPDX-License-Identifier: Apache-2.0
#include "kernels.h"
#include "launch.cuh"
#include "sketch_layout.h"

namespace fastagg::cuda {
namespace {

// A task is a unit of buckets of one row and a part of its columns. Sums of the first part start
// from `out`.
//   sums      // [parts, S, k]
//   squares   // [parts, units, S]
template <class T>
__global__ void __launch_bounds__(kSketchThreads)
    parts_kernel(const double* out, const T* const* rows, int64_t S, int64_t d, int64_t k,
                 uint64_t seed, int64_t begin, SketchParts parts, double* sums, double* squares) {
  __shared__ double of_warps[kSketchThreads / kWarp];
  const int thread = static_cast<int>(threadIdx.x);
  const int64_t units = sketch_units(k), tasks = S * parts.count * units;
  for (int64_t task = blockIdx.x; task < tasks; task += gridDim.x) {
    const int64_t unit = task % units, part = task / units % parts.count;
    const int64_t s = task / (units * parts.count);
    const T* row = rows[s];
    double sum[kOwnBuckets] = {}, square = 0.0;
    if (part == 0)
#pragma unroll
      for (int j = 0; j < kOwnBuckets; ++j) {
        const int64_t q = bucket_of(unit, thread, j);
        if (q < k) sum[j] = out[s * k + q];
      }
    const int64_t end = parts.part_end(part);
#pragma unroll 2
    for (int64_t b = parts.part_begin(part); b < end; ++b) {
      const int64_t turn = rotation(seed, static_cast<uint64_t>(b), k);
      const uint32_t word = sign_word(seed, static_cast<uint64_t>(b), k, unit, thread % kUnitWords);
#pragma unroll
      for (int j = 0; j < kOwnBuckets; ++j) {
        const int64_t q = bucket_of(unit, thread, j);
        const int64_t column = b * k + ((q - turn) & (k - 1)) - begin;
        if (q >= k || column < 0 || column >= d) continue;
        const int place = (j * kSketchThreads + thread) / static_cast<int>(kUnitWords);
        const auto bits = static_cast<uint32_t>(__float_as_int(widened(row[column])));
        const double number = float_of_bits(bits ^ ((word << place) & 0x80000000u));
        sum[j] = __dadd_rn(sum[j], number);
        square = fma(number, number, square);
      }
    }
#pragma unroll
    for (int j = 0; j < kOwnBuckets; ++j) {
      const int64_t q = bucket_of(unit, thread, j);
      if (q < k) sums[(part * S + s) * k + q] = sum[j];
    }
    for (int offset = kWarp / 2; offset > 0; offset /= 2)
      square = __dadd_rn(square, __shfl_xor_sync(kAllLanes, square, offset));
    if (thread % kWarp == 0) of_warps[thread / kWarp] = square;
    __syncthreads();
    if (thread == 0) {
      double total = 0.0;
      for (double one : of_warps) total = __dadd_rn(total, one);
      squares[(part * units + unit) * S + s] = total;
    }
    __syncthreads();
  }
}

// out = the sum of n numbers of all parts, in order.
__global__ void __launch_bounds__(kSketchThreads)
    add_parts_kernel(double* out, const double* sums, int64_t n, int64_t parts) {
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < n;
       i += int64_t{gridDim.x} * blockDim.x) {
    double sum = sums[i];
    for (int64_t part = 1; part < parts; ++part) sum = __dadd_rn(sum, sums[part * n + i]);
    out[i] = sum;
  }
}

// squares[s] += the sum of the squares of all parts and units, in order.
__global__ void __launch_bounds__(kSketchThreads)
    add_squares_kernel(double* squares, const double* parts, int64_t S, int64_t count) {
  for (int64_t s = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; s < S;
       s += int64_t{gridDim.x} * blockDim.x) {
    double sum = 0.0;
    for (int64_t part = 0; part < count; ++part) sum = __dadd_rn(sum, parts[part * S + s]);
    squares[s] = __dadd_rn(squares[s], sum);
  }
}

template <class Kernel, class... Args>
cudaError_t launch_over(Kernel kernel, int64_t numbers, cudaStream_t stream, Args... args) {
  int blocks = 0;
  const int64_t tasks = ceil_div(numbers, kSketchThreads);
  if (cudaError_t error = resident_blocks(kernel, kSketchThreads, tasks, &blocks)) return error;
  kernel<<<blocks, kSketchThreads, 0, stream>>>(args...);
  return cudaGetLastError();
}

}  // namespace

int64_t sketch_workspace(int64_t S, int64_t d, int64_t k, int64_t begin) {
  if (S == 0 || d == 0) return 0;
  const SketchParts parts = sketch_parts(begin, d, k);
  return sketch_rows(parts, k, S) * sketch_numbers(parts, k) * int64_t{sizeof(double)};
}

template <class T>
cudaError_t sketch(double* out, double* squares, const T* const* rows, int64_t S, int64_t d,
                   int64_t k, uint64_t seed, int64_t begin, void* workspace, cudaStream_t stream) {
  if (S == 0 || d == 0) return cudaSuccess;
  const SketchParts parts = sketch_parts(begin, d, k);
  const int64_t together = sketch_rows(parts, k, S), units = sketch_units(k);
  auto* sums = static_cast<double*>(workspace);
  for (int64_t s = 0; s < S; s += together) {
    const int64_t n = at_most(S - s, together);
    double* const part_squares = sums + parts.count * n * k;
    int blocks = 0;
    if (cudaError_t error =
            resident_blocks(parts_kernel<T>, kSketchThreads, n * parts.count * units, &blocks))
      return error;
    parts_kernel<T><<<blocks, kSketchThreads, 0, stream>>>(out + s * k, rows + s, n, d, k, seed,
                                                           begin, parts, sums, part_squares);
    if (cudaError_t error = cudaGetLastError()) return error;
    if (cudaError_t error = launch_over(add_parts_kernel, n * k, stream, out + s * k,
                                        static_cast<const double*>(sums), n * k, parts.count))
      return error;
    if (cudaError_t error =
            launch_over(add_squares_kernel, n, stream, squares + s,
                        static_cast<const double*>(part_squares), n, parts.count * units))
      return error;
  }
  return cudaSuccess;
}

template cudaError_t sketch(double*, double*, const float* const*, int64_t, int64_t, int64_t,
                            uint64_t, int64_t, void*, cudaStream_t);
template cudaError_t sketch(double*, double*, const Bfloat16* const*, int64_t, int64_t, int64_t,
                            uint64_t, int64_t, void*, cudaStream_t);
template cudaError_t sketch(double*, double*, const Half* const*, int64_t, int64_t, int64_t,
                            uint64_t, int64_t, void*, cudaStream_t);

}  // namespace fastagg::cuda
