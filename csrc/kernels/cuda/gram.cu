// SPDX-License-Identifier: Apache-2.0
// A Gram matrix takes these kernels: needed_kernel finds the tiles that are needed (with pairs);
// gram_few or gram_many computes partial sums; reduce_kernel adds them in a fixed order; and for
// rows whose squares leave the range of float32, rescue_kernel computes their entries again, in
// float64. It returns immediately if there is no such row, so the host does not have to wait for
// that information. With several segments, sum_kernel adds their Gram matrices; all that fit into
// the workspace share the launches of gram_few, rescue_kernel and sum_kernel.
#include "gram_parts.h"
#include "kernels.h"
#include "launch.cuh"

namespace fastagg::cuda {
namespace {

constexpr int kThreads = 256;

struct Matrix {
  double* out;  // [S, S]
  Wanted wants;
  int64_t S;

  // That of the n-th segment from this one on.
  __host__ __device__ Matrix of(int64_t n) const { return {out + n * S * S, wants, S}; }
  __device__ void set(int64_t i, int64_t j, double value) const {
    out[i * S + j] = value;
    out[j * S + i] = value;
  }
};

// Suspects: rows whose squares may have left the range of float32, or with a NaN, or zeros only.
struct Suspects {
  int64_t S;
  int32_t* suspect;  // [S]
  int32_t* peaks;    // [S] magnitude bits
  int32_t* found;    // whether there is a suspect; then two counters:

  __device__ int32_t* taken() const { return found + 1; }  // tasks that thread blocks have begun
  __device__ int32_t* ended() const { return found + 2; }  // and ended

  __host__ __device__ Suspects of(int64_t n) const {
    return {S, suspect + n * S, peaks + n * S, found + n * kFound};
  }

  // `peaks` is read from the L2 cache, where other thread blocks have written it.
  __device__ bool rescuable(int64_t i) const {
    if (!suspect[i]) return false;
    const int32_t peak = __ldcg(peaks + i);
    return peak > 0 && peak < 0x7f800000;
  }
};

__global__ void __launch_bounds__(kThreads)
    needed_kernel(const uint8_t* pairs, int64_t S, uint8_t* needed) {
  const int64_t I = triangle_row(blockIdx.x), J = blockIdx.x - triangle_index(I, 0);
  bool any = I == J;
  for (int n = threadIdx.x; n < kTileRows * kTileRows; n += blockDim.x) {
    const int64_t i = I * kTileRows + n / kTileRows, j = J * kTileRows + n % kTileRows;
    any = any || (i < S && j < S && pairs[i * S + j]);
  }
  any = __syncthreads_or(any);
  if (threadIdx.x == 0) needed[blockIdx.x] = any;
}

// Adds up the partial sums of each slot, of segments from `first` on and chunks from `begin` on: in
// ascending order inside each group of chunks, then the sums of the groups in ascending order,
// after those of earlier waves. A thread block takes 32 slots of a segment, and its threads share
// the groups, for which it has shared memory.
//   partials   // with kFew [segments, plan.chunks(), slots], else [plan.kept(), slots]
//   totals     // [slots], read unless this is the first wave, written unless it is the last
template <bool kFew>
__global__ void __launch_bounds__(512)
    reduce_kernel(const double* partials, GramPlan plan, int64_t first, int64_t begin,
                  double* totals, const uint8_t* needed, Matrix matrices, Suspects suspects) {
  extern __shared__ float4 shared[];
  auto* sums = reinterpret_cast<double (*)[kWarp]>(shared);  // [groups of chunks][kWarp]
  const int64_t segment = first + blockIdx.y, chunks = plan.part_of(segment).chunks;
  const int64_t end = at_most(begin + plan.wave, chunks), slots = plan.slots;
  const int64_t count = ceil_div(end - begin, plan.together);
  const int each = kChunkGroup / plan.together;
  partials += blockIdx.y * plan.chunks() * slots;
  const int64_t slot = int64_t{blockIdx.x} * kWarp + threadIdx.x;
  const Entry e = kFew ? few_entry(plan.groups, slot) : many_entry(slot);
  const Matrix matrix = matrices.of(blockIdx.y);
  const bool there = e.i < matrix.S && e.j <= e.i;
  const bool computed = matrix.wants(e.i, e.j) && (!needed || needed[slot / kTileSlots]);
  const int groups = static_cast<int>(ceil_div(count, each));
  for (int group = threadIdx.y; group < groups; group += blockDim.y) {
    double values[kChunkGroup];
#pragma unroll
    for (int c = 0; c < kChunkGroup; ++c) {
      const int64_t n = int64_t{group} * each + c;
      values[c] = computed && c < each && n < count ? partials[n * slots + slot] : 0.0;
    }
    double sum = values[0];
#pragma unroll
    for (int c = 1; c < kChunkGroup; ++c) sum = __dadd_rn(sum, values[c]);
    sums[group][threadIdx.x] = sum;
  }
  __syncthreads();
  if (threadIdx.y > 0 || !there) return;
  double total = begin == 0 ? 0.0 : totals[slot];
  for (int group = 0; group < groups; ++group) total = __dadd_rn(total, sums[group][threadIdx.x]);
  if (end < chunks) {
    totals[slot] = total;
    return;
  }
  matrix.set(e.i, e.j, total);
  if (e.i != e.j) return;
  const double tiny = 1e-34 * static_cast<double>(plan.columns_of(segment));
  const bool suspect = !(total >= tiny && total <= 1.7976931348623157e308);
  const Suspects rows = suspects.of(blockIdx.y);
  rows.suspect[e.i] = suspect;
  rows.peaks[e.i] = 0;
  if (suspect) atomicMax(rows.found, 1);
}

// peaks[s] = the largest magnitude of each suspect s, when all thread blocks have ended their
// tasks, for which this one waits. A task is one chunk of a row. Thread blocks take tasks in turn;
// one that waits has found no task left, so all of them are with thread blocks that run and do not
// wait.
//   from   // the first of d columns of the rows
__device__ void find_peaks(const float* const* rows, int64_t from, int64_t d, Suspects suspects) {
  constexpr int64_t kChunk = 1 << 16;
  __shared__ int32_t turn[1];
  const int64_t chunks = ceil_div(d, kChunk), tasks = suspects.S * chunks;
  for (;;) {
    if (threadIdx.x == 0) turn[0] = atomicAdd(suspects.taken(), 1);
    __syncthreads();
    const int64_t task = turn[0];
    __syncthreads();  // before the next is written
    if (task >= tasks) break;
    const int64_t s = task / chunks, begin = task % chunks * kChunk;
    if (suspects.suspect[s]) {
      int32_t bits = 0;
      for (int64_t k = begin + threadIdx.x; k < at_most(begin + kChunk, d); k += kThreads)
        bits = max(bits, magnitude_bits(rows[s][from + k]));
      for (int offset = kWarp / 2; offset > 0; offset /= 2)
        bits = max(bits, __shfl_xor_sync(kAllLanes, bits, offset));
      if (threadIdx.x % kWarp == 0 && bits > 0) atomicMax(suspects.peaks + s, bits);
      __threadfence();
      __syncthreads();
    }
    if (threadIdx.x == 0) atomicAdd(suspects.ended(), 1);
  }
  if (threadIdx.x == 0)
    while (atomicAdd(suspects.ended(), 0) < tasks) {
    }
  __syncthreads();
  __threadfence();
}

// Computes the entries of finite, non-zero suspects again, with products and sums in float64, whose
// range suffices, over d columns from `from` on. A thread block takes one pair at a time. This is
// slow, but such rows are rare: their elements are below 1e-17 or above 1e19, which no working
// training produces.
__device__ void rescue(const float* const* rows, int64_t from, int64_t d, Matrix matrix,
                       Suspects suspects) {
  find_peaks(rows, from, d, suspects);
  bool any = false;
  for (int64_t s = threadIdx.x; s < matrix.S; s += blockDim.x) any = any || suspects.rescuable(s);
  if (!__syncthreads_or(any)) return;
  __shared__ double scratch[kThreads];
  for (int64_t pair = blockIdx.x; pair < triangle_index(matrix.S, 0); pair += gridDim.x) {
    const int64_t i = triangle_row(pair), j = pair - triangle_index(i, 0);
    if (!matrix.wants(i, j) || !(suspects.rescuable(i) || suspects.rescuable(j))) continue;
    double sum = 0.0;
    for (int64_t k = from + threadIdx.x; k < from + d; k += kThreads)
      sum = fma(static_cast<double>(rows[i][k]), static_cast<double>(rows[j][k]), sum);
    scratch[threadIdx.x] = sum;
    for (int half = kThreads / 2; half > 0; half /= 2) {
      __syncthreads();
      if (threadIdx.x < half)
        scratch[threadIdx.x] = __dadd_rn(scratch[threadIdx.x], scratch[threadIdx.x + half]);
    }
    if (threadIdx.x == 0) matrix.set(i, j, scratch[0]);
    __syncthreads();
  }
}

// Segments [first, first + count), one after the other.
__global__ void __launch_bounds__(kThreads)
    rescue_kernel(const float* const* rows, GramPlan plan, int64_t first, int64_t count,
                  Matrix matrices, Suspects suspects) {
  for (int64_t n = 0; n < count; ++n) {
    const Suspects own = suspects.of(n);
    if (*own.found != 0)
      rescue(rows, (first + n) * plan.segment, plan.columns_of(first + n), matrices.of(n), own);
  }
}

// out = the sum of `count` matrices in order, after what is there if this is not the first window.
//   matrices   // [count, numbers]
__global__ void __launch_bounds__(kThreads)
    sum_kernel(const double* matrices, int64_t count, int64_t numbers, double* out, bool first) {
  const int64_t k = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (k >= numbers) return;
  double sum = first ? matrices[k] : __dadd_rn(out[k], matrices[k]);
  for (int64_t n = 1; n < count; ++n) sum = __dadd_rn(sum, matrices[n * numbers + k]);
  out[k] = sum;
}

// *small = whether a thread block of the current GPU has less than kLargeShared bytes.
cudaError_t shared_is_small(bool* small) {
  int device = 0, bytes = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess)
    error = cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  *small = bytes < kLargeShared;
  return error;
}

// The groups of chunks of a launch of reduce_kernel: its threads, and its shared memory.
struct ReduceShape {
  dim3 threads;
  int64_t shared;

  explicit ReduceShape(int64_t chunks) {
    const int64_t groups = ceil_div(chunks, kChunkGroup);
    threads = dim3(kWarp, static_cast<unsigned>(at_most(groups, 16)));
    shared = groups * kWarp * int64_t{sizeof(double)};
  }
};

template <class T>
T* at(void* workspace, int64_t offset) {
  return reinterpret_cast<T*>(static_cast<char*>(workspace) + offset);
}

}  // namespace

cudaError_t gram_workspace(int64_t S, int64_t d, int64_t segment, int64_t* bytes) {
  bool small = false;
  const cudaError_t error = shared_is_small(&small);
  *bytes = gram_workspace_of(plan_gram(S, d, segment, small), S).bytes;
  return error;
}

cudaError_t gram(const float* const* rows, int64_t S, int64_t d, int64_t segment,
                 const uint8_t* pairs, double* out, Precision precision, void* workspace, int width,
                 cudaStream_t stream) {
  if (S == 0) return cudaSuccess;
  if (d == 0) return cudaMemsetAsync(out, 0, S * S * sizeof(double), stream);
  bool small = false;
  if (cudaError_t error = shared_is_small(&small)) return error;
  const GramPlan plan = plan_gram(S, d, segment, small);
  const GramWorkspace offsets = gram_workspace_of(plan, S);
  auto* partials = at<double>(workspace, offsets.partials);
  auto* totals = at<double>(workspace, offsets.totals);
  const Suspects suspects{S, at<int32_t>(workspace, offsets.suspects),
                          at<int32_t>(workspace, offsets.peaks),
                          at<int32_t>(workspace, offsets.found)};
  const Wanted wanted{pairs, S};
  const bool whole = plan.segments == 1;
  const Matrix matrices{whole ? out : at<double>(workspace, offsets.matrices), wanted, S};
  if (!whole) width = static_cast<int>(at_most(width, segment_width(plan.segment)));
  uint8_t* needed = nullptr;
  if (pairs && !plan.few) {
    needed = at<uint8_t>(workspace, offsets.needed);
    needed_kernel<<<static_cast<unsigned>(plan.tiles), kThreads, 0, stream>>>(pairs, S, needed);
  }
  int blocks = 0;
  if (cudaError_t error = resident_blocks(rescue_kernel, kThreads, S * (S + 1) / 2, &blocks))
    return error;
  const auto slot_blocks = static_cast<unsigned>(plan.slots / kWarp);
  for (int64_t first = 0; first < plan.segments; first += plan.window) {
    const int64_t count = at_most(plan.window, plan.segments - first);
    if (plan.few) {
      if (cudaError_t error = gram_few(rows, S, plan, first, count, partials, suspects.found,
                                       precision, width, stream))
        return error;
      const ReduceShape shape(plan.chunks());
      reduce_kernel<true>
          <<<dim3(slot_blocks, static_cast<unsigned>(count)), shape.threads, shape.shared,
             stream>>>(partials, plan, first, 0, totals, nullptr, matrices, suspects);
    }
    for (int64_t n = 0; n < count && !plan.few; ++n) {
      const int64_t chunks = plan.part_of(first + n).chunks;
      for (int64_t begin = 0; begin < chunks; begin += plan.wave) {
        if (cudaError_t error =
                gram_many(rows, wanted, plan, first + n, begin, at_most(plan.wave, chunks - begin),
                          needed, partials, suspects.of(n).found, precision, width, stream))
          return error;
        const ReduceShape shape(at_most(plan.wave, chunks - begin));
        reduce_kernel<false><<<slot_blocks, shape.threads, shape.shared, stream>>>(
            partials, plan, first + n, begin, totals, needed, matrices.of(n), suspects.of(n));
      }
    }
    rescue_kernel<<<blocks, kThreads, 0, stream>>>(rows, plan, first, count, matrices, suspects);
    if (!whole)
      sum_kernel<<<static_cast<unsigned>(ceil_div(S * S, kThreads)), kThreads, 0, stream>>>(
          matrices.out, count, S * S, out, first == 0);
  }
  return cudaGetLastError();
}

}  // namespace fastagg::cuda
