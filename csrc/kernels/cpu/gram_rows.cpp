// SPDX-License-Identifier: Apache-2.0
// gram_rows for few changed rows: their products with all rows. It is bound by reading the rows, so
// nothing is packed or reordered. A span of columns of the changed rows stays in cache while strips
// of R rows are read from one end of the span to the other, in R long streams. Chunks and blocks
// are those of `gram`, with separate partial sums, so the bits are those of `gram` too.
#include <vector>

#include "../gram.h"
#include "gram_columns.h"
#include "gram_tiles.h"
#include "ordered_sum.h"
#include "scratch.h"
#include "simd.h"

namespace fastagg::cpu {
namespace {

// Rows that are read at a time, R.
template <int W>
constexpr int kStrip = kRegisters<W> >= 32 ? 5 : 3;
// Changed rows of a tile: R squares and R * kTogether products fit the registers.
// The baseline of x86-64 needs a register for a product, because it has no multiply-add.
template <int W>
constexpr int kTogether = kRegisters<W> >= 32 ? 4
                          : W == 8            ? 3
                                              : 2;
// Groups of kTogether changed rows, at most. With more, the tiles of `gram` are faster.
constexpr int64_t kMostGroups = 3;

// The sums of a tile: the squares of R rows, and their products with C others.
template <int W, int C>
using Sums = LaneSums<W, kStrip<W>*(C + 1)>;

template <int W>
constexpr int kTileSlots = Sums<W, kTogether<W>>::kSlots;

// Keep the span of the changed rows below this many bytes, so that it stays in L2 while all rows
// are streamed.
constexpr int64_t kSpanBytes = 256 << 10;

struct Problem {
  const float* const* rows;     // [strips * R]; the last row may be repeated
  const float* const* changed;  // [C]
  int64_t strips, C, d;
  GramColumns cut;
  int64_t span;  // columns that are read of one strip after another: whole blocks
};

// sums += the squares of `strip` and its products with `others`, over `columns` columns. Prefetches
// as many columns of `soon`.
template <int W, int C>
FASTAGG_INLINE void tile(const float* const* strip, const float* const* others,
                         const float* const* soon, int64_t column, int64_t soon_column,
                         int64_t columns, double* sums) {
  constexpr int R = kStrip<W>;
  const InPlace<W, R> a(strip, column), next(soon, soon_column);
  const InPlace<W, C> b(others, column);
  Vec<float, W> sum[R * (C + 1)] = {};
  const auto add = [&](const auto& rows, const auto& with, int64_t k) FASTAGG_INLINE_LAMBDA {
    Vec<float, W> x[R];
    unroll<R>([&](auto i) FASTAGG_INLINE_LAMBDA {
      x[i] = rows.at(k, i);
      sum[i] += x[i] * x[i];
    });
    unroll<C>([&](auto j) FASTAGG_INLINE_LAMBDA {
      const Vec<float, W> y = with.at(k, j);
      unroll<R>([&](auto i) FASTAGG_INLINE_LAMBDA { sum[(j + 1) * R + i] += x[i] * y; });
    });
  };
  const int64_t k = columns / W;
  const auto fetch = [&](int64_t k) FASTAGG_INLINE_LAMBDA {
    unroll<R>([&](auto i) FASTAGG_INLINE_LAMBDA { prefetch(next.row[i], k * W); });
  };
  for_vectors<W>(k, fetch, [&](int64_t k) FASTAGG_INLINE_LAMBDA { add(a, b, k); });
  if (k * W < columns) {  // the last columns, with zeros up to a whole vector
    float tail[R + C][W] = {};
    const float* ends[R + C];
    for (int i = 0; i < R + C; ++i) {
      const float* row = i < R ? a.row[i] : b.row[i - R];
      std::copy(row + k * W, row + columns, tail[i]);
      ends[i] = tail[i];
    }
    add(InPlace<W, R>(ends, 0), InPlace<W, C>(ends + R, 0), 0);
  }
  Sums<W, C>::add(sum, sums);
}

template <int W, int C>
FASTAGG_INLINE void tile_of(int64_t wanted, const float* const* strip, const float* const* others,
                            const float* const* soon, int64_t column, int64_t soon_column,
                            int64_t columns, double* sums) {
  if (wanted == C) return tile<W, C>(strip, others, soon, column, soon_column, columns, sums);
  if constexpr (C > 1)
    tile_of<W, C - 1>(wanted, strip, others, soon, column, soon_column, columns, sums);
}

// Adds the tiles over chunks [first, last) to sums[chunk - first][strip][group of changed rows].
struct RowsKernel {
  template <int W>
  FASTAGG_INLINE static void run(const Problem* problem, int64_t first, int64_t last,
                                 double* const* sums) {
    const Problem& p = *problem;
    const int64_t end = std::min(p.d, last * p.cut.chunk);
    for (int64_t begin = first * p.cut.chunk; begin < end; begin += p.span)
      for (int64_t I = 0; I < p.strips; ++I)
        strip<W>(p, I, begin, std::min(begin + p.span, end), first, sums);
  }

 private:
  // One strip over columns [begin, end). A tile prefetches the next block of the strip, or the
  // first block of the next strip.
  template <int W>
  FASTAGG_INLINE static void strip(const Problem& p, int64_t I, int64_t begin, int64_t end,
                                   int64_t first, double* const* sums) {
    constexpr int T = kTogether<W>;
    const float* const* rows = p.rows + I * kStrip<W>;
    for (int64_t column = begin; column < end; column += p.cut.block) {
      const int64_t columns = std::min(p.cut.block, end - column);
      const bool last = column + p.cut.block >= end;
      const float* const* soon = last && I + 1 < p.strips ? rows + kStrip<W> : rows;
      const int64_t soon_column = last ? begin : column + p.cut.block;
      double* out = sums[column / p.cut.chunk - first] + I * ceil_div(p.C, T) * kTileSlots<W>;
      for (int64_t c = 0; c < p.C; c += T, out += kTileSlots<W>)
        tile_of<W, T>(std::min<int64_t>(T, p.C - c), rows, p.changed + c, soon, column, soon_column,
                      columns, out);
    }
  }
};

// The slots in which a tile with `wanted` changed rows keeps its sums: [changed + 1][R], squares
// first.
template <int W, int C>
void fill_slots(int64_t wanted, int* slots) {
  if (wanted == C) {
    constexpr auto found = Sums<W, C>::slots();
    std::copy(found.begin(), found.end(), slots);
  } else if constexpr (C > 1) {
    fill_slots<W, C - 1>(wanted, slots);
  }
}

template <int W>
bool stream(const float* const* rows, int64_t S, int64_t d, const int64_t* changed, int64_t C,
            double* out, double* squares, Isa isa, const Parallel& parallel) {
  constexpr int R = kStrip<W>, T = kTogether<W>;
  const int64_t strips = ceil_div(S, R), groups = ceil_div(C, T);
  if (groups > kMostGroups) return false;
  std::vector<const float*> all(rows, rows + S), few;
  all.resize(strips * R, rows[S - 1]);
  for (int64_t c = 0; c < C; ++c) few.push_back(rows[changed[c]]);
  const GramColumns cut(d);
  const int64_t span = std::max<int64_t>(kSpanBytes / 4 / C / cut.block, 1) * cut.block;
  const Problem problem{all.data(), few.data(), strips, C, d, cut, span};

  const Parallel team = parallel.for_work(4 * S * d, C * S * d);
  // A task is as many chunks as a span has, but few enough that each worker gets four tasks.
  const int64_t share = team.workers == 1 ? cut.chunks : cut.chunks / (4 * team.workers);
  const int64_t step = std::clamp<int64_t>(span / cut.chunk, 1, std::max<int64_t>(share, 1));
  const int64_t slots = strips * groups * kTileSlots<W>;
  const int64_t window = std::min<int64_t>(cut.chunks, int64_t{2} * team.workers * step);
  const Scratch memory((1 + window) * slots * 8);
  auto* sums = memory.as<double>();
  OrderedSum total(sums, 0, slots, sums + slots, slots, window);
  // Allocated here, not in a task: other workers wait for each task, so none may throw.
  std::vector<double*> buffers(team.workers * step);
  team.for_each(ceil_div(cut.chunks, step), [&](int64_t task, int worker) {
    const int64_t first = task * step, last = std::min(cut.chunks, first + step);
    double** partial = buffers.data() + worker * step;
    for (int64_t c = first; c < last; ++c) partial[c - first] = total.start(c);
    dispatch<RowsKernel>(isa, &problem, first, last, partial);
    for (int64_t c = first; c < last; ++c) total.finish(c);
  });

  for (int64_t g = 0; g < groups; ++g) {
    const int64_t count = std::min<int64_t>(T, C - g * T);
    int slot[R * (T + 1)];
    fill_slots<W, T>(count, slot);
    for (int64_t s = 0; s < S; ++s) {
      const double* tile = sums + (s / R * groups + g) * kTileSlots<W>;
      squares[s] = tile[slot[s % R]];
      for (int64_t c = 0; c < count; ++c)
        out[(g * T + c) * S + s] = tile[slot[(c + 1) * R + s % R]];
    }
  }
  return true;
}

}  // namespace

bool gram_rows_streamed(const float* const* rows, int64_t S, int64_t d, const int64_t* changed,
                        int64_t C, double* out, double* squares, const Parallel& parallel) {
  const Isa isa = current_isa();
  return with_lanes(
      isa, [&](auto W) { return stream<W>(rows, S, d, changed, C, out, squares, isa, parallel); });
}

}  // namespace fastagg::cpu
