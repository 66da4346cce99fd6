// SPDX-License-Identifier: Apache-2.0
// The arithmetic of server optimizers on one column. CPU and CUDA kernels share it.
//
// All but the aggregate is float32: float64 arithmetic took longer than reading the memory. Each
// sum with a product is a fused multiply-add, rounded once, and no product is left for a compiler
// to fuse. Results therefore do not depend on the instruction set; one without such an instruction
// calls a function.
//
// Magnitudes below 2^-126, the smallest normal float32, become 0. Otherwise the moments of a column
// that has stopped changing would stay denormal for ever, and such numbers slow a CPU down.
//
// Compilers vectorize this because no branch chooses a number or an operation.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "host_device.h"

namespace fastagg {

// How the second moment follows the squares q of the aggregate (Reddi et al. 2021, algorithm 2).
enum class SecondMoment { kAdagrad, kAdam, kYogi };

// A coefficient beta and 1 - beta, rounded to float32.
struct Decay {
  float kept, added;

  explicit Decay(double beta)
      : kept(static_cast<float>(beta)), added(static_cast<float>(1.0 - beta)) {}
};

// x, but 0 for one below 2^-126. NaN stays NaN.
FASTAGG_HD float settled(float x) {
  int32_t bits = 0;
  std::memcpy(&bits, &x, sizeof bits);
  bits &= -static_cast<int32_t>(!(std::fabs(x) < 0x1p-126f));  // all ones, or zero
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

// The aggregate v of a column: norm * value, or norm * value - param if `models`, rounded once to
// float64 and then to float32.
FASTAGG_HD float aggregate_at(double value, double norm, float param, bool models) {
  const double from = models ? static_cast<double>(param) : 0.0;
  return static_cast<float>(std::fma(norm, value, -from));
}

// params + lr * step.
FASTAGG_HD float moved(float param, float lr, float step) {
  return std::fma(lr, step, param);
}

// The new m of momentum: beta * m + v.
FASTAGG_HD float next_momentum(float m, float v, float beta) {
  return settled(std::fma(beta, m, v));
}

// The step of Nesterov's momentum, from the new m: v + beta * m.
FASTAGG_HD float nesterov_step(float m, float v, float beta) {
  return std::fma(beta, m, v);
}

// The new m of an adaptive optimizer: beta * m + (1 - beta) * v.
FASTAGG_HD float next_first(float m, float v, const Decay& beta) {
  return settled(std::fma(beta.kept, m, beta.added * v));
}

// The new s of an adaptive optimizer:
//   kAdagrad   s + v^2
//   kAdam      beta * s + (1 - beta) * v^2
//   kYogi      s - (1 - beta) * v^2 * sign(s - v^2)
template <SecondMoment kKind>
FASTAGG_HD float next_second(float s, float v, const Decay& beta) {
  if constexpr (kKind == SecondMoment::kAdagrad) return settled(std::fma(v, v, s));
  const float q = v * v;
  if constexpr (kKind == SecondMoment::kAdam)
    return settled(std::fma(beta.kept, s, beta.added * q));
  const int32_t sign = static_cast<int32_t>(q > s) - static_cast<int32_t>(q < s);
  return settled(std::fma(static_cast<float>(sign) * beta.added, q, s));
}

// The step of an adaptive optimizer, from the new m and s: m / (sqrt(s) + tau).
FASTAGG_HD float adaptive_step(float m, float s, float tau) {
  return m / (std::sqrt(s) + tau);
}

}  // namespace fastagg
