// SPDX-License-Identifier: Apache-2.0
// What all CUDA kernels share: vectors of elements, magnitudes, and the size of a grid.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "../elements.h"
#include "../host_device.h"

namespace fastagg::cuda {

constexpr int kWarp = 32;
constexpr unsigned kAllLanes = 0xffffffffu;

// V elements of an address that is aligned to them, or to the 16 bytes of the widest access.
template <class T, int V>
struct alignas(sizeof(T) * V < 16 ? sizeof(T) * V : 16) Vector {
  T at[V];
};
template <int V>
using Floats = Vector<float, V>;

// V elements from `from`, of which the first n are there (n may be 0 or less, or more than V); the
// others become 0.
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

// Whether a kernel is called off, by a flag that an earlier one may have written.
__device__ __forceinline__ bool called_off(const uint8_t* when) {
  return when && !*when;
}

// Magnitudes as integers are ordered like the magnitudes, infinity and NaN above all numbers.
__device__ __forceinline__ int32_t magnitude_bits(float x) {
  return __float_as_int(x) & 0x7fffffff;
}

// Blocks of a kernel whose blocks take tasks in turn: as many as run at the same time, and few
// enough to keep what each of them sets up.
template <class Kernel>
cudaError_t resident_blocks(Kernel kernel, int threads, int64_t tasks, int* blocks) {
  int device = 0, processors = 0, per_processor = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess)
    error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  if (error == cudaSuccess)
    error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_processor, kernel, threads, 0);
  *blocks = static_cast<int>(at_most(tasks, int64_t{processors} * at_least(per_processor, 1)));
  return error;
}

// call(Width<width>()): the template for a width that is known at run time, at most kMost.
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
