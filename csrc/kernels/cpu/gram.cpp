// SPDX-License-Identifier: Apache-2.0
// The tiling, from the outside in (docs/kernels.md has a figure; csrc/README.md defines the terms):
//
//   The d columns are cut into chunks, and chunks into blocks of up to kMaxBlock columns. The S
//   rows are cut into strips of R rows. A task is one chunk, of all strips or of one group of
//   strips.
//
//   In each block, strip I has one tile for every C rows before it, R x C dot products held in
//   registers, and the diagonal tile of its own rows. With few rows, tiles read the rows where they
//   are. With more rows, the diagonal tile reads its rows where they are and also packs them into a
//   contiguous panel; the other tiles read panels, which stay in the L2 cache. Every tile
//   prefetches a part of the next block's rows, and the last tiles of a strip prefetch what the
//   next strip reads first.
//
//   Rows that are computed (RowSource) are written to a stage of one block, and read from there.
//
//   At the end of the block, a tile adds up the lanes of its accumulators and adds the results to
//   float64 partial sums. Blocks and chunks depend on d alone, and the partial sums of chunks are
//   added in ascending order, so an entry of the result depends on its two rows alone.
#include <cmath>
#include <deque>
#include <vector>

#include "../abs_max.h"
#include "../gram.h"
#include "cache.h"
#include "gram_columns.h"
#include "gram_memory.h"
#include "gram_tiles.h"
#include "ordered_sum.h"
#include "pair_order.h"
#include "scratch.h"
#include "simd.h"
#include "tile_map.h"
#include "weighted_sum_block.h"

namespace fastagg::cpu {
namespace {

// If a strip is multiplied with at most this many rows, on average, rows are read in place: packing
// them would cost more than it saves.
constexpr int64_t kInPlaceRows = 20;
// The same if packing would only copy: panels have one row after another, and vectors of the rows
// are aligned. (Others lie across two cache lines, which is slower if they are read often.)
constexpr int64_t kAlignedInPlaceRows = 64;
// Rows of a group of strips, at most. More rows are split over several tasks, although each of
// these packs the rows before its own group again.
constexpr int64_t kGroupRows = 2040;

// ---- one task: a group of strips, one chunk ----------------------------------------------------

// A weighted sum of the rows, computed in the same pass.
struct RowSum {
  const ScaledWeights& weights;  // [S]
  float* out;                    // [d]
};

struct Problem {
  const float* const* rows;  // [S], or nullptr if there is a source
  const RowSource* source;   // or nullptr
  const float* scales;       // [S]
  const TileMap& tiles;
  int64_t S, d;
  int64_t block;  // columns summed in float32
  int64_t super;  // strips of a super-strip
  bool pack;      // pack rows into panels; else read them in place
  Isa isa;
  const RowSum* also;  // or nullptr
};

// Where a worker keeps the rows of one block, if they come from a source.
struct Stage {
  // Not a multiple of 4 KB, so that rows do not compete for the same sets of the L1 cache.
  static constexpr int64_t kStride = kMaxBlock + 16;
  float* memory;                   // [S, kStride]
  std::vector<const float*> rows;  // [S]

  Stage(float* memory, int64_t S) : memory(memory) {
    for (int64_t s = 0; s < S; ++s) rows.push_back(memory + s * kStride);
  }
};

// Distributes the rows of the next block evenly over the tiles of this block, for prefetching. Each
// tile adds `count` credits, and each row costs `tiles` credits. A tile without enough credit
// prefetches `idle`, which is in cache.
struct Ahead {
  const float* const* rows;
  int64_t column;  // of the next block
  int64_t count;   // rows to prefetch; 0 at the end of d
  int64_t tiles;
  const float* idle;
  int64_t row = 0, credit = 0;

  FASTAGG_INLINE const float* take() {
    if (credit < tiles) return idle;
    credit -= tiles;
    return rows[row++] + column;
  }
};

// Adds the tiles of strips [first, last), over one block, to sums[number of the tile][slot].
template <int W, bool pack>
struct Block {
  using T = Shape<W>;
  static constexpr int R = T::R, C = T::C;

  const Problem& p;
  const float* const* rows;  // [S] of which columns [at, at + columns) are read
  int64_t at;
  int64_t first, last, columns;
  float* panels;  // [last, kPanel] scratch
  double* sums;
  Ahead ahead;

  // Super-strips: the panels of one stay in the L2 cache while all later strips are multiplied with
  // it.
  FASTAGG_INLINE void run() {
    for (int64_t super = 0; super < last; super += p.super)
      for (int64_t I = super == 0 ? 0 : std::max(first, super); I < last; ++I)
        strip_of<R>(std::min<int64_t>(R, p.S - I * R), I, super, std::min(super + p.super, I));
  }

  template <int n>  // the number of rows as a constant; only the last strip has fewer than R
  FASTAGG_INLINE void strip_of(int64_t wanted, int64_t I, int64_t begin, int64_t end) {
    if (n == wanted) return strip<n>(I, begin, end);
    if constexpr (n > 1) strip_of<n - 1>(wanted, I, begin, end);
  }

  // The tiles of strip I with the rows of strips [begin, end), and the diagonal tile if this is the
  // first time that strip I is used in this block.
  template <int n>
  FASTAGG_INLINE void strip(int64_t I, int64_t begin, int64_t end) {
    const int64_t tiles = ceil_div(end * R, C), whole = end * R / C;
    if (begin == 0) {
      double unused[T::kSlots];
      if (I < first) std::fill(unused, unused + T::kSlots, 0.0);
      double* out = I < first ? unused : sums + p.tiles.diagonal(I) * T::kSlots;
      const auto run = [&](auto next) FASTAGG_INLINE_LAMBDA {
        if constexpr (pack)
          call<W, PackingTile<n>>(rows + I * R, at, p.scales + I * R, p.block, columns,
                                  panel_of(I * R), out, next);
        else
          call<W, DiagonalTile<n>>(rows + I * R, at, columns / W, out, next);
      };
      with_prefetch<W>(upcoming(I, begin, tiles), run);
      if (I < first) return;
    }
    const auto tile = [&](int64_t J, auto others) FASTAGG_INLINE_LAMBDA {
      const int64_t number = p.tiles.at(I, J);
      if (number < 0) return;
      double* out = sums + number * T::kSlots;
      const auto run = [&](auto next) FASTAGG_INLINE_LAMBDA {
        if constexpr (pack)
          call<W, PackedTile<n, others>>(panel_of(I * R), panel_of(J * C), p.block,
                                         ceil_div(columns, W), out, next);
        else
          call<W, TileInPlace<n, others>>(rows + I * R, rows + J * C, at, columns / W, out, next);
      };
      with_prefetch<W>(upcoming(I, begin, tiles - 1 - J), run);
    };
    for (int64_t J = begin * R / C; J < whole; ++J) tile(J, std::integral_constant<int, C>());
    if constexpr (R % C != 0)
      unroll<C - 1>([&](auto i) FASTAGG_INLINE_LAMBDA {
        if (end * R - whole * C == i + 1) tile(whole, std::integral_constant<int, i + 1>());
      });
  }

  // The part of the panels that begins at `row`. Panels whose rows are in turn begin at the first
  // row of their strip; other parts of these are as long as a row, and only prefetched.
  FASTAGG_INLINE float* panel_of(int64_t row) const { return panels + row * p.block; }

  // What there is to prefetch for a tile of strip I, if `more` other tiles of the strip follow it:
  // rows of the next block; and, in the last tiles of the strip, what the next strip reads first.
  // That is its rows, or its panel, which may have been evicted to L3 by then.
  FASTAGG_INLINE Upcoming upcoming(int64_t I, int64_t begin, int64_t more) {
    const float* first_of_strip = ahead.idle;
    const int64_t row = (I + 1) * R + more;
    if (T::kPrefetchStrip && more < R && row < p.S && I + 1 < last && columns == p.block)
      first_of_strip = begin == 0 ? rows[row] + at : panel_of(row);
    ahead.credit += ahead.count;
    const float* of_block = ahead.take();
    return {first_of_strip, of_block, ahead.take(), ahead.idle};
  }
};

// Adds the tiles of strips [first, last), over columns [begin, end), to
// sums[number of the tile][slot].
//   after    // the column that this worker probably reads next
//   stage    // of this worker, if there is a source
//   panels   // [last, kPanel] scratch
struct ChunkKernel {
  template <int W>
  FASTAGG_INLINE static void run(const Problem* problem, int64_t first, int64_t last, int64_t begin,
                                 int64_t end, int64_t after, const Stage* stage, float* panels,
                                 double* sums) {
    const Problem& p = *problem;
    const RowSum* also = last * Shape<W>::R >= p.S ? p.also : nullptr;  // only the last group
    // Of each strip before the first one, the diagonal tile, which packs it.
    const int64_t tiles = first + p.tiles.before(last) - p.tiles.before(first);
    for (int64_t column = begin; column < end; column += p.block) {
      const int64_t columns = std::min(p.block, end - column);
      const int64_t used = std::min(p.S, last * Shape<W>::R);
      const float *const *rows = p.rows, *const *next = p.rows;
      int64_t at = column;
      const int64_t later = column + p.block < end ? column + p.block : after;
      const bool more = later + p.block <= p.d;
      if (p.source) {
        p.source->read(0, used, column, columns, stage->memory, Stage::kStride);
        rows = stage->rows.data();
        at = 0;
        next = more ? p.source->ahead(later, p.block) : nullptr;
      }
      const Ahead ahead{next, later, more && next ? used : 0, tiles, panels};
      if (p.pack || columns < p.block)
        Block<W, true>{p, rows, at, first, last, columns, panels, sums, ahead}.run();
      else
        Block<W, false>{p, rows, at, first, last, columns, panels, sums, ahead}.run();
      if (also)
        weighted_sum_block(p.isa, also->out + (column - at), rows, p.S, also->weights, 0.0, at,
                           columns);
    }
  }
};

// ---- all tasks ---------------------------------------------------------------------------------

// Writes the sums of all tiles as a symmetric matrix, with zeros for pairs that are not wanted.
template <int W>
void unpack(const double* sums, const TileMap& tiles, const uint8_t* pairs, int64_t S,
            double* out) {
  constexpr int R = Shape<W>::R, C = Shape<W>::C;
  // The slot of a sum depends on its number in the tile, not on how many there are.
  constexpr auto slots = Shape<W>::template OffSums<R, C>::slots();
  static_assert(R * (R + 1) / 2 <= R * C);
  const auto write = [&](int64_t i, int64_t j, int64_t tile, int64_t n) {
    const bool wanted = tile >= 0 && (!pairs || i == j || pairs[i * S + j]);
    out[i * S + j] = out[j * S + i] = wanted ? sums[tile * Shape<W>::kSlots + slots[n]] : 0.0;
  };
  for (int64_t i = 0; i < S; ++i) {
    const int64_t I = i / R, begin = I * R, a = i - begin;
    for (int64_t j = 0; j < begin; ++j) {
      const int64_t J = j / C, others = std::min<int64_t>(C, begin - J * C);
      write(i, j, tiles.at(I, J), a * others + j - J * C);
    }
    for (int64_t j = begin; j <= i; ++j)
      write(i, j, tiles.diagonal(I), a * (a + 1) / 2 + j - begin);
  }
}

// Whether one block of all rows would compete for the same sets of an L1 cache (64 sets of 64-byte
// lines, 8 to 12 ways), as it does if rows are a multiple of 4 KB apart.
bool crowd_few_sets(const std::vector<const float*>& rows) {
  constexpr int64_t kSets = 64, kLine = 64, kLines = kMaxBlock * 4 / kLine;
  int64_t occupancy[kSets] = {};
  for (const float* row : rows)
    for (int64_t k = 0; k < kLines; ++k)
      ++occupancy[(reinterpret_cast<std::uintptr_t>(row) / kLine + k) % kSets];
  const int64_t average = static_cast<int64_t>(rows.size()) * kLines / kSets;
  return *std::max_element(occupancy, occupancy + kSets) > std::max<int64_t>(12, average * 3 / 2);
}

// The rows of a call: in memory, or from a source.
struct Input {
  std::vector<const float*> rows;  // [S], or empty
  const RowSource* source;         // or nullptr
};

template <int W>
void gram_tiled(const Input& input, const std::vector<float>& scales, int64_t d,
                const uint8_t* pairs, double* out, const RowSum* also, Isa isa,
                const Parallel& parallel) {
  using T = Shape<W>;
  const auto S = static_cast<int64_t>(scales.size());
  const TileMap map(S, T::R, T::C, pairs);
  const int64_t strips = map.strips(), tiles = map.count();
  const GramColumns cut(d);
  const bool scaled = std::any_of(scales.begin(), scales.end(), [](float x) { return x != 1.0f; });
  const bool aligned = std::all_of(input.rows.begin(), input.rows.end(), [](const float* row) {
    return reinterpret_cast<std::uintptr_t>(row) % (W * sizeof(float)) == 0;
  });
  const int64_t few = T::R != T::C && aligned ? kAlignedInPlaceRows : kInPlaceRows;
  const bool pack = scaled || tiles * T::C > strips * few || crowd_few_sets(input.rows);
  // The panels of a super-strip take 3/8 of the L2 cache. The rest is for rows of the next block
  // and for the sums of tiles. Larger shares of 512 KB were slower at 512 and 1024 rows.
  // Tiles do not cross its end.
  constexpr int64_t kStep = T::R % T::C ? T::C : 1;
  const int64_t super = std::max<int64_t>(1, l2_bytes() * 3 / 8 / (T::kPanel * 4 * kStep)) * kStep;
  const Problem problem{input.rows.data(), input.source, scales.data(), map, S,   d,
                        cut.block,         super,        pack,          isa, also};

  const Parallel team = gram_threads<W>(parallel, S, tiles, d);
  const GramMemory<W> memory(tiles, strips, cut.chunks, team.workers);
  const int64_t slots = memory.slots, window = memory.window;
  // If fewer chunks are in flight than workers need, the strips are split as well.
  const int64_t wanted = ceil_div(2 * team.workers, window);
  const int64_t group = std::min(ceil_div(kGroupRows, T::R), ceil_div(strips, wanted));
  const int64_t groups = ceil_div(strips, group);

  const Scratch sums_memory(slots * 8), partial_memory(window * slots * 8);
  const Scratch panel_memory(memory.panels * 4);
  const int64_t staged = input.source ? S * Stage::kStride : 0;  // floats of a worker
  const Scratch stage_memory(team.workers * staged * 4);
  std::vector<Stage> stages;
  for (int64_t w = 0; w < team.workers && input.source; ++w)
    stages.emplace_back(stage_memory.as<float>() + w * staged, S);
  auto* sums = sums_memory.as<double>();
  std::deque<OrderedSum> totals;  // one for each group of strips
  for (int64_t g = 0; g < groups; ++g)
    totals.emplace_back(sums, map.before(g * group) * T::kSlots,
                        map.before(std::min(strips, (g + 1) * group)) * T::kSlots,
                        partial_memory.as<double>(), slots, window);
  team.for_each(cut.chunks * groups, [&](int64_t task, int worker) {
    const int64_t c = task / groups,
                  g = groups - 1 - task % groups;  // the group with most tiles first
    double* partial = totals[g].start(c);
    dispatch<ChunkKernel>(isa, &problem, g * group, std::min(strips, (g + 1) * group),
                          c * cut.chunk, std::min(d, (c + 1) * cut.chunk),
                          (task + team.workers) / groups * cut.chunk,
                          input.source ? &stages[worker] : nullptr,
                          panel_memory.as<float>() + worker * strips * T::kPanel, partial);
    totals[g].finish(c);
  });
  unpack<W>(sums, map, pairs, S, out);
}

void gram_scaled(const Input& input, const std::vector<float>& scales, int64_t d,
                 const uint8_t* pairs, double* out, const RowSum* also, const Parallel& parallel) {
  const Isa isa = current_isa();
  with_lanes(isa,
             [&](auto W) { gram_tiled<W>(input, scales, d, pairs, out, also, isa, parallel); });
}

// The power of two that scales a row's largest magnitude into [1, 2); 1 if no scale helps.
float power_of_two_scale(float largest) {
  if (!std::isfinite(largest) || largest == 0.0f) return 1.0f;
  return std::ldexp(1.0f, std::clamp(-std::ilogb(largest), -126, 126));
}

// abs_max of some rows of a source.
void source_peaks(const RowSource& source, const std::vector<std::size_t>& chosen, int64_t d,
                  float* peaks, const Parallel& parallel) {
  const Scratch memory(parallel.workers * kMaxBlock * 4);
  const auto count = static_cast<int64_t>(chosen.size());
  parallel.for_each(count, [&](int64_t task, int worker) {
    float* row = memory.as<float>() + worker * kMaxBlock;
    const auto s = static_cast<int64_t>(chosen[task]);
    peaks[task] = 0.0f;
    for (int64_t column = 0; column < d && std::isfinite(peaks[task]); column += kMaxBlock) {
      const int64_t n = std::min(kMaxBlock, d - column);
      source.read(s, s + 1, column, n, row, kMaxBlock);
      for (int64_t k = 0; k < n; ++k) {
        const float x = std::fabs(row[k]);
        if (!(x <= peaks[task])) peaks[task] = x;  // or NaN
        if (!std::isfinite(x)) break;
      }
    }
  });
}

// Squares of elements overflow float32 from about 1e19 and lose bits below about 1e-19. Returns the
// scales of all rows if that may have happened in some row and scaling helps; else returns nothing.
// (Rows with a NaN, or with zeros only, are examined too.)
//   squares   // the squared norm of row i, at i * stride
std::vector<float> scales_for(const Input& input, int64_t S, int64_t d, const double* squares,
                              int64_t stride, const Parallel& parallel) {
  const double tiny = 1e-34 * static_cast<double>(d);
  std::vector<std::size_t> suspects;
  for (int64_t i = 0; i < S; ++i)
    if (!(squares[i * stride] >= tiny && std::isfinite(squares[i * stride]))) suspects.push_back(i);
  if (suspects.empty()) return {};
  std::vector<float> largest(suspects.size()), scales(S, 1.0f);
  if (input.source) {
    source_peaks(*input.source, suspects, d, largest.data(), parallel);
  } else {
    std::vector<const float*> rows;
    for (const std::size_t i : suspects) rows.push_back(input.rows[i]);
    abs_max(rows.data(), static_cast<int64_t>(rows.size()), d, largest.data(), parallel);
  }
  for (std::size_t k = 0; k < suspects.size(); ++k)
    scales[suspects[k]] = power_of_two_scale(largest[k]);
  const bool any = std::any_of(scales.begin(), scales.end(), [](float x) { return x != 1.0f; });
  return any ? scales : std::vector<float>();
}

// gram without reordering: neighbours in `rows` share tiles. Only the lower triangle of `pairs` is
// read.
void gram_in_order(const Input& input, int64_t S, int64_t d, const uint8_t* pairs, double* result,
                   const RowSum* also, const Parallel& parallel) {
  gram_scaled(input, std::vector<float>(S, 1.0f), d, pairs, result, also, parallel);
  const std::vector<float> scales = scales_for(input, S, d, result, S + 1, parallel);
  if (scales.empty()) return;
  gram_scaled(input, scales, d, pairs, result, nullptr, parallel);
  for (int64_t i = 0; i < S; ++i)
    for (int64_t j = 0; j < S; ++j)
      result[i * S + j] /= static_cast<double>(scales[i]) * static_cast<double>(scales[j]);
}

void gram_of(const float* const* rows, int64_t S, int64_t d, const uint8_t* pairs, double* out,
             const RowSum* also, const Parallel& parallel) {
  if (S == 0) return;
  Input ordered{{rows, rows + S}, nullptr};
  // Reorder the rows so that rows that share pairs are neighbours: then fewer tiles are needed.
  const std::vector<int64_t> order = pairs ? component_order(pairs, S) : std::vector<int64_t>();
  if (std::is_sorted(order.begin(), order.end()))
    return gram_in_order(ordered, S, d, pairs, out, also, parallel);
  for (int64_t i = 0; i < S; ++i) ordered.rows[i] = rows[order[i]];
  std::vector<uint8_t> flags(S * S);
  for (int64_t i = 0; i < S; ++i)
    for (int64_t j = 0; j < S; ++j) flags[i * S + j] = pairs[order[i] * S + order[j]];
  const Scratch memory(S * S * int64_t{sizeof(double)});
  auto* result = memory.as<double>();
  gram_in_order(ordered, S, d, flags.data(), result, also, parallel);
  for (int64_t i = 0; i < S; ++i)
    for (int64_t j = 0; j < S; ++j) out[order[i] * S + order[j]] = result[i * S + j];
}

}  // namespace

void gram(const float* const* rows, int64_t S, int64_t d, const uint8_t* pairs, double* out,
          const Parallel& parallel) {
  gram_of(rows, S, d, pairs, out, nullptr, parallel);
}

void gram_rows(const float* const* rows, int64_t S, int64_t d, const int64_t* changed, int64_t C,
               double* out, const Parallel& parallel) {
  if (C == 0) return;
  const Input all{{rows, rows + S}, nullptr};
  std::vector<double> squares(S);
  if (gram_rows_streamed(rows, S, d, changed, C, out, squares.data(), parallel) &&
      scales_for(all, S, d, squares.data(), 1, parallel).empty())
    return;
  // The changed rows are placed last, in separate strips. The last strip may be short, and then has
  // fewer products with each of the others. A repeated row fills the strip before them.
  const int64_t R = with_lanes(current_isa(), [](auto W) { return Shape<W>::R; });
  const int64_t kept = S - C, filled = ceil_div(kept, R) * R, n = filled + C;
  std::vector<int64_t> place(S, -1);  // of row s in `ordered`
  for (int64_t c = 0; c < C; ++c) place[changed[c]] = filled + c;
  Input ordered{std::vector<const float*>(n, rows[changed[0]]), nullptr};
  int64_t next = 0;
  for (int64_t s = 0; s < S; ++s) {
    if (place[s] < 0) place[s] = next++;
    ordered.rows[place[s]] = rows[s];
  }
  std::vector<uint8_t> pairs(n * n, 0);
  std::fill_n(pairs.begin() + filled * n, C * n, 1);
  const Scratch memory(n * n * int64_t{sizeof(double)});
  auto* result = memory.as<double>();
  gram_in_order(ordered, n, d, pairs.data(), result, nullptr, parallel);
  for (int64_t c = 0; c < C; ++c)
    for (int64_t s = 0; s < S; ++s) out[c * S + s] = result[(filled + c) * n + place[s]];
}

void gram_and_sum(const float* const* rows, int64_t S, int64_t d, const double* weights,
                  double* out, float* sum, const Parallel& parallel) {
  const ScaledWeights scaled(weights, S);
  const RowSum also{scaled, sum};
  if (S == 0) std::fill_n(sum, d, 0.0f);
  gram_of(rows, S, d, nullptr, out, &also, parallel);
}

void gram_and_sum(const RowSource& rows, int64_t S, int64_t d, const double* weights, double* out,
                  float* sum, const Parallel& parallel) {
  const ScaledWeights scaled(weights, S);
  const RowSum also{scaled, sum};
  if (S == 0) return std::fill(sum, sum + d, 0.0f);
  gram_in_order(Input{{}, &rows}, S, d, nullptr, out, &also, parallel);
}

}  // namespace fastagg::cpu
