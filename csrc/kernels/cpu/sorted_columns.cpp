// SPDX-License-Identifier: Apache-2.0
#include "../sorted_columns.h"

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "row_blocks.h"
#include "scratch.h"
#include "sort_tile.h"

namespace fastagg::cpu {
namespace {

// Columns of a block, at most, and the bytes of their keys: half of an L2 cache, whose other half
// is for the rows of the next block.
constexpr int64_t kMostColumns = 1024, kBlockBytes = 256 << 10;
constexpr int64_t kColumnStep = 16;  // the lanes of the widest vectors
constexpr int64_t kTaskBlocks = 8;   // of a task, at most

// Multiply-adds that take as long as a value, 0.3 ns, to decide how many threads are worth waking.
constexpr int64_t kProductsOfValue = 16;

int64_t sorted_columns(int64_t rows, int64_t d, int workers) {
  const int64_t fitting = kBlockBytes / (rows * int64_t{sizeof(int32_t)});
  const int64_t shared = ceil_div(d, int64_t{4} * workers);  // four blocks for each worker
  const int64_t columns = std::min({kMostColumns, fitting, shared});
  return std::max(columns, kColumnStep) / kColumnStep * kColumnStep;
}

// Fetches columns from `column` on, one cache line of each row, into the L2 cache. A row's part of
// a block is too short for hardware prefetchers, and there may be more rows than they follow.
template <class T>
void fetch(const T* const* rows, int64_t S, int64_t column) {
  for (int64_t s = 0; s < S; ++s) __builtin_prefetch(rows[s] + column, 0, 2);
}

// Writes the keys of n columns of all rows into tiles of W columns, in which missing columns are
// zero, and raises *peak to the bits of the largest magnitude.
//   tiles   // [ceil(n / W), size, W]
//   scales  // [S] or nullptr
struct FillTiles {
  template <int W, class T>
  FASTAGG_INLINE static void run(int32_t* tiles, const T* const* rows, int64_t S, int64_t size,
                                 const float* scales, int64_t column, int64_t n, int32_t* peak) {
    using V = Vec<int32_t, W>;
    V largest = {};
    const auto put = [&](const float* x, int32_t* to) FASTAGG_INLINE_LAMBDA {
      V bits;
      std::memcpy(&bits, x, sizeof bits);
      const V magnitude = bits & 0x7fffffff;
      largest = magnitude > largest ? magnitude : largest;
      store<W>(to, sort_keys<W>(bits));
    };
    for (int64_t s = 0; s < S; ++s) {
      const T* const row = rows[s] + column;
      const float scale = scales ? scales[s] : 1.0f;
      int32_t* to = tiles + s * W;
      int64_t k = 0;
      if constexpr (std::is_same_v<T, float>)
        if (scale == 1.0f)
          for (; k + W <= n; k += W, to += size * W) put(row + k, to);
      for (; k + W <= n; k += W, to += size * W) {
        float wide[W];
        for (int w = 0; w < W; ++w) wide[w] = widened(row[k + w]) * scale;
        put(wide, to);
      }
      if (k == n) continue;
      float rest[W] = {};
      for (int64_t w = 0; w < n - k; ++w) rest[w] = widened(row[k + w]) * scale;
      put(rest, to);
    }
    for (int w = 0; w < W; ++w) *peak = std::max(*peak, largest[w]);
    const int64_t past_end = (size - S) * W;
    for (int64_t tile = 0; tile * W < n; ++tile)
      std::fill_n(tiles + (tile * size + S) * W, past_end, kLastKey);
  }
};

// Turns the keys in rows [first, last) of a tile into floats. This is a loop of its own, because
// GCC takes four times as long to convert vectors to double that it does not load.
template <int W>
FASTAGG_INLINE const float* floats_of(int32_t* tile, int64_t first, int64_t last) {
  for (int64_t s = first; s < last; ++s)
    store<W>(tile + s * W, sort_keys<W>(load<W>(tile + s * W)));
  return reinterpret_cast<const float*>(tile);
}

template <int W>
FASTAGG_INLINE Vec<double, W / 2> half_row(const float* x) {
  return __builtin_convertvector(load<W / 2>(x), Vec<double, W / 2>);
}

// out[k] = sum[k] / count for k in [0, n), n <= W.
template <int W>
FASTAGG_INLINE void write_means(float* out, int64_t n, const Vec<double, W / 2>& low,
                                const Vec<double, W / 2>& high, int64_t count) {
  const auto divisor = static_cast<double>(count);
  double sums[W];
  store<W / 2>(sums, low);
  store<W / 2>(sums + W / 2, high);
  float means[W];
  for (int w = 0; w < W; ++w) means[w] = static_cast<float>(sums[w] / divisor);
  std::memcpy(out, means, n * sizeof(float));
}

// The mean of rows [first, last) of a sorted tile.
struct MeanOfRows {
  template <int W>
  FASTAGG_INLINE static void run(float* out, int64_t n, int32_t* tile, int64_t first,
                                 int64_t last) {
    const float* const x = floats_of<W>(tile, first, last);
    Vec<double, W / 2> low = {}, high = {};
    for (int64_t s = first; s < last; ++s) {
      low += half_row<W>(x + s * W);
      high += half_row<W>(x + s * W + W / 2);
    }
    write_means<W>(out, n, low, high, last - first);
  }
};

// The mean of the `keep` values that are nearest to the median, of a sorted tile of S rows. They
// are neighbours: rows [begin, begin + keep), which move up while the value that leaves is further
// below the median than the one that enters is above it.
struct MeanAroundMedian {
  template <int W>
  FASTAGG_INLINE static void run(float* out, int64_t n, int32_t* tile, int64_t S, int64_t keep) {
    using Half = Vec<double, W / 2>;
    using V = Vec<int32_t, W>;
    using U = Vec<uint32_t, W>;
    const float* const x = floats_of<W>(tile, 0, S);
    const float *lower = x + (S - 1) / 2 * W, *upper = x + S / 2 * W;
    const Half middle_low = (half_row<W>(lower) + half_row<W>(upper)) / 2.0;
    const Half middle_high = (half_row<W>(lower + W / 2) + half_row<W>(upper + W / 2)) / 2.0;
    const Half one = Half{} + 1.0, zero = {};
    Half begin_low = {}, begin_high = {};
    for (int64_t s = 0; s + keep < S; ++s) {
      const float *leaving = x + s * W, *entering = x + (s + keep) * W;
      const Half below_low = middle_low - half_row<W>(leaving);
      const Half below_high = middle_high - half_row<W>(leaving + W / 2);
      const Half above_low = half_row<W>(entering) - middle_low;
      const Half above_high = half_row<W>(entering + W / 2) - middle_high;
      begin_low += below_low > above_low ? one : zero;
      begin_high += below_high > above_high ? one : zero;
    }
    double of_lanes[W];
    store<W / 2>(of_lanes, begin_low);
    store<W / 2>(of_lanes + W / 2, begin_high);
    uint32_t begins[W];
    for (int w = 0; w < W; ++w) begins[w] = static_cast<uint32_t>(of_lanes[w]);
    const U begin = load<W>(begins), size = U{} + static_cast<uint32_t>(keep);
    for (int64_t s = 0; s < S; ++s) {                       // other values become zero
      const U position = static_cast<uint32_t>(s) - begin;  // wraps around below `begin`
      store<W>(tile + s * W, position < size ? load<W>(tile + s * W) : V{});
    }
    Half low = {}, high = {};
    for (int64_t s = 0; s < S; ++s) {
      low += half_row<W>(x + s * W);
      high += half_row<W>(x + s * W + W / 2);
    }
    write_means<W>(out, n, low, high, keep);
  }
};

// Sorts all columns, of which rows [first, last) are needed, and calls finish(isa, column, n, tile)
// for each tile of n columns.
template <class T, class Finish>
void for_sorted_tiles(float* peak, const T* const* rows, int64_t S, int64_t d, int64_t first,
                      int64_t last, const float* scales, const Parallel& parallel,
                      const Finish& finish) {
  const Isa isa = current_isa();
  const int64_t lanes = with_lanes(isa, [](auto w) -> int64_t { return w; });
  const int64_t size = tile_rows(S);
  const Parallel team = parallel.for_work(S * d * int64_t{sizeof(T)}, kProductsOfValue * S * d);
  const int64_t columns = sorted_columns(size, d, team.workers);
  const int64_t blocks = std::clamp<int64_t>(d / (4 * team.workers * columns), 1, kTaskBlocks);
  const Scratch scratch(team.workers * (columns * size + 1) * int64_t{sizeof(int32_t)});
  int32_t* const peaks = scratch.as<int32_t>() + team.workers * columns * size;
  std::fill_n(peaks, team.workers, 0);
  for_blocks(d, blocks * columns, team, [&](int64_t task_begin, int64_t task_size, int worker) {
    int32_t* const tiles = scratch.as<int32_t>() + worker * columns * size;
    const int64_t end = task_begin + task_size;
    for (int64_t begin = task_begin; begin < end; begin += columns) {
      const int64_t n = std::min(columns, end - begin);
      dispatch<FillTiles>(isa, tiles, rows, S, size, scales, begin, n, peaks + worker);
      for (int64_t k = 0; k < n; k += lanes) {
        if (begin + columns + k < end) fetch(rows, S, begin + columns + k);
        int32_t* const tile = tiles + k * size;
        dispatch<SortTile>(isa, tile, S, first, last);
        finish(isa, begin + k, std::min(lanes, n - k), tile);
      }
    }
  });
  const int32_t largest = *std::max_element(peaks, peaks + team.workers);
  std::memcpy(peak, &largest, sizeof largest);
}

}  // namespace

template <class T>
void trimmed_mean(float* out, float* peak, const T* const* rows, int64_t S, int64_t d, int64_t trim,
                  const float* scales, const Parallel& parallel) {
  for_sorted_tiles(peak, rows, S, d, trim, S - trim, scales, parallel,
                   [&](Isa isa, int64_t column, int64_t n, int32_t* tile) {
                     dispatch<MeanOfRows>(isa, out + column, n, tile, trim, S - trim);
                   });
}

template <class T>
void meamed(float* out, float* peak, const T* const* rows, int64_t S, int64_t d, int64_t keep,
            const float* scales, const Parallel& parallel) {
  for_sorted_tiles(peak, rows, S, d, 0, S, scales, parallel,
                   [&](Isa isa, int64_t column, int64_t n, int32_t* tile) {
                     dispatch<MeanAroundMedian>(isa, out + column, n, tile, S, keep);
                   });
}

template void trimmed_mean(float*, float*, const float* const*, int64_t, int64_t, int64_t,
                           const float*, const Parallel&);
template void trimmed_mean(float*, float*, const Bfloat16* const*, int64_t, int64_t, int64_t,
                           const float*, const Parallel&);
template void trimmed_mean(float*, float*, const Half* const*, int64_t, int64_t, int64_t,
                           const float*, const Parallel&);
template void meamed(float*, float*, const float* const*, int64_t, int64_t, int64_t, const float*,
                     const Parallel&);
template void meamed(float*, float*, const Bfloat16* const*, int64_t, int64_t, int64_t,
                     const float*, const Parallel&);
template void meamed(float*, float*, const Half* const*, int64_t, int64_t, int64_t, const float*,
                     const Parallel&);

}  // namespace fastagg::cpu
