// SPDX-License-Identifier: Apache-2.0
#include "../pair_gram.h"

#include <algorithm>
#include <vector>

#include "../gram.h"
#include "pair_order.h"

namespace fastagg::cpu {
namespace {

// Small components are computed together until they have this many rows: a pass over fewer rows is
// bound by memory and would leave threads idle.
constexpr int64_t kRunRows = 48;

// Whether every pair of different rows is wanted.
bool all_pairs(const uint8_t* pairs, int64_t S) {
  for (int64_t i = 0; i < S; ++i)
    for (int64_t j = 0; j < i; ++j)
      if (!pairs[i * S + j]) return false;
  return true;
}

void dense_or_masked(const float* const* rows, int64_t S, int64_t d, const uint8_t* pairs,
                     double* out, const Parallel& parallel) {
  gram(rows, S, d, all_pairs(pairs, S) ? nullptr : pairs, out, parallel);
}

}  // namespace

void pair_gram(const float* const* rows, int64_t S, int64_t d, const uint8_t* pairs, double* out,
               const Parallel& parallel) {
  const Components found = components(pairs, S);
  if (found.ends.size() > 1) std::fill_n(out, S * S, 0.0);
  std::vector<const float*> run_rows;
  std::vector<uint8_t> run_pairs;
  std::vector<double> run_out;
  int64_t begin = 0;
  for (const int64_t end : found.ends) {
    const int64_t size = end - begin;
    if (size < kRunRows && end < S) continue;
    if (size == S) return dense_or_masked(rows, S, d, pairs, out, parallel);
    const int64_t* run = found.order.data() + begin;
    run_rows.resize(size);
    run_pairs.resize(size * size);
    run_out.resize(size * size);
    for (int64_t i = 0; i < size; ++i) {
      run_rows[i] = rows[run[i]];
      for (int64_t j = 0; j < size; ++j) run_pairs[i * size + j] = pairs[run[i] * S + run[j]];
    }
    dense_or_masked(run_rows.data(), size, d, run_pairs.data(), run_out.data(), parallel);
    for (int64_t i = 0; i < size; ++i)
      for (int64_t j = 0; j < size; ++j) out[run[i] * S + run[j]] = run_out[i * size + j];
    begin = end;
  }
}

}  // namespace fastagg::cpu
