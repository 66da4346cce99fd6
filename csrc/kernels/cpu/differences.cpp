// SPDX-License-Identifier: Apache-2.0
#include "../differences.h"

#include <algorithm>

#include "row_blocks.h"
#include "scratch.h"
#include "weighted_sum_block.h"

namespace fastagg::cpu {
namespace {

// Columns of a block: the base and the sums stay in L2 while all rows are read.
constexpr int64_t kColumns = 8192;
constexpr int64_t kMaxChunks = 512;  // of blocks; each has S partial sums of squares

constexpr int kLanes = 16;  // on every instruction set; only fused multiply-adds differ

// The sum of the squares of kStep numbers.
FASTAGG_INLINE float sum_of_squares(const float* x) {
  float lanes[kLanes];
  for (int l = 0; l < kLanes; ++l) lanes[l] = x[l] * x[l];
  for (int64_t k = kLanes; k < kStep; k += kLanes)
    for (int l = 0; l < kLanes; ++l) lanes[l] += x[k + l] * x[k + l];
  for (int half = kLanes / 2; half > 0; half /= 2)
    for (int l = 0; l < half; ++l) lanes[l] += lanes[l + half];
  return lanes[0];
}

// sums[k] += sum_g weights[g] * (rows[g][column + k] - base[column + k]) for k in [0, n), and
// squares[g] += the squares of the differences.
template <int W, int G, class T>
FASTAGG_INLINE void add_group(const T* const* rows, const float* base, const float* weights,
                              int64_t column, int64_t n, double* __restrict sums,
                              double* __restrict squares) {
  const T* row[G];
  float w[G];
  for (int g = 0; g < G; ++g) {
    row[g] = rows[g] + column;
    w[g] = weights[g];
  }
  const float* from = base + column;
  for_steps(n, [&](int64_t begin, auto count) FASTAGG_INLINE_LAMBDA {
    const float* x[G];
    float room[G][kStep];
    widen_step(x, row, begin, count, room);
    float difference[G][kStep];
    unroll<G>([&](auto g) FASTAGG_INLINE_LAMBDA {  // written out: see Widen
      FASTAGG_WHOLE_VECTORS
      for (int64_t k = 0; k < count; ++k) difference[g][k] = x[g][k] - from[begin + k];
      for (int64_t k = count; k < kStep; ++k) difference[g][k] = 0.0f;
    });
    FASTAGG_WHOLE_VECTORS
    for (int64_t k = 0; k < count; ++k) {
      const auto x = [&](int g) FASTAGG_INLINE_LAMBDA { return difference[g][k]; };
      sums[begin + k] += static_cast<double>(sum_of_products<W, G>(w, x));
    }
    for (int g = 0; g < G; ++g) squares[g] += static_cast<double>(sum_of_squares(difference[g]));
  });
}

struct DifferenceSum {
  template <int W, class T>
  FASTAGG_INLINE static void run(float* out, double* squares, const T* const* rows,
                                 const float* base, int64_t S, const float* weights, double factor,
                                 int64_t column, int64_t n, double* memory) {
    double* __restrict sums = memory;
    std::fill_n(sums, n, 0.0);
    int64_t s = 0;
    for (; s + kGroup <= S; s += kGroup)
      add_group<W, kGroup>(rows + s, base, weights + s, column, n, sums, squares + s);
    for (; s + 4 <= S; s += 4)
      add_group<W, 4>(rows + s, base, weights + s, column, n, sums, squares + s);
    for (; s + 2 <= S; s += 2)
      add_group<W, 2>(rows + s, base, weights + s, column, n, sums, squares + s);
    for (; s < S; ++s) add_group<W, 1>(rows + s, base, weights + s, column, n, sums, squares + s);
    float* to = out + column;
    for (int64_t k = 0; k < n; ++k) to[k] = static_cast<float>(factor * sums[k]);
  }
};

}  // namespace

template <class T>
void difference_sum(float* out, double* squares, const T* const* rows, const float* base, int64_t S,
                    int64_t d, const double* weights, const Parallel& parallel) {
  const Isa isa = current_isa();
  const ScaledWeights scaled(weights, S);
  const Parallel team = parallel.for_work((S + 2) * d * int64_t{sizeof(T)});
  const int64_t blocks = ceil_div(d, kColumns);
  const int64_t together = std::max<int64_t>(ceil_div(blocks, kMaxChunks), 1);  // blocks of a chunk
  const int64_t chunks = ceil_div(blocks, together);
  const Scratch sums(team.workers * kColumns * int64_t{sizeof(double)});
  const Scratch partial(std::max<int64_t>(chunks * S, 1) * int64_t{sizeof(double)});
  double* parts = partial.as<double>();  // [chunks, S]
  team.for_each(chunks, [&](int64_t chunk, int worker) {
    std::fill_n(parts + chunk * S, S, 0.0);
    const int64_t end = std::min((chunk + 1) * together * kColumns, d);
    for (int64_t column = chunk * together * kColumns; column < end; column += kColumns)
      dispatch<DifferenceSum>(isa, out, parts + chunk * S, rows, base, S, scaled.quotients.data(),
                              scaled.factor, column, std::min(kColumns, end - column),
                              sums.as<double>() + worker * kColumns);
  });
  std::fill_n(squares, S, 0.0);
  for (int64_t chunk = 0; chunk < chunks; ++chunk)
    for (int64_t s = 0; s < S; ++s) squares[s] += parts[chunk * S + s];
}

template void difference_sum(float*, double*, const float* const*, const float*, int64_t, int64_t,
                             const double*, const Parallel&);
template void difference_sum(float*, double*, const Bfloat16* const*, const float*, int64_t,
                             int64_t, const double*, const Parallel&);
template void difference_sum(float*, double*, const Half* const*, const float*, int64_t, int64_t,
                             const double*, const Parallel&);

}  // namespace fastagg::cpu
