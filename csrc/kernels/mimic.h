// SPDX-License-Identifier: Apache-2.0
// mimic: the server's part of a MimiC round.
#pragma once

#include <cstdint>

#include "common.h"
#include "elements.h"

namespace fastagg::cpu {

// Algorithm 1 of the MimiC paper, lines 5 to 10, for updates (local model - global model):
//   v = 1/S sum_s (updates[s] + corrections[s]);  params += lr * v;
//   corrections[s] = v - updates[s]
// Updates and corrections are read from memory once and corrections are written once: 12 bytes per
// element of float updates. Rows are summed as in weighted_sum, in the order of s.
//   params        // [d]
//   updates       // [S] pointers to d contiguous elements each
//   corrections   // [S] pointers to the memory rows of the same clients, d floats each; changed
template <class T>  // float, Bfloat16 or Half
void mimic(float* params, const T* const* updates, float* const* corrections, int64_t S, int64_t d,
           double lr, const Parallel& parallel);

// The v of `mimic`. Nothing that is read is changed. Two reads per element of updates, and a write
// for `kept`, if that is given:
//   v = 1/S sum_s (updates[s] + weights[s] * c[s])
//   kept[s] = updates[s] if `copies`, otherwise v - updates[s]
// with c[s] = corrections[s], or references[s] - corrections[s] where references[s] is given.
//   v             // [d]
//   rounded       // [d] v in float32
//   peaks         // [S] max |updates[s]|, NaN if the row holds a NaN
//   updates       // [S] pointers to d contiguous elements each
//   corrections   // [S] pointers to the memory rows of the same clients, d elements each
//   references    // [S] pointers to d floats each, or nullptr
//   weights       // [S], rounded to float32, or nullptr for ones; 1/S is not rounded
//   kept          // [S] pointers to d floats each, written, or nullptr
//   scales        // [S]: updates[s] stands for the float32 product scales[s] * updates[s]; or
//                 // nullptr
template <class T>  // float, Bfloat16 or Half
void mimic_mean(double* v, float* rounded, float* peaks, const T* const* updates,
                const T* const* corrections, const float* const* references, const double* weights,
                float* const* kept, bool copies, const float* scales, int64_t S, int64_t d,
                const Parallel& parallel);

}  // namespace fastagg::cpu
