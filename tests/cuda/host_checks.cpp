// SPDX-License-Identifier: Apache-2.0
// Checks the plain arithmetic of the CUDA kernels on the CPU: which row, column, slot, chunk, and
// which of two candidates. test_host_arithmetic.py compiles and runs this program.
//
// The Gram kernels are emulated lane by lane. They use the index functions of the kernels and a
// tensor core that follows the PTX manual (mma.m16n8k16 and its fragment layouts).
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "gram_layout.h"
#include "pair_math.h"
#include "row_layout.h"
#include "similar_layout.h"
#include "sketch_layout.h"
#include "sort_layout.h"

using namespace fastagg::cuda;

#define EXPECT(condition)                                                   \
  do {                                                                      \
    if (!(condition)) {                                                     \
      std::fprintf(stderr, "line %d: expected %s\n", __LINE__, #condition); \
      std::exit(1);                                                         \
    }                                                                       \
  } while (false)

namespace {

std::mt19937 random_bits(1);

float normal() {
  return std::normal_distribution<float>()(random_bits);
}

// --- triangle, partition, plan

void triangle() {
  int64_t index = 0;
  for (int64_t i = 0; i < 400; ++i)
    for (int64_t j = 0; j <= i; ++j, ++index) {
      EXPECT(triangle_index(i, j) == index);
      EXPECT(triangle_row(index) == i);
    }
  for (int64_t i : {int64_t{1} << 20, (int64_t{1} << 30) - 1}) {
    EXPECT(triangle_row(triangle_index(i, 0)) == i);
    EXPECT(triangle_row(triangle_index(i, i)) == i);
  }
}

void partitions() {
  for (int64_t d : {1LL, 15LL, 512LL, 513LL, 62'006LL, 262'144LL, 262'145LL, 1'000'000LL,
                    123'456'789LL, 1'000'000'000LL, 5'000'000'000LL}) {
    const Partition part = partition(d);
    EXPECT(part.chunk % kBlockColumns == 0);
    EXPECT(part.chunks >= 1 && part.chunks <= kMaxChunks);
    EXPECT((part.chunks - 1) * part.chunk < d && d <= part.chunks * part.chunk);
  }
  EXPECT(partition(0).chunks == 0);
}

void plans() {
  for (int64_t S : {1, 2, 8, 9, 16, 17, 48, 64, 65, 128, 129, 1000, 4096, 10'000})
    for (int64_t d : {1LL, 600LL, 1'000'000LL, 100'000'000LL, 1'000'000'000LL})
      for (int64_t segment : {16LL, 600LL, 1LL << 20, 1LL << 22, 1LL << 40}) {
        if (d / segment > 1 << 20) continue;
        const GramPlan plan = plan_gram(S, d, segment, false);
        EXPECT(plan.few == (S <= 64));
        EXPECT(plan_gram(S, d, segment, true).together == 1);
        EXPECT(plan.wave % kChunkGroup == 0 && plan.wave >= kChunkGroup);
        EXPECT(plan.together == (S < kGroupedRows ? 1 : kChunkGroup));
        EXPECT(plan.slots % 32 == 0);                     // whole warps of the reduction
        EXPECT(!plan.few || plan.wave >= plan.chunks());  // one wave
        EXPECT(plan.wave / kChunkGroup <= kMaxChunks / kChunkGroup);  // its shared memory
        EXPECT(plan.window >= 1 && plan.window <= plan.segments && plan.window <= kMostWindow);
        const int64_t kept = plan.kept() * plan.slots * 8;
        EXPECT(plan.few ? kept <= kSegmentBytes || plan.window == 1
                        : kept <= kPartialBytes || plan.wave == kChunkGroup);
        int64_t columns = 0;
        for (int64_t n = 0; n < plan.segments; ++n) {
          columns += plan.columns_of(n);
          const Partition part = plan.part_of(n), own = partition(plan.columns_of(n));
          EXPECT(part.chunk == own.chunk && part.chunks == own.chunks);
          EXPECT(part.chunks <= plan.chunks());
        }
        EXPECT(columns == d);
        const GramWorkspace at = gram_workspace_of(plan, S);
        EXPECT(at.partials == 0 && at.totals == kept);
        EXPECT(at.totals % 8 == 0 && at.matrices % 8 == 0 && at.suspects % 4 == 0);
        EXPECT(at.peaks % 4 == 0 && at.found % 4 == 0);
        const bool waves = plan.wave < plan.chunks();
        EXPECT(at.matrices - at.totals == (waves ? plan.slots * 8 : 0));
        const int64_t matrices = plan.segments > 1 ? plan.window * S * S * 8 : 0;
        EXPECT(at.suspects - at.matrices == matrices);
        EXPECT(at.peaks - at.suspects == 4 * S * plan.window);
        EXPECT(at.found - at.peaks == 4 * S * plan.window);
        EXPECT(at.needed - at.found == 4 * kFound * plan.window);
        EXPECT(at.bytes - at.needed == plan.tiles);
      }
  // A step of 20 rows and 20 M columns: all segments share their launches.
  EXPECT(plan_gram(20, 20'000'000, 1 << 20, false).window == 20);
  EXPECT(segment_width(1 << 20) == 4 && segment_width(6) == 2 && segment_width(7) == 1);
}

// --- slots: every entry of the lower triangle has exactly one

void slots() {
  for (int groups : {1, 2, 4, 6, 8}) {
    std::map<std::pair<int64_t, int64_t>, int> seen;
    for (int64_t slot = 0; slot < few_slots(groups); ++slot) {
      const Entry e = few_entry(groups, slot);
      EXPECT(e.i >= 0 && e.i < 8 * groups && e.j >= 0 && e.j < 8 * groups);
      ++seen[{e.i, e.j}];
    }
    for (int64_t i = 0; i < 8 * groups; ++i)
      for (int64_t j = 0; j <= i; ++j) EXPECT((seen[{i, j}] == 1));
  }
  for (int64_t S = 1; S <= 8; ++S) {  // each entry of each chunk of a shared row group
    std::map<std::pair<int, int64_t>, int> shared;
    for (int64_t i = 0; i < 8; ++i)
      for (int64_t j = 0; j < 8; ++j) {
        const SharedSlot at = shared_slot(S, {i, j});
        if (at.chunk >= 0) ++shared[{at.chunk, at.slot}];
      }
    for (int chunk = 0; chunk < shared_chunks(S); ++chunk)
      for (int64_t slot = 0; slot < few_slots(1); ++slot) {
        const Entry e = few_entry(1, slot);
        if (e.i < S && e.j <= e.i) EXPECT((shared[{chunk, slot}] == 1));
      }
  }
  std::map<std::pair<int64_t, int64_t>, int> seen;
  for (int64_t slot = 0; slot < 6 * kTileSlots; ++slot) {  // three strips
    const Entry e = many_entry(slot);
    if (e.j <= e.i) ++seen[{e.i, e.j}];
  }
  EXPECT(seen.size() == static_cast<std::size_t>(triangle_index(3 * kTileRows, 0)));
  for (int64_t i = 0; i < 3 * kTileRows; ++i)
    for (int64_t j = 0; j <= i; ++j) EXPECT((seen[{i, j}] == 1));
}

// --- the tensor core

float from_bits(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}
uint32_t to_bits(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}
uint32_t bfloat16(float x) {  // cvt.rn.bf16.f32, of finite numbers
  const uint32_t bits = to_bits(x);
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
// Splits as gram_mma.cuh does with Precision::kHigh: the leading half in the upper bits, the rest
// in the lower.
uint32_t word_of(float x) {
  const uint32_t high = bfloat16(x);
  return high << 16 | bfloat16(x - from_bits(high << 16));
}
float half_of(uint32_t word, int half) {
  return from_bits(half ? word & 0xffff0000u : word << 16);
}

struct Registers {
  uint32_t at[4];
};
struct Sums {
  float at[4];
};

// D = A B + D as the PTX manual says for mma.m16n8k16 with .bf16: group = lane / 4, thread = lane %
// 4; element e of A (two to a register) is in row group (e in {0, 1, 4, 5}) or group + 8, column
// thread * 2 + e % 2, and 8 more from e = 4 on; element e of B in row thread * 2 + e % 2, and 8
// more from e = 2 on, column group; element e of D in row group (e < 2) or group + 8, column thread
// * 2 + e % 2. The sum is truncated to float32, as the hardware truncates.
void mma(std::vector<Sums>& d, const std::vector<Registers>& a, const std::vector<Registers>& b) {
  double A[16][16], B[16][8];
  for (int lane = 0; lane < 32; ++lane) {
    const int group = lane / 4, thread = lane % 4;
    for (int e = 0; e < 8; ++e) {
      const int row = (e < 2 || (4 <= e && e < 6)) ? group : group + 8;
      A[row][thread * 2 + e % 2 + (e >= 4 ? 8 : 0)] = half_of(a[lane].at[e / 2], e % 2);
    }
    for (int e = 0; e < 4; ++e)
      B[thread * 2 + e % 2 + (e >= 2 ? 8 : 0)][group] = half_of(b[lane].at[e / 2], e % 2);
  }
  for (int lane = 0; lane < 32; ++lane)
    for (int e = 0; e < 4; ++e) {
      const int row = lane / 4 + (e < 2 ? 0 : 8), column = lane % 4 * 2 + e % 2;
      double sum = d[lane].at[e];
      for (int k = 0; k < 16; ++k) sum += A[row][k] * B[k][column];
      float rounded = static_cast<float>(sum);
      if (std::fabs(static_cast<double>(rounded)) > std::fabs(sum))
        rounded = std::nextafter(rounded, 0.0f);
      d[lane].at[e] = rounded;
    }
}

using Matrix = std::vector<std::vector<float>>;

Matrix random_rows(int64_t S, int64_t d, bool positive) {
  Matrix rows(S, std::vector<float>(d));
  for (auto& row : rows)
    for (float& x : row) x = positive ? std::fabs(normal()) : normal();
  return rows;
}

// The words of every lane for one row group and one step: what the kernels' lanes load.
std::vector<Registers> load_group(const Matrix& rows, int64_t first_row, int64_t first_column) {
  std::vector<Registers> lanes(32);
  for (int lane = 0; lane < 32; ++lane)
    for (int k = 0; k < 4; ++k) {
      const int64_t s = first_row + lane_row(lane), column = first_column + lane_column(lane) + k;
      const bool there =
          s < static_cast<int64_t>(rows.size()) && column < static_cast<int64_t>(rows[0].size());
      lanes[lane].at[k] = there ? word_of(rows[s][column]) : 0;
    }
  return lanes;
}

// add_step of gram_mma.cuh
void add_step(std::vector<Sums>& sums, const std::vector<Registers>& a0,
              const std::vector<Registers>& a1, const std::vector<Registers>& b_words) {
  std::vector<Sums> chain(32, Sums{});
  for (int half = 0; half < 2; ++half) {
    std::vector<Registers> a(32), b(32), b_swapped(32);
    for (int lane = 0; lane < 32; ++lane) {
      for (int r = 0; r < 4; ++r) a[lane].at[r] = (a_group(r) ? a1 : a0)[lane].at[a_word(half, r)];
      for (int r = 0; r < 2; ++r) {
        b[lane].at[r] = b_words[lane].at[b_word(half, r)];
        b_swapped[lane].at[r] = swapped(b[lane].at[r]);
      }
    }
    mma(chain, a, b);
    mma(chain, a, b_swapped);
  }
  for (int lane = 0; lane < 32; ++lane)
    for (int r = 0; r < 4; ++r) sums[lane].at[r] += chain[lane].at[r];
}

// A warp's share of tiles over one chunk: float32 inside a block of columns, float64 across.
// tiles: (first row of A, first row of B).
std::vector<double> warp_sums(const Matrix& rows, int64_t begin, int64_t end,
                              const std::vector<std::pair<int64_t, int64_t>>& tiles) {
  std::vector<double> wide(tiles.size() * 128, 0.0);
  for (int64_t block = begin; block < end; block += kBlockColumns)
    for (std::size_t t = 0; t < tiles.size(); ++t) {
      std::vector<Sums> sums(32, Sums{});
      for (int64_t column = block; column < std::min<int64_t>(block + kBlockColumns, end);
           column += kStep)
        add_step(sums, load_group(rows, tiles[t].first, column),
                 load_group(rows, tiles[t].first + 8, column),
                 load_group(rows, tiles[t].second, column));
      for (int r = 0; r < 4; ++r)
        for (int lane = 0; lane < 32; ++lane) wide[t * 128 + r * 32 + lane] += sums[lane].at[r];
    }
  return wide;
}

// The sum of partial sums [chunks, slots] in the order of reduce_kernel.
std::vector<double> reduced(const std::vector<std::vector<double>>& partials) {
  std::vector<double> totals(partials[0].size(), 0.0);
  for (std::size_t first = 0; first < partials.size(); first += kChunkGroup)
    for (std::size_t slot = 0; slot < totals.size(); ++slot) {
      double sum = partials[first][slot];
      for (std::size_t c = first + 1; c < std::min(first + kChunkGroup, partials.size()); ++c)
        sum += partials[c][slot];
      totals[slot] += sum;
    }
  return totals;
}

using Gram = std::vector<std::vector<double>>;

// The row group of up to 8 rows that chunks `first`, `first` + 1, ... share.
Matrix shared_group(const Matrix& rows, const Partition& part, int64_t first) {
  const auto S = static_cast<int64_t>(rows.size()), d = static_cast<int64_t>(rows[0].size());
  Matrix group(8, std::vector<float>(part.chunk));
  for (int64_t v = 0; v < 8; ++v) {
    const int64_t begin = (first + v / shared_rows(S)) * part.chunk, s = v % shared_rows(S);
    if (s < S && begin < d)
      std::copy(rows[s].begin() + begin, rows[s].begin() + std::min(begin + part.chunk, d),
                group[v].begin());
  }
  return group;
}

Gram emulated_few(const Matrix& rows) {
  const auto S = static_cast<int64_t>(rows.size()), d = static_cast<int64_t>(rows[0].size());
  const GramPlan plan = plan_gram(S, d, d, false);
  EXPECT(plan.few);
  const int groups = plan.groups;
  std::vector<std::pair<int64_t, int64_t>> tiles(few_tiles(groups));
  for (int a = 0; a < (groups + 1) / 2; ++a)
    for (int b = 0; b <= 2 * a + 1 && b < groups; ++b) tiles[few_tile(a, b)] = {16 * a, 8 * b};
  std::vector<std::vector<double>> partials(plan.part.chunks, std::vector<double>(plan.slots));
  for (int64_t chunk = 0; chunk < plan.part.chunks; chunk += shared_chunks(S)) {
    if (groups > 1) {
      partials[chunk] = warp_sums(rows, chunk * plan.part.chunk,
                                  std::min(d, (chunk + 1) * plan.part.chunk), tiles);
      continue;
    }
    const auto sums = warp_sums(shared_group(rows, plan.part, chunk), 0, plan.part.chunk, tiles);
    for (int r = 0; r < 2; ++r)
      for (int lane = 0; lane < 32; ++lane) {
        const SharedSlot at = shared_slot(S, tile_entry(lane, r));
        if (at.chunk >= 0 && chunk + at.chunk < plan.part.chunks)
          partials[chunk + at.chunk][at.slot] = sums[r * 32 + lane];
      }
  }
  const auto totals = reduced(partials);
  EXPECT(static_cast<int64_t>(totals.size()) == plan.slots);
  Gram gram(S, std::vector<double>(S));
  for (int64_t slot = 0; slot < plan.slots; ++slot) {
    const Entry e = few_entry(groups, slot);
    if (e.i < S && e.j <= e.i) gram[e.i][e.j] = gram[e.j][e.i] = totals[slot];
  }
  return gram;
}

Gram emulated_many(const Matrix& rows) {
  const auto S = static_cast<int64_t>(rows.size()), d = static_cast<int64_t>(rows[0].size());
  const Partition part = partition(d);
  const int64_t strips = ceil_div(S, kTileRows), tiles = triangle_index(strips, 0);
  Gram gram(S, std::vector<double>(S));
  for (int64_t tile = 0; tile < tiles; ++tile) {
    const int64_t I = triangle_row(tile), J = tile - triangle_index(I, 0);
    for (int warp = 0; warp < 8; ++warp) {
      std::vector<std::pair<int64_t, int64_t>> own(I == J ? kDiagonalTiles : 16);
      for (int n = 0; I == J && n < kDiagonalTiles; ++n) {
        const DiagonalTile at = diagonal_tile(warp, n);
        own[n] = {I * kTileRows + 16 * at.a, I * kTileRows + 8 * at.b};
      }
      for (int a = 0; I != J && a < 4; ++a)
        for (int b = 0; b < 4; ++b)
          own[tile_sum(a, b, 0) / 4] = {I * kTileRows + warp_row(warp) + 16 * a,
                                        J * kTileRows + warp_column(warp) + 8 * b};
      std::vector<std::vector<double>> partials;
      for (int64_t chunk = 0; chunk < part.chunks; ++chunk)
        partials.push_back(
            warp_sums(rows, chunk * part.chunk, std::min(d, (chunk + 1) * part.chunk), own));
      const auto totals = reduced(partials);
      for (int sum = 0; sum < static_cast<int>(own.size()) * 4; ++sum)
        for (int lane = 0; lane < 32; ++lane) {
          const int64_t slot = (tile * kTileSums + sum) * kTileThreads + warp * 32 + lane;
          const Entry e = many_entry(slot);
          if (e.i < S && e.j <= e.i) gram[e.i][e.j] = gram[e.j][e.i] = totals[sum * 32 + lane];
        }
    }
  }
  return gram;
}

// Two bfloat16 represent an element with an error of at most 2^-17 (2^-18.7 in the mean), so the
// error of a product of random elements is at most 2^-17. Chains of 4 truncated sums add up to
// 2^-20, a block of 32 chains 2^-19. All errors are relative to the sum of magnitudes.
void expect_right(const Gram& gram, const Matrix& rows) {
  const double bound = std::ldexp(1.0, -17) + std::ldexp(1.0, -20) + std::ldexp(1.0, -19);
  for (std::size_t i = 0; i < rows.size(); ++i)
    for (std::size_t j = 0; j < rows.size(); ++j) {
      double sum = 0.0, magnitude = 0.0;
      for (std::size_t k = 0; k < rows[i].size(); ++k) {
        const double product = static_cast<double>(rows[i][k]) * rows[j][k];
        sum += product;
        magnitude += std::fabs(product);
      }
      EXPECT(std::fabs(gram[i][j] - sum) <= bound * magnitude);
      EXPECT(gram[i][j] == gram[j][i]);
    }
}

void few_rows() {
  const std::vector<std::pair<int64_t, int64_t>> shapes = {
      {1, 1},   {2, 3},    {7, 16},    {16, 17},   {17, 5},    {33, 47},
      {48, 64}, {64, 129}, {5, 2'000}, {1, 5'000}, {3, 1'100}, {2, 4'600}};
  for (const auto& [S, d] : shapes)
    for (bool positive : {false, true}) {
      const Matrix rows = random_rows(S, d, positive);
      expect_right(emulated_few(rows), rows);
    }
}

void more_rows() {
  for (const auto& [S, d] : std::vector<std::pair<int64_t, int64_t>>{{65, 33}, {130, 40}}) {
    const Matrix rows = random_rows(S, d, false);
    expect_right(emulated_many(rows), rows);
  }
}

// Either kernel gives the same bits for the same rows at other positions.
void entries_depend_on_their_rows_alone() {
  const Matrix rows = random_rows(20, 1'100, false);
  Matrix reversed(rows.rbegin(), rows.rend());
  const Gram gram = emulated_few(rows), other = emulated_few(reversed);
  Matrix padded = random_rows(70, 1'100, false);
  std::copy(rows.begin(), rows.end(), padded.begin() + 45);  // across two warps' parts of a tile
  const Gram within = emulated_many(padded);
  for (int i = 0; i < 20; ++i)
    for (int j = 0; j < 20; ++j) {
      EXPECT(gram[i][j] == other[19 - i][19 - j]);
      EXPECT(gram[i][j] == within[45 + i][45 + j]);
    }
}

// Rows of one sign, similar to updates with a common drift: all truncated sums err in the same
// direction. With chains this short, cosines keep the documented accuracy at any d.
void cosines() {
  const Matrix rows = random_rows(3, 200'000, true);
  const Gram gram = emulated_few(rows);
  double worst = 0.0;
  for (int i = 0; i < 3; ++i)
    for (int j = 0; j < i; ++j) {
      double exact[3] = {};
      for (std::size_t k = 0; k < rows[0].size(); ++k) {
        exact[0] += static_cast<double>(rows[i][k]) * rows[j][k];
        exact[1] += static_cast<double>(rows[i][k]) * rows[i][k];
        exact[2] += static_cast<double>(rows[j][k]) * rows[j][k];
      }
      const double cosine = gram[i][j] / std::sqrt(gram[i][i] * gram[j][j]);
      worst = std::max(worst, std::fabs(cosine - exact[0] / std::sqrt(exact[1] * exact[2])));
    }
  std::printf("largest error of a cosine: %.1e\n", worst);
  EXPECT(worst < 1e-7);
}

// --- rows

void scale_blocks() {
  for (int64_t block : {int64_t{0}, int64_t{1}, int64_t{1} << 24}) {
    std::set<int64_t> columns;
    for (int lane = 0; lane < 32; ++lane)
      for (int j = 0; j < kLaneColumns; ++j) columns.insert(scale_column(block, lane, j));
    EXPECT(columns.size() == 256);
    EXPECT(*columns.begin() == 256 * block && *columns.rbegin() == 256 * block + 255);
    EXPECT(scale_column(block, 5, 3) + 1 == scale_column(block, 6, 3));
  }
}

void row_blocks() {
  for (int64_t S = 0; S <= 1'500; ++S) {
    const RowBlock block = row_block(S);
    const int threads = block.vectors * block.splits;
    EXPECT(threads % 32 == 0 && threads <= kBlockThreads);
    EXPECT(block.vectors >= 8 && (block.vectors & (block.vectors - 1)) == 0);
    EXPECT((block.splits & (block.splits - 1)) == 0);  // for the reduction tree
    EXPECT(S > 512 || row_batches(S, block.splits) <= 1);
    std::vector<int> taken(S, 0);
    for (int y = 0; y < block.splits; ++y)
      for (int batch = 0; batch < row_batches(S, block.splits); ++batch)
        for (int j = 0; j < kHeldRows; ++j)
          if (const int s = row_of(block.splits, y, batch, j); s < S) ++taken[s];
    EXPECT(std::all_of(taken.begin(), taken.end(), [](int n) { return n == 1; }));
  }
}

// The sums of a tree whose parts are added by shuffles, in the order of a tree in memory.
void split_trees() {
  for (int splits = 2; splits <= 64; splits *= 2)
    for (int width : {1, 2, 4, 8}) {
      const SplitTree tree = split_tree(splits, width);
      EXPECT(tree.leaves * tree.parts == splits && tree.parts <= 32);
      std::vector<double> x(splits);
      for (double& y : x) y = normal();
      std::vector<double> parts(tree.parts);
      for (int part = 0; part < tree.parts; ++part) {
        std::vector<double> own(tree.leaves);
        for (int m = 0; m < tree.leaves; ++m) own[m] = x[part + m * tree.parts];
        for (int half = tree.leaves / 2; half > 0; half /= 2)
          for (int m = 0; m < half; ++m) own[m] += own[m + half];
        parts[part] = own[0];
      }
      for (int half = tree.parts / 2; half > 0; half /= 2) {
        const std::vector<double> before = parts;
        for (int part = 0; part < tree.parts; ++part) parts[part] += before[part ^ half];
      }
      for (int half = splits / 2; half > 0; half /= 2)
        for (int y = 0; y < half; ++y) x[y] += x[y + half];
      EXPECT(std::all_of(parts.begin(), parts.end(), [&](double y) { return y == x[0]; }));
    }
}

// Every column of every task is in one share, and shared memory fits every GPU.
void shares() {
  for (int64_t S : {1, 8, 9, 17, 33, 65, 129, 257, 512, 1'024, 1'025})
    for (int width : {1, 2, 4, 8}) {
      const RowBlock block = row_block(S);
      const int threads = block.vectors * block.splits;
      for (int64_t d : {int64_t{1}, int64_t{37}, int64_t{1'024}, int64_t{2'049}}) {
        std::vector<int> taken(d, 0);
        for (int64_t task = 0; task < ceil_div(d, block.vectors * width); ++task)
          for (int t = 0; t < threads; ++t) {
            const Share share = share_of(block, width, task, d, t);
            for (int n = 0; n < width; ++n)
              if (share.has(n)) ++taken[share.column(n)];
          }
        EXPECT(std::all_of(taken.begin(), taken.end(), [](int n) { return n == 1; }));
      }
      const int tables = width == 8 ? 2 : 5;  // weighted_sum alone takes 8 columns
      const RowShared at = row_shared(block, width, S, tables);
      EXPECT(at.place % 16 == 0 && at.means % 16 == 0 && at.tables % 8 == 0);
      EXPECT(at.place >= (block.splits > 1 ? threads * width * 8 : 0));
      EXPECT(at.bytes <= kSmallShared);
    }
}

void widths() {
  EXPECT(vector_width(0x1000, 4) == 8);  // in two accesses
  EXPECT(vector_width(0x1000 | 0x2010, 4) == 8);
  EXPECT(vector_width(0x1000 | 0x2008, 4) == 2);
  EXPECT(vector_width(0x1000 | 0x2004, 4) == 1);
  EXPECT(vector_width(0x1000 | 0x2008 | 0x300c, 4) == 1);
  EXPECT(vector_width(0x1000, 2) == 8);
  EXPECT(vector_width(0x1000 | 0x2008, 2) == 4);
  EXPECT(vector_width(0x1000 | 0x2008 | 0x300c, 2) == 2);
  EXPECT(vector_width(0x1000 | 0x2002, 2) == 1);
  EXPECT(vector_width(0, 4) == 8 && vector_width(0, 2) == 8);  // no addresses
}

// --- pairs

void ranking() {
  for (int round = 0; round < 500; ++round) {
    std::vector<Ranked> all;
    for (int64_t k = 0; k < 32; ++k)  // many ties, some without a client, both zeros, -infinity
      all.push_back({std::vector<float>{-0.0f, 0.0f, 1.0f, -INFINITY}[random_bits() % 4],
                     random_bits() % 3 ? k : -1});
    Ranked expected{0.0f, -1};
    for (const Ranked& r : all)
      if (r.client >= 0 && (expected.client < 0 || r.score > expected.score)) expected = r;
    std::vector<Ranked> lanes = all;
    std::shuffle(lanes.begin(), lanes.end(), random_bits);
    for (int offset = 16; offset > 0; offset /= 2) {  // as a warp does
      const std::vector<Ranked> before = lanes;
      for (int lane = 0; lane < 32; ++lane)
        lanes[lane] = better(before[lane], before[lane ^ offset]);
    }
    for (const Ranked& lane : lanes) EXPECT(lane.client == expected.client);
  }
  EXPECT(far_below(1.0f, 0.5f, 0.5) && !far_below(1.0f, 0.75f, 0.5));
}

void sketches() {
  for (int64_t k : {64, 512, 4096}) {
    std::set<int64_t> buckets;
    for (int64_t unit = 0; unit < fastagg::sketch_units(k); ++unit)
      for (int thread = 0; thread < kSketchThreads; ++thread)
        for (int j = 0; j < kOwnBuckets; ++j) {
          const int64_t q = bucket_of(unit, thread, j);
          EXPECT(q % fastagg::kUnitWords == thread % fastagg::kUnitWords);
          if (q < k) EXPECT(buckets.insert(q).second);
        }
    EXPECT(static_cast<int64_t>(buckets.size()) == k);
    for (int64_t begin : {0LL, 5LL, 65'535LL, 65'536LL, 1'000'001LL})
      for (int64_t d : {1LL, 64LL, 70'000LL, 1'000'000LL, 50'000'000LL}) {
        const SketchParts parts = sketch_parts(begin, d, k);
        EXPECT(parts.count <= 258);
        int64_t next = begin / k;
        for (int64_t part = 0; part < parts.count; ++part) {
          EXPECT(parts.part_begin(part) == next && parts.part_end(part) > next);
          next = parts.part_end(part);
        }
        EXPECT((next - 1) * k < begin + d && next * k >= begin + d);
        EXPECT(sketch_rows(parts, k, 7) >= 1 && sketch_rows(parts, k, 7) <= 7);
      }
  }
}

void scores() {
  EXPECT(cosine_score(2.0, 4.0, 1.0, false) == 1.0);
  EXPECT(cosine_score(-2.5, 4.0, 1.0, false) == 0.0);  // beyond -1 by rounding
  EXPECT(cosine_score(0.0, 0.0, 1.0, false) == 0.5);
  EXPECT(cosine_score(0.0, 0.0, 0.0, true) == 0.5);
  EXPECT(cosine_score(0.1, 0.1, 0.1, true) == 1.0);
  EXPECT(distance_score(12.0, 9.0, 16.0, false) == -1.0);
  EXPECT(distance_score(9.0, 9.0, 8.9, false) <= 0.0);
  EXPECT(distance_score(9.0, 9.0, 9.0, true) == 0.0);
  EXPECT(moved_mean(0.5f, 1.0, 2) == 0.75f);
}

// --- most_similar

void similar_tiles() {
  std::set<std::pair<int, int>> pairs, copied;
  for (int thread = 0; thread < kSimilarThreads; ++thread) {
    for (int i = 0; i < 4; ++i) {
      copied.emplace(copied_row(thread), copied_word(thread) + i);
      for (int j = 0; j < 4; ++j) pairs.emplace(similar_query(thread, i), similar_row(thread, j));
      // The threads that share queries are neighbours in a warp, which exchange their best rows.
      EXPECT(similar_query(thread, i) == similar_query(thread / 16 * 16, i));
      EXPECT(i == 0 || similar_row(thread, i) > similar_row(thread, i - 1));
    }
  }
  EXPECT(pairs.size() == kSimilarTile * kSimilarTile);
  EXPECT(copied.size() == kSimilarTile * kSimilarWords);
  EXPECT(pairs.rbegin()->first == kSimilarTile - 1 && copied.rbegin()->first == kSimilarTile - 1);
}

// --- sorted columns

// Sorts lists as the kernel does, in which every position is in one comparison of a stage at most.
void sorted_lists() {
  const auto stages = [](std::vector<int> x, bool check) {
    const auto n = static_cast<int64_t>(x.size());
    for (int64_t p = 1; p < n; p *= 2)
      for (int64_t k = p; k >= 1; k /= 2) {
        std::set<int64_t> touched;
        int64_t before = -1;
        for (int64_t i = 0;; ++i) {
          const int64_t low = odd_even_low(i, p, k);
          EXPECT(low > before);
          before = low;
          if (low + k >= n) break;
          if (!odd_even_compares(low, p, k)) continue;
          if (check) EXPECT(touched.insert(low).second && touched.insert(low + k).second);
          if (x[low + k] < x[low]) std::swap(x[low], x[low + k]);
        }
      }
    return x;
  };
  for (int n = 0; n <= 14; ++n)  // a network that sorts all zeros and ones sorts everything
    for (int bits = 0; bits < 1 << n; ++bits) {
      std::vector<int> x(n);
      for (int i = 0; i < n; ++i) x[i] = bits >> i & 1;
      const std::vector<int> sorted = stages(x, bits == 0);
      EXPECT(std::is_sorted(sorted.begin(), sorted.end()));
    }
  for (int n : {31, 32, 33, 100, 255, 257, 1000}) {
    std::vector<int> x(n);
    for (int& value : x) value = static_cast<int>(random_bits() % n);
    const std::vector<int> sorted = stages(x, true);
    std::sort(x.begin(), x.end());
    EXPECT(sorted == x);
  }
}

// Sorts one column as the kernel does: runs, then merges, in which every pair has one thread.
void sorted_columns() {
  for (int64_t S = 1; S <= kMostSorted; S += S < 70 ? 1 : 53) {
    const SortTile size = sort_tile(S);
    EXPECT(size.rows >= S && size.rows * size.columns <= kTileKeys);
    EXPECT(size.columns <= kSortThreads && (size.rows <= kMostRun || size.columns >= 8));
    constexpr int kLast = 1 << 20;
    std::vector<int> x(size.rows, kLast);
    for (int64_t s = 0; s < S; ++s) x[s] = static_cast<int>(random_bits() % (S / 2 + 1));
    std::vector<int> expected = x;
    std::sort(expected.begin(), expected.end());
    const int run = std::min(size.rows, kMostRun);
    for (int begin = 0; begin < size.rows; begin += run)
      std::sort(x.begin() + begin, x.begin() + begin + run);
    const auto exchange = [&](int low, int high) {
      EXPECT(low < high && high < size.rows);
      if (x[high] < x[low]) std::swap(x[low], x[high]);
    };
    for (int m = kMostRun; m < size.rows; m *= 2) {
      std::set<int> touched;
      for (int i = 0; i < size.rows / 2; ++i) {
        const SortPair pair = mirrored(i, m);
        touched.insert({pair.low, pair.high});
        if (pair.high < S) exchange(pair.low, pair.high);
      }
      EXPECT(static_cast<int>(touched.size()) == size.rows);
      for (int block = m; block > 1; block >>= stages_of(block)) {
        const int stages = stages_of(block), held = 1 << stages, distance = block >> stages;
        touched.clear();
        for (int i = 0; i < size.rows / held; ++i) {
          const int first = halved(i, block, stages);
          for (int k = 0; k < held; ++k) touched.insert(first + k * distance);
          if (first + distance >= S) continue;
          for (int apart = held / 2; apart > 0; apart /= 2)
            for (int k = 0; k < held; ++k)
              if ((k & apart) == 0) exchange(first + k * distance, first + (k + apart) * distance);
        }
        EXPECT(static_cast<int>(touched.size()) == size.rows && *touched.rbegin() < size.rows);
      }
    }
    EXPECT(x == expected);
  }
}

}  // namespace

int main(int count, char** arguments) {
  const std::map<std::string, void (*)()> checks = {
      {"triangle", triangle},
      {"partitions", partitions},
      {"plans", plans},
      {"slots", slots},
      {"few_rows", few_rows},
      {"more_rows", more_rows},
      {"entries_depend_on_their_rows_alone", entries_depend_on_their_rows_alone},
      {"cosines", cosines},
      {"row_blocks", row_blocks},
      {"split_trees", split_trees},
      {"shares", shares},
      {"scale_blocks", scale_blocks},
      {"widths", widths},
      {"ranking", ranking},
      {"scores", scores},
      {"sketches", sketches},
      {"similar_tiles", similar_tiles},
      {"sorted_columns", sorted_columns},
      {"sorted_lists", sorted_lists},
  };
  if (count != 2) {
    for (const auto& [name, check] : checks) std::printf("%s\n", name.c_str());
    return 0;
  }
  checks.at(arguments[1])();
  return 0;
}
