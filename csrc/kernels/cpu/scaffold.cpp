// SPDX-License-Identifier: Apache-2.0
#include "../scaffold.h"

#include "magnitude.h"
#include "row_blocks.h"
#include "row_peaks.h"
#include "scratch.h"
#include "streaming.h"

namespace fastagg::cpu {
namespace {

constexpr int64_t kColumns = 8192;  // of a block, at most: its sums and `mean` stay in L2
constexpr int kRows = 4;            // updates taken together, each with its control variate

// For n columns of G rows: sums += weights * update, changes += steps * update, and
// fresh = control - mean + steps * update.
template <int G>
FASTAGG_INLINE void control_step(double* __restrict sums, double* __restrict changes,
                                 const float* mean, const float* const (&update)[G],
                                 const float* const (&control)[G], const double (&weights)[G],
                                 const double (&steps)[G], float (&fresh)[G][kStep], int64_t n) {
  FASTAGG_INDEPENDENT
  for (int64_t k = 0; k < n; ++k) {
    double sum = sums[k], change = changes[k];
    const double before = mean[k];
    for (int g = 0; g < G; ++g) {
      const double u = update[g][k], step = steps[g] * u;
      sum += weights[g] * u;
      change += step;
      fresh[g][k] = static_cast<float>(static_cast<double>(control[g][k]) - before + step);
    }
    sums[k] = sum;
    changes[k] = change;
  }
}

// control_step for n columns from `column`, with the results in rows `kept`. Raises each of `peaks`
// to the largest magnitude of its update.
template <int W, int G>
FASTAGG_INLINE void control(double* sums, double* changes, int32_t* peaks, const float* mean,
                            const float* const* updates, const float* const* controls,
                            const double* weights, const double* steps, float* const* kept,
                            Transfer transfer, int64_t column, int64_t n) {
  const float* u[G];
  const float* c[G];
  float* to[G];
  double w[G], t[G];
  Magnitude<W> largest[G];
  for (int g = 0; g < G; ++g) {
    u[g] = updates[g] + column;
    c[g] = controls[g] + column;
    to[g] = kept[g] + column;
    w[g] = weights[g];
    t[g] = steps[g];
  }
  const float* m = mean + column;
  for_steps(n, [&](int64_t begin, auto count) FASTAGG_INLINE_LAMBDA {
    if (transfer.fetched) {
      fetch_step(u, begin, count);
      fetch_step(c, begin, count);
    }
    alignas(64) float fresh[G][kStep];
    const float* update[G];
    const float* own[G];
    for (int g = 0; g < G; ++g) {
      update[g] = u[g] + begin;
      own[g] = c[g] + begin;
    }
    control_step<G>(sums + begin, changes + begin, m + begin, update, own, w, t, fresh, count);
    for (int g = 0; g < G; ++g) {
      float* row = to[g] + begin;
      int64_t k = 0;
      for (; k + W <= count; k += W)
        if (transfer.streamed)
          stream<W>(row + k, load<W>(fresh[g] + k));
        else
          store<W>(row + k, load<W>(fresh[g] + k));
      for (; k < count; ++k) row[k] = fresh[g][k];
      largest[g].add(update[g], count);
    }
  });
  for (int g = 0; g < G; ++g) peaks[g] = std::max(peaks[g], largest[g].bits());
}

//   changes   // [n] scratch
struct ScaffoldMean {
  template <int W>
  FASTAGG_INLINE static void run(double* out, float* next, int32_t* peaks, const float* mean,
                                 const float* const* updates, const float* const* controls,
                                 const double* weights, const double* steps, double part,
                                 float* const* kept, Transfer transfer, int64_t S, int64_t column,
                                 int64_t n, double* changes) {
    double* sums = out + column;
    std::fill_n(sums, n, 0.0);
    std::fill_n(changes, n, 0.0);
    int64_t s = 0;
    for (; s + kRows <= S; s += kRows)
      control<W, kRows>(sums, changes, peaks + s, mean, updates + s, controls + s, weights + s,
                        steps + s, kept + s, transfer, column, n);
    for (; s < S; ++s)
      control<W, 1>(sums, changes, peaks + s, mean, updates + s, controls + s, weights + s,
                    steps + s, kept + s, transfer, column, n);
    const double rest = 1.0 - part * static_cast<double>(S);
    for (int64_t k = 0; k < n; ++k)
      next[column + k] = static_cast<float>(rest * mean[column + k] + part * changes[k]);
    if (transfer.streamed) finish_streams();
  }
};

}  // namespace

void scaffold_mean(double* out, float* next, float* peaks, const float* mean,
                   const float* const* updates, const float* const* controls, const double* weights,
                   const double* steps, double part, float* const* kept, int64_t S, int64_t d,
                   const Parallel& parallel) {
  const Isa isa = current_isa();
  const int64_t bytes = (12 * S + 16) * d;
  const Transfer transfer = {should_fetch<float>(bytes), should_stream(kept, S, bytes)};
  const Parallel team = parallel.for_work(bytes);
  const RowPeaks row_peaks(S, team);
  const int64_t columns = std::min(block_columns(d, team.workers), kColumns);
  const Scratch changes(team.workers * columns * int64_t{sizeof(double)});  // stacks may be small
  for_blocks(d, columns, team, [&](int64_t column, int64_t n, int worker) {
    dispatch<ScaffoldMean>(isa, out, next, row_peaks.of(worker), mean, updates, controls, weights,
                           steps, part, kept, transfer, S, column, n,
                           changes.as<double>() + worker * columns);
  });
  row_peaks.write(peaks);
}

}  // namespace fastagg::cpu
