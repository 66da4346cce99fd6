// SPDX-License-Identifier: Apache-2.0
#include "kernels.h"
#include "launch.cuh"

namespace fastagg::cuda {
namespace {

template <class T>
__global__ void __launch_bounds__(256)
    add_momentum_kernel(float* params, float* m, const T* aggregate, int64_t d, float lr,
                        float beta, bool nesterov, double norm, bool models) {
  const int64_t stride = int64_t{gridDim.x} * blockDim.x;
  for (int64_t k = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; k < d; k += stride) {
    const float p = params[k], v = aggregate_at(static_cast<double>(aggregate[k]), norm, p, models);
    const float next = next_momentum(m[k], v, beta), ahead = nesterov_step(next, v, beta);
    m[k] = next;
    params[k] = moved(p, lr, nesterov ? ahead : next);
  }
}

template <SecondMoment kKind, class T>
__global__ void __launch_bounds__(256)
    add_adaptive_kernel(float* params, float* m, float* s, const T* aggregate, int64_t d, float lr,
                        Decay beta_1, Decay beta_2, float tau, double norm, bool models) {
  const int64_t stride = int64_t{gridDim.x} * blockDim.x;
  for (int64_t k = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; k < d; k += stride) {
    const float p = params[k], v = aggregate_at(static_cast<double>(aggregate[k]), norm, p, models);
    const float first = next_first(m[k], v, beta_1);
    const float second = next_second<kKind>(s[k], v, beta_2);
    m[k] = first;
    s[k] = second;
    params[k] = moved(p, lr, adaptive_step(first, second, tau));
  }
}

template <SecondMoment kKind, class T>
cudaError_t add_adaptive_of(float* params, float* m, float* s, const T* aggregate, int64_t d,
                            double lr, double beta_1, double beta_2, double tau, double norm,
                            bool models, cudaStream_t stream) {
  const auto kernel = add_adaptive_kernel<kKind, T>;
  int blocks = 0;
  if (cudaError_t error = resident_blocks(kernel, 256, ceil_div(d, 256), &blocks)) return error;
  kernel<<<blocks, 256, 0, stream>>>(params, m, s, aggregate, d, static_cast<float>(lr),
                                     Decay(beta_1), Decay(beta_2), static_cast<float>(tau), norm,
                                     models);
  return cudaGetLastError();
}

}  // namespace

template <class T>
cudaError_t add_momentum(float* params, float* m, const T* aggregate, int64_t d, double lr,
                         double beta, bool nesterov, double norm, bool models,
                         cudaStream_t stream) {
  if (d == 0) return cudaSuccess;
  int blocks = 0;
  const auto kernel = add_momentum_kernel<T>;
  if (cudaError_t error = resident_blocks(kernel, 256, ceil_div(d, 256), &blocks)) return error;
  kernel<<<blocks, 256, 0, stream>>>(params, m, aggregate, d, static_cast<float>(lr),
                                     static_cast<float>(beta), nesterov, norm, models);
  return cudaGetLastError();
}

template <class T>
cudaError_t add_adaptive(float* params, float* m, float* s, const T* aggregate, int64_t d,
                         SecondMoment kind, double lr, double beta_1, double beta_2, double tau,
                         double norm, bool models, cudaStream_t stream) {
  if (d == 0) return cudaSuccess;
  const auto add = kind == SecondMoment::kAdagrad ? add_adaptive_of<SecondMoment::kAdagrad, T>
                   : kind == SecondMoment::kAdam  ? add_adaptive_of<SecondMoment::kAdam, T>
                                                  : add_adaptive_of<SecondMoment::kYogi, T>;
  return add(params, m, s, aggregate, d, lr, beta_1, beta_2, tau, norm, models, stream);
}

template cudaError_t add_momentum(float*, float*, const float*, int64_t, double, double, bool,
                                  double, bool, cudaStream_t);
template cudaError_t add_momentum(float*, float*, const double*, int64_t, double, double, bool,
                                  double, bool, cudaStream_t);
template cudaError_t add_adaptive(float*, float*, float*, const float*, int64_t, SecondMoment,
                                  double, double, double, double, double, bool, cudaStream_t);
template cudaError_t add_adaptive(float*, float*, float*, const double*, int64_t, SecondMoment,
                                  double, double, double, double, double, bool, cudaStream_t);

}  // namespace fastagg::cuda
