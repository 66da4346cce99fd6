// SPDX-License-Identifier: Apache-2.0
// As much of CUDA as the kernels use, on the CPU. Blocks run one after the other; the threads of a
// block are fibers that run until they meet a barrier, a shuffle or a matrix product, and go on
// when all of their block or warp have come. A barrier that some never reach ends the program. What
// is not emulated: caches, asynchrony, races within a block, and rounding of the tensor core, whose
// sums are rounded to nearest here.
#pragma once
#include <ucontext.h>
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <type_traits>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __shared__ static
#define __grid_constant__
#define __launch_bounds__(...)

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned a = 1, unsigned b = 1, unsigned c = 1) : x(a), y(b), z(c) {}
};
struct alignas(16) float4 {
  float x, y, z, w;
};
inline float4 make_float4(float a, float b, float c, float d) {
  return {a, b, c, d};
}
typedef int cudaError_t;
typedef struct Stream* cudaStream_t;
enum { cudaSuccess = 0 };
// Few processors, so that blocks take several tasks.
enum { cudaDevAttrMultiProcessorCount, cudaFuncAttributeMaxDynamicSharedMemorySize };
inline cudaError_t cudaGetLastError() {
  return 0;
}
inline cudaError_t cudaGetDevice(int* d) {
  *d = 0;
  return 0;
}
inline cudaError_t cudaDeviceGetAttribute(int* v, int, int) {
  *v = 3;
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
extern size_t dynamic_limit;
template <class K>
cudaError_t cudaFuncSetAttribute(K, int, int bytes) {
  dynamic_limit = bytes;
  return 0;
}

struct Fiber {
  ucontext_t context;
  std::vector<char> stack;
  bool done = false;
  unsigned x, y;
  int lane, warp;
  int waiting = 0;
  uint64_t in, out;
  int in_or;
};
extern dim3 gridDim, blockDim;
struct Index {
  unsigned x, y, z;
};
extern Index threadIdx, blockIdx;
extern Fiber* current;
extern ucontext_t scheduler;
extern std::vector<std::unique_ptr<Fiber>> fibers;
extern std::vector<char> dynamic_shared;
inline void wait_for(int kind) {
  Fiber* me = current;
  me->waiting = kind;
  swapcontext(&me->context, &scheduler);
  current = me;
  threadIdx = {me->x, me->y, 0};
}
inline void __syncthreads() {
  wait_for(1);
}
inline int __syncthreads_or(int p) {
  current->in_or = p != 0;
  wait_for(2);
  return current->in_or;
}
inline uint64_t exchange(uint64_t value, int from) {
  current->in = value;
  current->in_or = from;
  wait_for(3);
  return current->out;
}
template <class T>
T __shfl_xor_sync(unsigned, T v, int offset) {
  uint64_t bits = 0;
  std::memcpy(&bits, &v, sizeof v);
  bits = exchange(bits, current->lane ^ offset);
  T r;
  std::memcpy(&r, &bits, sizeof r);
  return r;
}
inline int atomicMax(int32_t* p, int32_t v) {
  int o = *p;
  *p = std::max(o, v);
  return o;
}
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
inline uint32_t __byte_perm(uint32_t a, uint32_t b, uint32_t s) {
  uint64_t v = (uint64_t(b) << 32) | a;
  uint32_t r = 0;
  for (int i = 0; i < 4; ++i) r |= uint32_t((v >> (8 * (s >> (4 * i) & 7))) & 255) << (8 * i);
  return r;
}
inline float4* emulated_shared() {
  return reinterpret_cast<float4*>(dynamic_shared.data());
}
inline uint32_t bf16(float x) {
  uint32_t b = __float_as_int(x);
  if ((b & 0x7fffffff) > 0x7f800000) return b >> 16 | 64;
  return (b + 0x7fff + (b >> 16 & 1)) >> 16;
}
inline uint32_t round_pair(float x, float y) {
  return bf16(y) << 16 | bf16(x);
}
// Runs one block of `threads` fibers.
void run_block(const std::function<void()>& body, unsigned threads);
inline uint32_t round_tf32(float x) {
  const uint32_t b = __float_as_int(x);
  return (b & 0x7fffffff) > 0x7f800000 ? 0x7fffffff : (b + 0x1000) & 0xffffe000u;
}
// mma.m16n8k16 (bf16) and mma.m16n8k8 (tf32) of a warp, fragments laid out as in the PTX manual;
// they replace those in gram_mma.cuh.
struct MmaArgs {
  float c[4];
  uint32_t a[4], b[2];
};
extern std::vector<MmaArgs> mma_args;
inline float half_of(uint32_t w, int h) {
  return __uint_as_float(h ? w & 0xffff0000u : w << 16);
}
// A word is `kHalves` numbers.
template <int kHalves>
void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  const int base = current->warp * 32;
  MmaArgs& m = mma_args[base + current->lane];
  for (int r = 0; r < 4; ++r) m.c[r] = c[r], m.a[r] = a[r];
  m.b[0] = b0;
  m.b[1] = b1;
  wait_for(4);
  float out[4];
  for (int e = 0; e < 4; ++e) {
    const int row = current->lane / 4 + (e < 2 ? 0 : 8), col = current->lane % 4 * 2 + e % 2;
    double sum = mma_args[base + current->lane].c[e];
    for (int word = 0; word < 8; ++word) {
      const uint32_t x = mma_args[base + row % 8 * 4 + word % 4].a[row / 8 + word / 4 * 2];
      const uint32_t y = mma_args[base + col * 4 + word % 4].b[word / 4];
      if (kHalves == 2)
        for (int h = 0; h < 2; ++h) sum += double(half_of(x, h)) * half_of(y, h);
      else  // the lower 13 bits are not looked at
        sum += double(__uint_as_float(x & 0xffffe000u)) * __uint_as_float(y & 0xffffe000u);
    }
    out[e] = float(sum);
  }
  wait_for(4);
  for (int e = 0; e < 4; ++e) c[e] = out[e];
}
inline void mma_bf16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  mma<2>(c, a, b0, b1);
}
inline void mma_tf32(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  mma<1>(c, a, b0, b1);
}
// cp.async, done at once; replaces the one in gram_few_cuda.cu. Misaligned addresses end the
// program.
template <int kBytes>
void copy_async(float4* to, const float* from, int64_t valid) {
  if (reinterpret_cast<uintptr_t>(from) % kBytes) abort();
  float* f = reinterpret_cast<float*>(to);
  for (int k = 0; k < 4; ++k) f[k] = k < valid ? from[k] : 0.0f;
}
template <class K>
struct Launch {
  K k;
  dim3 g, b;
  size_t s;
  template <class... A>
  void operator()(A... a) const {
    gridDim = g;
    blockDim = b;
    dynamic_shared.assign(s, char(0xff));
    if (s > 48 * 1024 && s > dynamic_limit) abort();
    for (unsigned y = 0; y < g.y; ++y)
      for (unsigned x = 0; x < g.x; ++x) {
        blockIdx = {x, y, 0};
        run_block([&] { k(a...); }, b.x * b.y);
      }
  }
};
template <class K>
Launch<K> launch_on_cpu(K k, dim3 g, dim3 b, size_t s = 0, cudaStream_t = nullptr) {
  return {k, g, b, s};
}
