// SPDX-License-Identifier: Apache-2.0
#include "../most_similar.h"

#include <cmath>
#include <cstring>

#include "int8_products.h"
#include "scratch.h"
#include "simd.h"

namespace fastagg::cpu {
namespace {

// A tile is kTileQueries queries by 2 W rows: one vector for each query and half, which stay in
// registers, two vectors of rows, and a broadcast word.
template <int W>
constexpr int kTileQueries = kRegisters<W> == 32 ? 12 : 6;
constexpr int kMostLanes = 32;  // 2 W of the widest instruction set

// The queries of one task: at most 240 KB at k = 256, and less than 512 KB of an L2 cache. The more
// queries share a panel, the less its conversion costs. A multiple of every tile.
constexpr int64_t kTaskQueries = 240;
constexpr int64_t kTaskNumbers = kTaskQueries * 256;

int64_t task_queries(int64_t k) {
  return std::clamp<int64_t>(kTaskNumbers / k / 12 * 12, 12, kTaskQueries);
}

// The memory of one worker, for vectors of at most k words.
struct Panels {
  uint32_t* queries;  // [tiles, words, queries of a tile]
  uint32_t* rows;     // [words, 2 W]: one panel
  float* best;        // [queries, 2 W], the largest numbers so far
  int32_t* found;     // [queries, 2 W], the panels where they are
  int32_t* begin;     // [queries]: what their sums begin with

  static int64_t bytes(int64_t k) {
    const int64_t n = task_queries(k);
    const int64_t words = n * k + k * kMostLanes + 2 * n * kMostLanes + n;
    return ceil_div(words, 16) * 64;  // whole cache lines
  }
  Panels(char* memory, int64_t k) {
    const int64_t n = task_queries(k);
    queries = reinterpret_cast<uint32_t*>(memory);
    rows = queries + n * k;
    best = reinterpret_cast<float*>(rows + k * kMostLanes);
    found = reinterpret_cast<int32_t*>(best + n * kMostLanes);
    begin = found + n * kMostLanes;
  }
};

FASTAGG_INLINE int64_t id_of(const int64_t* ids, int64_t i) {
  return ids ? ids[i] : i;
}

// from[lane] = the vector of this lane. Lanes from `used` on repeat the last one.
template <int kLanes>
FASTAGG_INLINE void vectors_of(const int8_t* vectors, const int64_t* ids, int64_t begin,
                               int64_t used, int64_t k, const int8_t* (&from)[kLanes]) {
  for (int lane = 0; lane < kLanes; ++lane)
    from[lane] = vectors + id_of(ids, begin + std::min<int64_t>(lane, used - 1)) * k;
}

// out[i, lane] = word i of from[lane]. Four numbers of a lane are loaded together; after the last
// number come zeros.
template <int W, Side kSide, int kLanes>
FASTAGG_INLINE void interleave(const int8_t* const (&from)[kLanes], int64_t k, uint32_t* out) {
  constexpr int kNumbers = kWordNumbers<W>;
  int64_t p = 0;
  for (; p + 4 <= k; p += 4) {
    uint32_t four[kLanes];
    for (int lane = 0; lane < kLanes; ++lane) std::memcpy(&four[lane], from[lane] + p, 4);
    unroll<4 / kNumbers>([&](auto word) FASTAGG_INLINE_LAMBDA {
      uint32_t* const to = out + (p / kNumbers + word) * kLanes;
      for (int lane = 0; lane < kLanes; ++lane)
        to[lane] = word_of<W, kSide>(four[lane], word * kNumbers);
    });
  }
  if (p == k) return;
  for (int lane = 0; lane < kLanes; ++lane) {
    uint32_t four = 0;
    std::memcpy(&four, from[lane] + p, static_cast<std::size_t>(k - p));
    for (int64_t word = p / kNumbers; word < words_of<W>(k); ++word)
      out[word * kLanes + lane] = word_of<W, kSide>(four, static_cast<int>(word * kNumbers - p));
  }
}

// Compares the queries of one tile with the rows of panel number `panel`.
template <int W>
FASTAGG_INLINE void compare_tile(const uint32_t* queries, const int32_t* begin,
                                 const uint32_t* rows, const float* factors, int64_t words,
                                 int32_t panel, float* best, int32_t* found) {
  constexpr int kQueries = kTileQueries<W>;
  ProductSums<W> low[kQueries], high[kQueries];
  unroll<kQueries>([&](auto q)
                       FASTAGG_INLINE_LAMBDA { low[q] = high[q] = sums_from<W>(begin[q]); });
  for (int64_t i = 0; i < words; ++i) {
    const auto left = load<W>(rows + i * 2 * W), right = load<W>(rows + i * 2 * W + W);
    unroll<kQueries>([&](auto q) FASTAGG_INLINE_LAMBDA {
      const uint32_t word = queries[i * kQueries + q];
      add_products<W>(low[q], left, word);
      add_products<W>(high[q], right, word);
    });
  }
  const auto keep = [&](const ProductSums<W>& sum, int64_t at, int64_t half) FASTAGG_INLINE_LAMBDA {
    const auto value = __builtin_convertvector(sum, Vec<float, W>) * load<W>(factors + half);
    const auto largest = load<W>(best + at);
    const auto larger = value > largest;  // never for NaN, the factor of lanes without a row
    store<W>(best + at, larger ? value : largest);
    store<W>(found + at, larger ? Vec<int32_t, W>{} + panel : load<W>(found + at));
  };
  unroll<kQueries>([&](auto q) FASTAGG_INLINE_LAMBDA {
    keep(low[q], q * 2 * W, 0);
    keep(high[q], q * 2 * W + W, W);
  });
}

// One task: some queries of a group, and all rows of that group.
struct MostSimilar {
  template <int W>
  FASTAGG_INLINE static void run(const int8_t* queries, const int64_t* query_ids, int64_t begin,
                                 int64_t end, const int8_t* rows, const float* factors,
                                 const int64_t* row_ids, int64_t first, int64_t last, int64_t k,
                                 int64_t* best, float* similarity, const Panels* panels) {
    constexpr int kLanes = 2 * W;
    constexpr int64_t kQueries = kTileQueries<W>;
    const int64_t tiles = ceil_div(end - begin, kQueries), words = words_of<W>(k);
    for (int64_t t = 0; t < tiles; ++t) {
      const int64_t at = begin + t * kQueries;
      const int8_t* from[kQueries];
      vectors_of(queries, query_ids, at, std::min(kQueries, end - at), k, from);
      interleave<W, Side::kQuery>(from, k, panels->queries + t * kQueries * words);
      for (int64_t q = 0; q < kQueries; ++q)
        panels->begin[t * kQueries + q] = first_sum<W>(from[q], k);
    }
    std::fill_n(panels->best, tiles * kQueries * kLanes, -INFINITY);
    for (int64_t row = first; row < last; row += kLanes) {
      const int64_t used = std::min<int64_t>(kLanes, last - row);
      const int8_t* from[kLanes];
      vectors_of(rows, row_ids, row, used, k, from);
      interleave<W, Side::kRow>(from, k, panels->rows);
      float scale[kLanes];
      for (int64_t lane = 0; lane < kLanes; ++lane)
        scale[lane] = lane < used ? factors[id_of(row_ids, row + lane)] : NAN;
      const auto panel = static_cast<int32_t>((row - first) / kLanes);
      for (int64_t t = 0; t < tiles; ++t)
        compare_tile<W>(panels->queries + t * kQueries * words, panels->begin + t * kQueries,
                        panels->rows, scale, words, panel, panels->best + t * kQueries * kLanes,
                        panels->found + t * kQueries * kLanes);
    }
    for (int64_t i = 0; i < end - begin; ++i) {
      float largest = -INFINITY;
      int64_t position = -1;
      for (int lane = 0; lane < kLanes; ++lane) {
        const float value = panels->best[i * kLanes + lane];
        if (value == -INFINITY) continue;
        const int64_t where = first + panels->found[i * kLanes + lane] * int64_t{kLanes} + lane;
        if (value > largest || (value == largest && where < position)) {
          largest = value;
          position = where;
        }
      }
      if (position < 0 && first < last) position = first;  // all products are -infinity
      best[begin + i] = position;
      similarity[begin + i] = largest;
    }
  }
};

}  // namespace

void most_similar(const int8_t* queries, const int64_t* query_ids, const int8_t* rows,
                  const float* factors, const int64_t* row_ids, const int64_t* splits,
                  int64_t groups, int64_t k, int64_t* best, float* similarity,
                  const Parallel& parallel) {
  const Isa isa = isa_of_products(current_isa());
  const int64_t size = task_queries(k);
  const Scratch ends_memory(std::max<int64_t>(groups, 1) * int64_t{sizeof(int64_t)});
  auto* ends = ends_memory.as<int64_t>();  // the first task after each group
  int64_t tasks = 0, products = 0;
  for (int64_t g = 0; g < groups; ++g) {
    const int64_t* split = splits + 2 * g;
    tasks += ceil_div(split[2] - split[0], size);
    products += (split[2] - split[0]) * (split[3] - split[1]) * k;
    ends[g] = tasks;
  }
  if (tasks == 0) return;
  const Parallel team = parallel.for_work(0, products);
  const int64_t bytes = Panels::bytes(k);
  const Scratch scratch(team.workers * bytes);
  team.for_each(tasks, [&](int64_t task, int worker) {
    const int64_t g = std::upper_bound(ends, ends + groups, task) - ends;
    const int64_t* split = splits + 2 * g;
    const int64_t begin = split[0] + (task - (g == 0 ? 0 : ends[g - 1])) * size;
    const Panels panels(scratch.as<char>() + worker * bytes, k);
    dispatch<MostSimilar>(isa, queries, query_ids, begin, std::min(begin + size, split[2]), rows,
                          factors, row_ids, split[1], split[3], k, best, similarity, &panels);
  });
}

}  // namespace fastagg::cpu
