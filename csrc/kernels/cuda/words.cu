// SPDX-License-Identifier: Apache-2.0
// Copies small tables to the device as kernel arguments. This needs no pinned memory that must
// outlive the call and no wait, and a captured CUDA graph keeps its own copy.
#include <cstring>

#include "kernels.h"
#include "launch.cuh"

namespace fastagg::cuda {
namespace {

constexpr int kWords =
    500;  // 4,000 bytes of the 4,096 that every CUDA version allows for arguments

struct Words {
  uint64_t at[kWords];
};

__global__ void store_words_kernel(const __grid_constant__ Words words, int n, uint64_t* out) {
  for (int k = threadIdx.x; k < n; k += blockDim.x) out[k] = words.at[k];
}

}  // namespace

cudaError_t store_words(const uint64_t* words, int64_t n, uint64_t* out, cudaStream_t stream) {
  for (int64_t begin = 0; begin < n; begin += kWords) {
    Words part;
    const int count = static_cast<int>(at_most(n - begin, kWords));
    std::memcpy(part.at, words + begin, count * sizeof(uint64_t));
    store_words_kernel<<<1, 256, 0, stream>>>(part, count, out + begin);
    if (cudaError_t error = cudaGetLastError()) return error;
  }
  return cudaSuccess;
}

}  // namespace fastagg::cuda
