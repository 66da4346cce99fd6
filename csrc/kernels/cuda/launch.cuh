// SPDX-License-Identifier: Apache-2.0
// Shared by all CUDA kernels: vectors of elements, magnitudes, and the size of a grid.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "../elements.h"
#include "../host_device.h"

namespace fastagg::cuda {

constexpr int kWarp = 32;
constexpr unsigned kAllLanes = 0xffffffffu;

// V elements that one access loads: aligned to their size, or to 16 bytes, the widest access.
template <class T, int V>
struct alignas(sizeof(T) * V < 16 ? sizeof(T) * V : 16) Vector {
  T at[V];
};
template <int V>
using Floats = Vector<float, V>;

// The V elements from `from` on, of which only the first n exist (n may be negative, or more than
// V); the others become 0.
template <int V, class T>
__device__ __forceinline__ Vector<T, V> load(const T* from, int64_t n) {
  if (n >= V) return *reinterpret_cast<const Vector<T, V>*>(from);
  Vector<T, V> x;
#pragma unroll
  for (int v = 0; v < V; ++v) x.at[v] = v < n ? from[v] : T{};
  return x;
}

template <int V>
__device__ __forceinline__ void store(float* to, const Floats<V>& x, int64_t n) {
  if (n >= V) {
    *reinterpret_cast<Floats<V>*>(to) = x;
    return;
  }
#pragma unroll
  for (int v = 0; v < V; ++v)
    if (v < n) to[v] = x.at[v];
}

// Whether the kernel must not change anything (`when` in kernels.h).
__device__ __forceinline__ bool called_off(const uint8_t* when) {
  return when && !*when;
}

// |x| as an integer: ordered like |x|, with NaN above infinity and infinity above all numbers.
__device__ __forceinline__ int32_t magnitude_bits(float x) {
  return __float_as_int(x) & 0x7fffffff;
}

// *blocks = the number of thread blocks of a kernel whose thread blocks take tasks in turn: as many
// as the GPU runs at the same time, at most `tasks`.
//   shared   // bytes of dynamic shared memory
template <class Kernel>
cudaError_t resident_blocks(Kernel kernel, int threads, int64_t tasks, int* blocks,
                            int64_t shared = 0) {
  int device = 0, processors = 0, per_processor = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess)
    error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  if (error == cudaSuccess)
    error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_processor, kernel, threads, shared);
  *blocks = static_cast<int>(at_most(tasks, int64_t{processors} * at_least(per_processor, 1)));
  return error;
}

// call(Width<width>()), for a width that is known at run time, at most kMost.
template <int V>
struct Width {
  static constexpr int value = V;
};
template <int kMost = 4, class Call>
cudaError_t with_width(int width, const Call& call) {
  if constexpr (kMost == 8)
    if (width == 8) return call(Width<8>());
  return width >= 4 ? call(Width<4>()) : width == 2 ? call(Width<2>()) : call(Width<1>());
}

}  // namespace fastagg::cuda
