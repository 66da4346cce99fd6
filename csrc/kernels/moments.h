// SPDX-License-Identifier: Apache-2.0
// Server optimizers: steps along an aggregate with moments, which are vectors beside the
// parameters. moment_math.h has the arithmetic.
#pragma once

#include <cstdint>

#include "common.h"
#include "moment_math.h"

namespace fastagg::cpu {

// With v = norm * aggregate, or norm * aggregate - params if `models`:
//   m       = beta * m + v
//   params += lr * m, or lr * (v + beta * m) with the new m if `nesterov`
//
//   params, m   // [d]
//   aggregate   // [d]
template <class T>  // float or double
void add_momentum(float* params, float* m, const T* aggregate, int64_t d, double lr, double beta,
                  bool nesterov, double norm, bool models, const Parallel& parallel);

// With v as above, and the s of `kind` (next_second):
//   m       = beta_1 * m + (1 - beta_1) * v
//   params += lr * m / (sqrt(s) + tau), with the new m and s
//
//   params, m, s   // [d]; s >= 0
//   aggregate      // [d]
template <class T>  // float or double
void add_adaptive(float* params, float* m, float* s, const T* aggregate, int64_t d,
                  SecondMoment kind, double lr, double beta_1, double beta_2, double tau,
                  double norm, bool models, const Parallel& parallel);

}  // namespace fastagg::cpu
