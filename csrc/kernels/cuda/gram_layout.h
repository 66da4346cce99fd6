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
// Chunks, at most. A chunk has whole blocks; one warp (gram_few) or thread block (gram_many) sums
// it. Chunks depend on d alone, so an entry depends on its two rows alone.
constexpr int64_t kMaxChunks = 512;
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

// Each element becomes a word of two bfloat16: h, its leading 8 bits (upper half), and l, the next
// 8 (lower half). Multiplying two words half by half gives h h' + l l'; with the halves of one
// operand swapped, h l' + l h'. Together these are the four products of (h + l) (h' + l'). (With
// kTf32, a word is one TF32 number.)
FASTAGG_HD constexpr uint32_t swapped(uint32_t word) {
  return word >> 16 | word << 16;
}

// One mma.m16n8k16 multiplies 16 rows with 8 rows over 16 halves, which are 8 words. A step takes
// two of them (`half` 0 and 1), and two more with swapped operands. The columns may be summed in
// any order that is the same for both operands, so each lane uses the words that it holds: register
// r of operand A is word a_word(half, r) of row group 2a + a_group(r), ...
FASTAGG_HD constexpr int a_group(int r) {
  return r % 2;
}
FASTAGG_HD constexpr int a_word(int half, int r) {
  return 2 * half + r / 2;
}
// ... and register r of operand B is word b_word(half, r) of row group b.
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

// Tiles of 16 x 8 on and below the diagonal: (a, b) with b <= 2a + 1, in rows.
FASTAGG_HD constexpr int few_tiles(int row_tiles) {
  return row_tiles * (row_tiles + 1);
}
FASTAGG_HD constexpr int few_tile(int a, int b) {
  return a * (a + 1) + b;
}
// Slots of partial sums: [tile, 4 registers, 32 lanes].
FASTAGG_HD constexpr Entry few_entry(int64_t slot) {
  const int lane = static_cast<int>(slot % 32), r = static_cast<int>(slot / 32 % 4);
  const int tile = static_cast<int>(slot / 128);
  int a = 0;
  while (few_tile(a + 1, 0) <= tile) ++a;
  const Entry e = tile_entry(lane, r);
  return {16 * a + e.i, 8 * (tile - few_tile(a, 0)) + e.j};
}

// ---- gram_many: a thread block has a tile of 128 x 128 -----------------------------------------

constexpr int kTileRows = 128;
constexpr int kTileThreads = 256;  // 8 warps of 64 x 32 entries, in 2 rows
constexpr int kTileSums = 64;      // of a thread: 4 x 4 tiles of 16 x 8, 4 registers
constexpr int64_t kTileSlots = kTileSums * kTileThreads;

FASTAGG_HD constexpr int warp_row(int warp) {
  return warp / 4 * 64;
}
FASTAGG_HD constexpr int warp_column(int warp) {
  return warp % 4 * 32;
}
FASTAGG_HD constexpr int tile_sum(int a, int b, int r) {
  return (a * 4 + b) * 4 + r;
}
// Slots of partial sums: [tile of the lower triangle, kTileSums, kTileThreads].
FASTAGG_HD constexpr Entry many_entry(int64_t slot) {
  const int thread = static_cast<int>(slot % kTileThreads);
  const int sum = static_cast<int>(slot / kTileThreads % kTileSums);
  const int64_t tile = slot / kTileSlots, I = triangle_row(tile);
  const int64_t J = tile - triangle_index(I, 0);
  const Entry e = tile_entry(thread % 32, sum % 4);
  return {I * kTileRows + warp_row(thread / 32) + sum / 16 * 16 + e.i,
          J * kTileRows + warp_column(thread / 32) + sum / 4 % 4 * 8 + e.j};
}

// ---- all chunks --------------------------------------------------------------------------------

// Limit on the partial sums of the chunks in flight; kChunkGroup chunks may exceed it.
constexpr int64_t kPartialBytes = int64_t{256} << 20;

struct GramPlan {
  bool few;
  int row_tiles;  // strips of 16 rows, if few
  int64_t tiles;  // of 128 x 128, on and below the diagonal, if not few
  int64_t slots;  // partial sums of a chunk
  Partition part;
  int64_t wave;  // chunks in flight: their partial sums are kept; a multiple of kChunkGroup
};

FASTAGG_HD constexpr GramPlan plan_gram(int64_t S, int64_t d) {
  GramPlan plan{S <= kFewRows, static_cast<int>(ceil_div(S, 16)), 0, 0, partition(d), 0};
  if (plan.few) {
    plan.slots = int64_t{few_tiles(plan.row_tiles)} * 128;
  } else {
    plan.tiles = triangle_index(ceil_div(S, kTileRows), 0);
    plan.slots = plan.tiles * kTileSlots;
  }
  const int64_t fitting = kPartialBytes / 8 / at_least(plan.slots, 1) / kChunkGroup * kChunkGroup;
  const int64_t all = ceil_div(plan.part.chunks, kChunkGroup) * kChunkGroup;
  plan.wave = at_least(at_most(fitting, all), kChunkGroup);
  return plan;
}

// Byte offsets in the workspace.
struct GramWorkspace {
  int64_t partials;  // [wave, slots] double
  int64_t totals;    // [slots] double, if there is more than one wave
  int64_t suspects;  // [S] int32: whether squares may have left the range of float32
  int64_t peaks;     // [S] int32: magnitude bits of suspects
  int64_t found;     // [1] int32: whether any row is a suspect
  int64_t needed;    // [tiles] bytes: whether a tile has a wanted pair
  int64_t bytes;     // of the whole workspace
};

FASTAGG_HD constexpr GramWorkspace gram_workspace_of(const GramPlan& plan, int64_t S) {
  GramWorkspace at{};
  at.totals = at.partials + plan.wave * plan.slots * 8;
  at.suspects = at.totals + (plan.wave < plan.part.chunks ? plan.slots * 8 : 0);
  at.peaks = at.suspects + S * 4;
  at.found = at.peaks + S * 4;
  at.needed = at.found + 4;
  at.bytes = at.needed + plan.tiles;
  return at;
}

}  // namespace fastagg::cuda
