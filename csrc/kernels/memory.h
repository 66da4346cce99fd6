// SPDX-License-Identifier: Apache-2.0
// memory: the pass of rules that remember the last update (or model) of each client (MIFA, stale).
#pragma once

#include <cstdint>

#include "common.h"
#include "elements.h"
#include "faded_total.h"

namespace fastagg::cpu {

// With m[s] = updates[s], or params + updates[s] if `models` (params before the call):
//   total += sum_s weights[s] * (m[s] - memory[s]);  memory[s] = m[s]
//   params += lr * norm * total              if not models
//   params += lr * (norm * total - params)   if models
// One pass: two reads and one write per element of updates. The running total and each difference
// are float64, so the total does not drift from a fresh sum of the memory rows.
//   params    // [d]
//   total     // [d]
//   updates   // [S] pointers to d contiguous elements each
//   memory    // [S] pointers to the memory rows of the same clients, d floats each; changed
//   weights   // [S]
template <class T>  // float, Bfloat16 or Half
void memory_update(float* params, double* total, const T* const* updates, float* const* memory,
                   int64_t S, int64_t d, const double* weights, double lr, double norm, bool models,
                   const Parallel& parallel);

// The total of memory_update, written to `out`, and the new memory rows, written to `kept` if that
// is given. Nothing that is read is changed. Two reads per element of updates, and a write for
// `kept`:
//   out = total + sum_s weights[s] * (m[s] - old[s]);  kept[s] = m[s]
// with m[s] = updates[s], or params + updates[s] if params is given, and old[s] = memory[s], or
// references[s] + memory[s] where references[s] is given. The bits are those of memory_update.
//   out          // [d]
//   peaks        // [S] max |updates[s]|, NaN if the row holds a NaN
//   total        // [d]
//   memory       // [S] pointers to the memory rows of the same clients, d elements each
//   references   // [S] pointers to d floats each, or nullptr
//   params       // [d] or nullptr
//   kept         // [S] pointers to d floats each, written, or nullptr
//   scales       // [S]: updates[s] stands for the float32 product scales[s] * updates[s]; or
//   nullptr
//   faded        // a second sum, without references and params
template <class T>  // float, Bfloat16 or Half
void memory_total(double* out, float* peaks, const double* total, const T* const* updates,
                  const T* const* memory, const float* const* references, int64_t S, int64_t d,
                  const double* weights, const float* params, float* const* kept,
                  const float* scales, const FadedTotal& faded, const Parallel& parallel);

// memory_total for memory rows of Bfloat16, to which the updates are rounded first: with q(x) the
// row x after rounding,
//   out = total + sum_s weights[s] * (q(updates[s]) - memory[s]);  kept[s] = q(updates[s])
// The bits are those of memory_total for q(updates[s]) and memory[s] as float rows.
//   peaks    // [S] max |q(updates[s])|, NaN if the row holds a NaN
//   memory   // [S] pointers to d elements each
//   kept     // [S] pointers to d elements each, written, or nullptr
//   scales   // [S]: factors of the updates, in float32, before they are rounded; or nullptr
//   faded    // a second sum
void rounded_total(double* out, float* peaks, const double* total, const float* const* updates,
                   const Bfloat16* const* memory, int64_t S, int64_t d, const double* weights,
                   Bfloat16* const* kept, const float* scales, const FadedTotal& faded,
                   const Parallel& parallel);

// params += lr * norm * total, or lr * (norm * total - params) if `models`.
//   params   // [d]
//   total    // [d]
void add_total(float* params, const double* total, int64_t d, double lr, double norm, bool models,
               const Parallel& parallel);

// total += weight * (end - total); exactly `end` for weight 1.
//   total, end   // [d]
void lerp_total(double* total, const double* end, int64_t d, double weight,
                const Parallel& parallel);

}  // namespace fastagg::cpu
