// SPDX-License-Identifier: Apache-2.0
// The part of CUDA that the kernels use, on the CPU. Blocks run one after the other. The threads of
// a block are fibers: each runs until it reaches a barrier, a shuffle or a matrix product, and
// resumes when all threads of its block or warp have reached it. A barrier that some threads never
// reach ends the program.
//
// Every memory access of a kernel is checked (memory_check.h), asynchronous copies complete as late
// as CUDA allows, and the tensor core rounds like the hardware does (tensor_core.h). Caches and
// timing are not emulated.
//
//   FASTAGG_EMULATED_ORDER=N          the N-th random order of blocks and threads (0: none)
//   FASTAGG_EMULATED_TENSOR_CORE=...  sm_80 or sm_90 (default)
//   FASTAGG_EMULATED_LAUNCHES=FILE    adds the name of every launched kernel to this file
//   FASTAGG_EMULATED_SHARED=KIB       shared memory of a thread block (163, as on sm_80)
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <tuple>
#include <type_traits>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned a = 1, unsigned b = 1, unsigned c = 1) : x(a), y(b), z(c) {}
};
struct Index {
  unsigned x, y, z;
};
extern dim3 gridDim, blockDim;
extern Index threadIdx, blockIdx;
struct alignas(16) float4 {
  float x, y, z, w;
};
inline float4 make_float4(float a, float b, float c, float d) {
  return {a, b, c, d};
}

// ---- host side ---------------------------------------------------------------------------------

typedef int cudaError_t;
typedef struct Stream* cudaStream_t;
enum { cudaSuccess = 0 };
enum {
  cudaDevAttrMultiProcessorCount,
  cudaDevAttrMaxSharedMemoryPerBlockOptin,
  cudaFuncAttributeMaxDynamicSharedMemorySize
};
inline cudaError_t cudaGetLastError() {
  return 0;
}
inline cudaError_t cudaGetDevice(int* d) {
  *d = 0;
  return 0;
}
int shared_limit();  // bytes of a thread block
// Few multiprocessors, so that each block takes several tasks.
inline cudaError_t cudaDeviceGetAttribute(int* v, int attribute, int) {
  *v = attribute == cudaDevAttrMultiProcessorCount ? 3 : shared_limit();
  return 0;
}
template <class K>
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* n, K, int, size_t) {
  *n = 1;
  return 0;
}
inline cudaError_t cudaMemsetAsync(void* p, int v, size_t n, cudaStream_t) {
  std::memset(p, v, n);
  return 0;
}
void allow_dynamic_shared(int bytes);
template <class K>
cudaError_t cudaFuncSetAttribute(K, int, int bytes) {
  allow_dynamic_shared(bytes);
  return 0;
}

// Runs all blocks of a launch; `body` runs one thread, given the arguments.
void run_grid(const char* kernel, dim3 grid, dim3 block, size_t dynamic_shared,
              void (*body)(const void*), const void* arguments, size_t argument_bytes);
template <class K>
struct Launch {
  const char* name;
  K kernel;
  dim3 grid, block;
  size_t shared;
  template <class... A>
  void operator()(A... a) const {
    struct Call {
      K kernel;
      std::tuple<A...> arguments;
    } call{kernel, {a...}};
    const auto body = [](const void* data) {
      const auto* c = static_cast<const Call*>(data);
      std::apply(c->kernel, c->arguments);
    };
    run_grid(name, grid, block, shared, body, &call, sizeof call);
  }
};
template <class K>
Launch<K> launch_on_cpu(const char* name, K kernel, dim3 grid, dim3 block, size_t shared = 0,
                        cudaStream_t = nullptr) {
  return {name, kernel, grid, block, shared};
}

// ---- thread side -------------------------------------------------------------------------------

float4* emulated_shared();
// Replaces `__shared__ T name[n]`: a static array that every thread declares.
void declare_shared(void* data, size_t bytes);

void __syncthreads();
int __syncthreads_or(int predicate);
void __syncwarp();
// bar.arrive and bar.sync of two warps: all lanes of one, then all of the other.
void announce(int barrier);
void wait_for_other(int barrier);
int lane_of_thread();
uint64_t shuffle(uint64_t value, int source);  // the value of lane `source`
template <class T>
T __shfl_sync(unsigned, T v, int source) {
  uint64_t bits = 0;
  std::memcpy(&bits, &v, sizeof v);
  bits = shuffle(bits, source);
  T r;
  std::memcpy(&r, &bits, sizeof r);
  return r;
}
template <class T>
T __shfl_xor_sync(unsigned mask, T v, int offset) {
  return __shfl_sync(mask, v, lane_of_thread() ^ offset);
}
inline unsigned __ballot_sync(unsigned, bool predicate) {
  unsigned lanes = unsigned{predicate} << (threadIdx.x % 32);
  for (int offset = 16; offset > 0; offset /= 2) lanes |= __shfl_xor_sync(~0u, lanes, offset);
  return lanes;
}
int32_t atomicMax(int32_t* p, int32_t v);
int32_t atomicAdd(int32_t* p, int32_t v);
// A load from the L2 cache, where atomics take place. Blocks run one after the other, and a fence
// has nothing to order.
int32_t __ldcg(const int32_t* p);
inline void __threadfence() {}

// Copies 4 floats in accesses of kBytes: the first `valid` from the source, zeros for the others.
void copy_async(float4* to, const float* from, int64_t valid, int bytes);
template <int kBytes>
void copy_async(float4* to, const float* from, int64_t valid) {
  copy_async(to, from, valid, kBytes);
}
void copy_async_commit();
void copy_async_wait(int groups_left);

// mma.m16n8k16 (bf16) and mma.m16n8k8 (tf32) of a warp.
void mma_bf16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);
void mma_tf32(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);

// ---- arithmetic --------------------------------------------------------------------------------

inline int32_t __float_as_int(float x) {
  int32_t i;
  std::memcpy(&i, &x, 4);
  return i;
}
inline float __uint_as_float(uint32_t i) {
  float x;
  std::memcpy(&x, &i, 4);
  return x;
}
inline double __dadd_rn(double a, double b) {
  return a + b;
}
inline double __dmul_rn(double a, double b) {
  return a * b;
}
inline float __fadd_rn(float a, float b) {
  return a + b;
}
inline float __fsub_rn(float a, float b) {
  return a - b;
}
using std::max;
using std::min;
inline int32_t __dp4a(int32_t a, int32_t b, int32_t sum) {
  int8_t x[4], y[4];
  memcpy(x, &a, 4);
  memcpy(y, &b, 4);
  for (int i = 0; i < 4; ++i) sum += x[i] * y[i];
  return sum;
}
inline uint32_t __byte_perm(uint32_t a, uint32_t b, uint32_t s) {
  uint64_t v = (uint64_t(b) << 32) | a;
  uint32_t r = 0;
  for (int i = 0; i < 4; ++i) r |= uint32_t((v >> (8 * (s >> (4 * i) & 7))) & 255) << (8 * i);
  return r;
}
inline uint32_t bf16(float x) {
  uint32_t b = __float_as_int(x);
  if ((b & 0x7fffffff) > 0x7f800000) return b >> 16 | 64;
  return (b + 0x7fff + (b >> 16 & 1)) >> 16;
}
inline uint32_t round_pair(float x, float y) {
  return bf16(y) << 16 | bf16(x);
}
inline uint32_t round_tf32(float x) {
  const uint32_t b = __float_as_int(x);
  return (b & 0x7fffffff) > 0x7f800000 ? 0x7fffffff : (b + 0x1000) & 0xffffe000u;
}
