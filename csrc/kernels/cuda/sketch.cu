// SPDX-License-Identifier: Apache-2.0
#include "kernels.h"
#include "launch.cuh"
#include "sketch_layout.h"

namespace fastagg::cuda {
namespace {

constexpr int kTogether =
    kWarp / static_cast<int>(kUnitOutputs);  // blocks whose outputs a warp has

// The random numbers of the next kWarp blocks of columns from `first` on: lane i computes the
// rotation of block first + i, and one of the outputs of kTogether blocks, so that no number is
// computed twice by a warp. All threads of a warp must call the functions.
class Randoms {
 public:
  __device__ Randoms(uint64_t seed, int64_t k, int64_t unit)
      : seed_(seed), k_(k), unit_(unit), lane_(static_cast<int>(threadIdx.x) % kWarp) {}

  __device__ __forceinline__ void begin(int64_t first) {
    first_ = first;
    turns_ = static_cast<int>(rotation(seed_, static_cast<uint64_t>(first + lane_), k_));
  }
  __device__ __forceinline__ int turn(int i) const { return __shfl_sync(kAllLanes, turns_, i); }
  // Computes the words of blocks first + i, ..., first + i + kTogether - 1, for `word`.
  __device__ __forceinline__ void compute_words(int i) {
    constexpr int kOutputs = static_cast<int>(kUnitOutputs);
    const auto block = static_cast<uint64_t>(first_ + i + lane_ / kOutputs);
    const uint64_t output = 1 + unit_ * kUnitOutputs + lane_ % kOutputs;
    const uint64_t bits = split_mix(seed_, first_output(block, k_) + output);
    words_[0] = static_cast<uint32_t>(bits);
    words_[1] = static_cast<uint32_t>(bits >> 32);
  }
  // Word (thread % kUnitWords) of the n-th of them.
  __device__ __forceinline__ uint32_t word(int n) const {
    const int w = lane_ % static_cast<int>(kUnitWords);
    const int source = n * static_cast<int>(kUnitOutputs) + w / 2;
    const uint32_t even = __shfl_sync(kAllLanes, words_[0], source);
    const uint32_t odd = __shfl_sync(kAllLanes, words_[1], source);
    return w % 2 == 0 ? even : odd;
  }

 private:
  uint64_t seed_;
  int64_t k_, unit_;
  int lane_;
  int64_t first_ = 0;
  int turns_ = 0;
  uint32_t words_[2] = {};
};

// A task is a unit of buckets of one row and a part of its columns. Sums of the first part start
// from `out`.
//   sums      // [parts, S, k]
//   squares   // [parts, units, S]
template <class T>
__global__ void __launch_bounds__(kSketchThreads, 6)
    parts_kernel(const double* out, const T* const* rows, int64_t S, int64_t d, int64_t k,
                 uint64_t seed, int64_t begin, SketchParts parts, double* sums, double* squares) {
  __shared__ double of_warps[kSketchThreads / kWarp];
  const int thread = static_cast<int>(threadIdx.x), mask = static_cast<int>(k) - 1;
  const int64_t units = sketch_units(k), task = blockIdx.x;
  const int64_t unit = task % units, part = task / units % parts.count;
  const int64_t s = task / (units * parts.count);
  const T* const row = rows[s];
  double sum[kOwnBuckets] = {}, square = 0.0;
  if (part == 0)
#pragma unroll
    for (int j = 0; j < kOwnBuckets; ++j) {
      const int64_t q = bucket_of(unit, thread, j);
      if (q < k) sum[j] = out[s * k + q];
    }
  Randoms randoms(seed, k, unit);
  const int64_t end = parts.part_end(part);
  for (int64_t b = parts.part_begin(part); b < end; b += kTogether) {
    const int i = static_cast<int>(b - parts.part_begin(part)) % kWarp;
    if (i == 0) randoms.begin(b);
    randoms.compute_words(i);
    float x[kTogether][kOwnBuckets];
#pragma unroll
    for (int n = 0; n < kTogether; ++n) {
      const int turn = randoms.turn(i + n);
      const int64_t first = (b + n) * k - begin;  // its column in the row
      const bool whole = first >= 0 && first + k <= d;
#pragma unroll
      for (int j = 0; j < kOwnBuckets; ++j) {
        const auto q = static_cast<int>(bucket_of(unit, thread, j));
        const int64_t column = first + ((q - turn) & mask);
        const bool there = q <= mask && b + n < end && (whole || (column >= 0 && column < d));
        x[n][j] = there ? widened(row[column]) : 0.0f;
      }
    }
#pragma unroll
    for (int n = 0; n < kTogether; ++n) {
      const uint32_t word = randoms.word(n);
#pragma unroll
      for (int j = 0; j < kOwnBuckets; ++j) {
        const int place = (j * kSketchThreads + thread) / static_cast<int>(kUnitWords);
        const auto bits = static_cast<uint32_t>(__float_as_int(x[n][j]));
        const double number = float_of_bits(bits ^ ((word << place) & 0x80000000u));
        sum[j] = __dadd_rn(sum[j], number);
        square = fma(number, number, square);
      }
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
  if (thread > 0) return;
  double total = 0.0;
  for (double one : of_warps) total = __dadd_rn(total, one);
  squares[(part * units + unit) * S + s] = total;
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
    const auto blocks = static_cast<unsigned>(n * parts.count * units);
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
