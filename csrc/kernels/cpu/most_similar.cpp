// SPDX-License-Identifier: Apache-2.0
#include "../most_similar.h"

#include <cmath>
#include <cstring>

#include "scratch.h"
#include "simd.h"

namespace fastagg::cpu {
namespace {

// A tile is kTileQueries queries by 2 W rows: one vector for each query and half, which stay in
// registers, two vectors of rows, and a broadcast number.
template <int W>
constexpr int kTileQueries = kRegisters<W> == 32 ? 12 : 6;
constexpr int kMostLanes = 32;  // 2 W of the widest instruction set

// The queries of one task, as float32: 240 KB at k = 256, and less than 512 KB of an L2 cache. The
// more queries share a panel, the less its conversion costs. A multiple of every tile.
constexpr int64_t kTaskQueries = 240;
constexpr int64_t kTaskNumbers = kTaskQueries * 256;

int64_t task_queries(int64_t k) {
  return std::clamp<int64_t>(kTaskNumbers / k / 12 * 12, 12, kTaskQueries);
}

// The memory of one worker.
struct Panels {
  float* queries;  // [tiles, k, queries of a tile]
  float* rows;     // [k, 2 W]: one panel
  float* best;     // [queries, 2 W], the largest numbers so far
  int32_t* found;  // [queries, 2 W], the panels where they are

  static int64_t bytes(int64_t k) {
    const int64_t n = task_queries(k);
    return 4 * (n * k + k * kMostLanes + 2 * n * kMostLanes);
  }
  Panels(float* memory, int64_t k) {
    const int64_t n = task_queries(k);
    queries = memory;
    rows = queries + n * k;
    best = rows + k * kMostLanes;
    found = reinterpret_cast<int32_t*>(best + n * kMostLanes);
  }
};

FASTAGG_INLINE int64_t id_of(const int64_t* ids, int64_t i) {
  return ids ? ids[i] : i;
}

// out[p, lane] = number p of the vector of this lane, as float32. Lanes from `used` on repeat the
// last vector. Four numbers of a lane are loaded together.
template <int kLanes>
FASTAGG_INLINE void interleave(const int8_t* vectors, const int64_t* ids, int64_t begin,
                               int64_t used, int64_t k, float* out) {
  const int8_t* from[kLanes];
  for (int lane = 0; lane < kLanes; ++lane)
    from[lane] = vectors + id_of(ids, begin + std::min<int64_t>(lane, used - 1)) * k;
  int64_t p = 0;
  for (; p + 4 <= k; p += 4) {
    uint32_t words[kLanes];
    for (int lane = 0; lane < kLanes; ++lane) std::memcpy(&words[lane], from[lane] + p, 4);
    for (int byte = 0; byte < 4; ++byte)
      for (int lane = 0; lane < kLanes; ++lane) {
        const auto top = static_cast<int32_t>(words[lane] << (24 - 8 * byte));
        out[(p + byte) * kLanes + lane] = static_cast<float>(top >> 24);
      }
  }
  for (; p < k; ++p)
    for (int lane = 0; lane < kLanes; ++lane) out[p * kLanes + lane] = from[lane][p];
}

// Compares the queries of one tile with the rows of panel number `panel`.
template <int W>
FASTAGG_INLINE void compare_tile(const float* queries, const float* rows, const float* factors,
                                 int64_t k, int32_t panel, float* best, int32_t* found) {
  constexpr int kQueries = kTileQueries<W>;
  Vec<float, W> low[kQueries] = {}, high[kQueries] = {};
  for (int64_t p = 0; p < k; ++p) {
    const auto left = load<W>(rows + p * 2 * W), right = load<W>(rows + p * 2 * W + W);
    unroll<kQueries>([&](auto q) {
      const float number = queries[p * kQueries + q];
      low[q] += number * left;
      high[q] += number * right;
    });
  }
  const auto keep = [&](const Vec<float, W>& sum, int64_t at, int64_t half) {
    const Vec<float, W> value = sum * load<W>(factors + half);
    const auto largest = load<W>(best + at);
    const auto larger = value > largest;  // never for NaN, the factor of lanes without a row
    store<W>(best + at, larger ? value : largest);
    store<W>(found + at, larger ? Vec<int32_t, W>{} + panel : load<W>(found + at));
  };
  unroll<kQueries>([&](auto q) {
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
    const int64_t tiles = ceil_div(end - begin, kQueries);
    for (int64_t t = 0; t < tiles; ++t) {
      const int64_t at = begin + t * kQueries;
      interleave<kQueries>(queries, query_ids, at, std::min(kQueries, end - at), k,
                           panels->queries + t * kQueries * k);
    }
    std::fill_n(panels->best, tiles * kQueries * kLanes, -INFINITY);
    for (int64_t row = first; row < last; row += kLanes) {
      const int64_t used = std::min<int64_t>(kLanes, last - row);
      interleave<kLanes>(rows, row_ids, row, used, k, panels->rows);
      float scale[kLanes];
      for (int64_t lane = 0; lane < kLanes; ++lane)
        scale[lane] = lane < used ? factors[id_of(row_ids, row + lane)] : NAN;
      const auto panel = static_cast<int32_t>((row - first) / kLanes);
      for (int64_t t = 0; t < tiles; ++t)
        compare_tile<W>(panels->queries + t * kQueries * k, panels->rows, scale, k, panel,
                        panels->best + t * kQueries * kLanes,
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
  const Isa isa = current_isa();
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
    const Panels panels(reinterpret_cast<float*>(scratch.as<char>() + worker * bytes), k);
    dispatch<MostSimilar>(isa, queries, query_ids, begin, std::min(begin + size, split[2]), rows,
                          factors, row_ids, split[1], split[3], k, best, similarity, &panels);
  });
}

}  // namespace fastagg::cpu
