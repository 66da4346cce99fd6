// SPDX-License-Identifier: Apache-2.0
// The index arithmetic of the CUDA Gram kernels: which columns a partial sum covers, which elements
// a lane of a warp holds, and to which entry of the result an accumulator belongs. It is tested on
// the CPU with an emulated tensor core (tests/cuda).
#pragma once

#include "../host_device.h"

namespace fastagg::cuda {

// ---- d -----------------------------------------------------------------------------------------

// Columns of a step: one chain of tensor-core products, which the hardware adds with truncation.
constexpr int kStep = 16;
// Columns of a block: steps are added in float32, blocks in float64.
constexpr int kBlockColumns = 512;
constexpr int kBlockSteps = kBlockColumns / kStep;
// Chunks of a segment, at most. A chunk has whole blocks; two warps (gram_few) or a thread block
// (gram_many) sum it. Chunks depend on d alone, so an entry depends on its two rows alone.
constexpr int64_t kMaxChunks = 1024;
// Chunks of a group: the partial sums of a group are added first, then the sums of all groups.
constexpr int kChunkGroup = 8;

struct Partition {
  int64_t chunk;   // columns, a multiple of kBlockColumns
  int64_t chunks;  // 0 if d is 0
};

FASTAGG_HD constexpr Partition partition(int64_t d) {
  const int64_t blocks = at_least(ceil_div(ceil_div(d, kMaxChunks), kBlockColumns), 1);
  return {blocks * kBlockColumns, ceil_div(d, blocks * kBlockColumns)};
}

// ---- one step of a warp ------------------------------------------------------------------------

// Rows are taken in groups of 8, one step of columns at a time. A lane holds four neighbouring
// columns of one row of each group: 16 bytes of the row.
FASTAGG_HD constexpr int lane_row(int lane) {
  return lane / 4;
}
FASTAGG_HD constexpr int lane_column(int lane) {
  return lane % 4 * 4;
}

// Each element becomes words of two bfloat16: h, its leading 8 bits (upper half), and m, the next
// 8 (lower half); with kHighest also the word of h and l, the last 8. Multiplying two words half by
// half gives h h' + m m'; with the halves of one operand swapped, h m' + m h'. (With kTf32, a word
// is one TF32 number.)
FASTAGG_HD constexpr uint32_t swapped(uint32_t word) {
  return word >> 16 | word << 16;
}

// One mma.m16n8k16 multiplies 16 rows with 8 rows over 16 halves, which are the words of 8 columns.
// A step has two halves of 8 columns, 0 and 1. The columns may be summed in any order that is the
// same for both operands, so each lane uses the words that it holds: register r of operand A is the
// word of element a_word(half, r) of row group 2a + a_group(r), ...
FASTAGG_HD constexpr int a_group(int r) {
  return r % 2;
}
FASTAGG_HD constexpr int a_word(int half, int r) {
  return 2 * half + r / 2;
}
// ... and register r of operand B is that of element b_word(half, r) of row group b.
FASTAGG_HD constexpr int b_word(int half, int r) {
  return 2 * half + r;
}

struct Entry {
  int64_t i, j;
};

// The entry of register r of the 16 x 8 result.
FASTAGG_HD constexpr Entry tile_entry(int lane, int r) {
  return {lane / 4 + r / 2 * 8, lane % 4 * 2 + r % 2};
}

// ---- gram_few: S <= 64, a warp has the whole triangle ------------------------------------------

constexpr int64_t kFewRows = 64;

// Row groups of the triangle. Two of them are a strip of 16 rows; the last one may be alone.
FASTAGG_HD constexpr int few_groups(int64_t S) {
  return static_cast<int>(at_least(ceil_div(S, 8), 1));
}

// Up to 8 rows, a row group has the rows of several chunks, so that no lane is without a row: with
// 4 rows it has four of chunk c and four of chunk c + 1. Products of rows of two chunks are of no
// use. Row v of the group is row v % shared_rows(S) of chunk c + v / shared_rows(S).
FASTAGG_HD constexpr int shared_rows(int64_t S) {
  return S <= 1 ? 1 : S <= 2 ? 2 : S <= 4 ? 4 : 8;
}
FASTAGG_HD constexpr int shared_chunks(int64_t S) {
  return few_groups(S) == 1 ? 8 / shared_rows(S) : 1;
}

// Tiles of 16 x 8 on and below the diagonal: (a, b) with b <= 2a + 1, in rows of tiles. Of a row
// group that is alone, the lower halves of the tiles are not used.
FASTAGG_HD constexpr int few_tile(int a, int b) {
  return a * (a + 1) + b;
}
FASTAGG_HD constexpr int few_tiles(int groups) {
  return few_tile(groups / 2, groups % 2 * groups);
}
// Slots of partial sums of a chunk: [tile, 4 registers, 32 lanes], or [8, 8] with one row group.
FASTAGG_HD constexpr int64_t few_slots(int groups) {
  return groups == 1 ? 64 : int64_t{few_tiles(groups)} * 128;
}
FASTAGG_HD constexpr Entry few_entry(int groups, int64_t slot) {
  if (groups == 1) return {slot / 8, slot % 8};
  const int lane = static_cast<int>(slot % 32), r = static_cast<int>(slot / 32 % 4);
  const int tile = static_cast<int>(slot / 128);
  int a = 0;
  while (few_tile(a + 1, 0) <= tile) ++a;
  const Entry e = tile_entry(lane, r);
  return {16 * a + e.i, 8 * (tile - few_tile(a, 0)) + e.j};
}

// Where an entry of a shared row group belongs: a chunk, counted from that of row 0, and a slot.
// The chunk is -1 if its rows are of two chunks.
struct SharedSlot {
  int chunk;
  int64_t slot;
};
FASTAGG_HD constexpr SharedSlot shared_slot(int64_t S, Entry e) {
  const int64_t own = shared_rows(S), chunk = e.i / own;
  if (e.j / own != chunk) return {-1, 0};
  return {static_cast<int>(chunk), e.i % own * 8 + e.j % own};
}

constexpr int kFewWarps = 4;
constexpr int kChunkWarps = 2;                      // warps that share a chunk
constexpr int kFewPairs = kFewWarps / kChunkWarps;  // of warps, in a thread block

// Bytes of shared memory of a thread block: at most kLargeShared on sm_80 (more on sm_90), and
// kSmallShared on sm_86, sm_89 and sm_120.
constexpr int kLargeShared = 163 << 10, kSmallShared = 99 << 10;

// Row groups of 8 rows; kSmall: for at most kSmallShared bytes of shared memory. A warp copies
// vectors of 16 bytes into its ring. Without kSmall, two thread blocks fit into the 228 KB of a
// multiprocessor of sm_90, four with up to 4 row groups, so that each scheduler has two to four
// warps.
template <int kGroups, bool kSmall>
struct Few {
  static constexpr int kStrips = (kGroups + 1) / 2;       // of 16 rows
  static constexpr int kTileSums = kGroups == 1 ? 2 : 4;  // of a lane; the first two: upper 8 rows
  static constexpr int kSums = few_tiles(kGroups) * kTileSums;
  static constexpr int kSteps = kGroups == 1             ? 8
                                : kGroups == 2           ? 4
                                : kGroups == 8 && kSmall ? 1
                                                         : 2;  // of a stage
  static constexpr int kStages = kGroups == 8   ? (kSmall ? 3 : 2)
                                 : kGroups == 7 ? 2
                                 : kGroups == 4 ? 2
                                                : 3;      // of the ring
  static constexpr int kStageVectors = kSteps * kGroups;  // that a lane loads
  static constexpr int kStageColumns = kSteps * kStep;
  static constexpr int kBlockStages = kBlockSteps / kSteps;  // of a block of columns
  static constexpr int kRingBytes = kStages * kStageVectors * 32 * 16;
  static constexpr int kSumBytes = kSums * 32 * int{sizeof(double)};
  static constexpr int kTableBytes = (8 * kGroups * int{sizeof(const float*)} + 15) / 16 * 16;
  static constexpr int kSharedBytes = kTableBytes + kFewWarps * kRingBytes + kFewPairs * kSumBytes;
  // An access of a warp has kLanes lanes of each row: a cache line, where a stage has two steps.
  static constexpr int kLanes = kSteps > 1 ? 8 : 4;
  static constexpr int kAccesses = kLanes / 4;  // of a row group, which has 8 rows
  static constexpr int kAccessRows = 32 / kLanes;
  static_assert(kBlockSteps % kSteps == 0 && kSteps % kAccesses == 0);
  static_assert(kSharedBytes <= (kSmall ? kSmallShared : kLargeShared));
  static_assert(2 * (kSharedBytes + 1024) <= 228 << 10);  // 1 KB of each block is reserved
};

// ---- gram_many: a thread block has a tile of 128 x 128 -----------------------------------------

constexpr int kTileRows = 128;
constexpr int kTileThreads = 256;  // 8 warps
constexpr int kTileSums = 64;      // of a thread: 16 tiles of 16 x 8, 4 registers
constexpr int64_t kTileSlots = kTileSums * kTileThreads;

// Off the diagonal, a warp has 64 x 32 entries.
FASTAGG_HD constexpr int warp_row(int warp) {
  return warp / 4 * 64;
}
FASTAGG_HD constexpr int warp_column(int warp) {
  return warp % 4 * 32;
}
FASTAGG_HD constexpr int tile_sum(int a, int b, int r) {
  return (a * 4 + b) * 4 + r;
}

// On the diagonal, a thread block has the 72 tiles of 16 x 8 on and below the diagonal, 2 (a + 1)
// in row a. Rows 7 - p and p together have 18; each of the warps 2p and 2p + 1 takes nine.
constexpr int kDiagonalTiles = 9;
constexpr int kDiagonalSums = 4 * kDiagonalTiles;

// The first of these tiles that is in row p, not 7 - p; kDiagonalTiles if none is.
FASTAGG_HD constexpr int diagonal_turn(int warp) {
  return warp % 2 == 0 ? kDiagonalTiles : 7 - warp / 2 * 2;
}

struct DiagonalTile {
  int a, b;  // rows from 16 a on, columns from 8 b on
};

FASTAGG_HD constexpr DiagonalTile diagonal_tile(int warp, int n) {
  const int turn = diagonal_turn(warp);
  if (n >= turn) return {warp / 2, n - turn};
  return {7 - warp / 2, warp % 2 == 0 ? n : kDiagonalTiles + n};
}

// The entry of sum `sum` of a thread in tile (I, J).
FASTAGG_HD constexpr Entry tile_slot_entry(int64_t I, int64_t J, int thread, int sum) {
  const int lane = thread % 32, warp = thread / 32;
  const Entry e = tile_entry(lane, sum % 4);
  if (I == J) {
    if (sum >= kDiagonalSums) return {-1, 0};
    const DiagonalTile at = diagonal_tile(warp, sum / 4);
    return {I * kTileRows + at.a * 16 + e.i, I * kTileRows + at.b * 8 + e.j};
  }
  return {I * kTileRows + warp_row(warp) + sum / 16 * 16 + e.i,
          J * kTileRows + warp_column(warp) + sum / 4 % 4 * 8 + e.j};
}

// Slots of partial sums: [tile of the lower triangle, kTileSums, kTileThreads]. Those that are not
// used have no entry: i is less than j.
FASTAGG_HD Entry many_entry(int64_t slot) {
  const int64_t tile = slot / kTileSlots, I = triangle_row(tile);
  return tile_slot_entry(I, tile - triangle_index(I, 0), static_cast<int>(slot % kTileThreads),
                         static_cast<int>(slot / kTileThreads % kTileSums));
}

// ---- all chunks, all segments ------------------------------------------------------------------

// Limit on the partial sums of the chunks of a segment in flight; kChunkGroup chunks may exceed it.
constexpr int64_t kPartialBytes = int64_t{256} << 20;
// Limit on what the segments in flight need together: their partial sums (gram_few), or their Gram
// matrices (gram_many). One segment may exceed it.
constexpr int64_t kSegmentBytes = int64_t{128} << 20;
constexpr int64_t kMostWindow = 1 << 15;  // a grid has at most 65,535 thread blocks in y

struct GramPlan {
  bool few;
  bool small;                 // a thread block has less than kLargeShared bytes of shared memory
  int groups;                 // row groups, if few
  int64_t tiles;              // of 128 x 128, on and below the diagonal, if not few
  int64_t slots;              // partial sums of a chunk
  int64_t segment, segments;  // columns of a segment, and how many there are
  int64_t last_columns;       // of the last one
  Partition part, last_part;  // of a segment, and of the last one
  int together;               // chunks of one partial sum: 1, or kChunkGroup
  int64_t wave;    // chunks of a segment in flight, whose partial sums are kept; a multiple of
                   // kChunkGroup
  int64_t window;  // segments in flight; with gram_many, one after the other but for the last steps

  FASTAGG_HD constexpr bool is_last(int64_t n) const { return n + 1 == segments; }
  FASTAGG_HD constexpr int64_t columns_of(int64_t n) const {
    return is_last(n) ? last_columns : segment;
  }
  FASTAGG_HD constexpr Partition part_of(int64_t n) const { return is_last(n) ? last_part : part; }
  // The most chunks of a segment.
  FASTAGG_HD constexpr int64_t chunks() const { return at_least(part.chunks, last_part.chunks); }
  // Partial sums of a slot.
  FASTAGG_HD constexpr int64_t kept() const {
    return few ? window * chunks() : ceil_div(wave, together);
  }
};

// Rows from which on there are enough tiles for all multiprocessors if a thread block of gram_many
// sums a group of chunks. It writes, and reduce_kernel reads, an eighth of the partial sums.
constexpr int64_t kGroupedRows = 512;

FASTAGG_HD constexpr GramPlan plan_gram(int64_t S, int64_t d, int64_t segment, bool small) {
  GramPlan plan{};
  plan.few = S <= kFewRows;
  plan.small = small;
  plan.segment = at_most(segment, d);
  plan.segments = d == 0 ? 0 : ceil_div(d, segment);
  plan.last_columns = d == 0 ? 0 : d - (plan.segments - 1) * plan.segment;
  plan.last_part = partition(plan.last_columns);
  plan.part = plan.segments > 1 ? partition(plan.segment) : plan.last_part;
  plan.together = S >= kGroupedRows && !small ? kChunkGroup : 1;
  if (plan.few) {
    plan.groups = few_groups(S);
    plan.slots = few_slots(plan.groups);
  } else {
    plan.tiles = triangle_index(ceil_div(S, kTileRows), 0);
    plan.slots = plan.tiles * kTileSlots;
  }
  const int64_t fitting =
      kPartialBytes / 8 / at_least(plan.slots, 1) * plan.together / kChunkGroup * kChunkGroup;
  const int64_t all = ceil_div(plan.chunks(), kChunkGroup) * kChunkGroup;
  plan.wave = at_least(at_most(fitting, all), kChunkGroup);
  const int64_t numbers = plan.few ? plan.chunks() * plan.slots : S * S;  // of a segment
  const int64_t most = at_most(plan.segments, kMostWindow);
  plan.window = at_least(at_most(kSegmentBytes / 8 / at_least(numbers, 1), most), 1);
  return plan;
}

// Floats that one access may take at the begin of any segment, if it may take 4 at that of the row.
FASTAGG_HD constexpr int segment_width(int64_t segment) {
  return segment % 4 == 0 ? 4 : segment % 2 == 0 ? 2 : 1;
}

constexpr int kFound = 3;

// Byte offsets in the workspace.
struct GramWorkspace {
  int64_t partials;  // [kept, slots] double
  int64_t totals;    // [slots] double, if there is more than one wave
  int64_t matrices;  // [window, S, S] double, if there is more than one segment
  int64_t suspects;  // [window, S] int32: whether squares may have left the range of float32
  int64_t peaks;     // [window, S] int32: magnitude bits of suspects
  int64_t found;  // [window, kFound] int32: whether any row is a suspect; counters of rescue_kernel
  int64_t needed;  // [tiles] bytes: whether a tile has a wanted pair
  int64_t bytes;   // of the whole workspace
};

FASTAGG_HD constexpr GramWorkspace gram_workspace_of(const GramPlan& plan, int64_t S) {
  GramWorkspace at{};
  at.totals = at.partials + plan.kept() * plan.slots * 8;
  at.matrices = at.totals + (plan.wave < plan.chunks() ? plan.slots * 8 : 0);
  at.suspects = at.matrices + (plan.segments > 1 ? plan.window * S * S * 8 : 0);
  at.peaks = at.suspects + plan.window * S * 4;
  at.found = at.peaks + plan.window * S * 4;
  at.needed = at.found + plan.window * kFound * 4;
  at.bytes = at.needed + plan.tiles;
  return at;
}

}  // namespace fastagg::cuda
