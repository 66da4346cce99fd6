// SPDX-License-Identifier: Apache-2.0
// The Gram kernel for more rows, which is bound by arithmetic. A thread block has one tile of
// 128 x 128 entries, and one chunk or a group of chunks. While its warps multiply one step, the
// next step is loaded from memory into registers. It is split into words once and stored in shared
// memory in the order in which lanes read it.
#include "gram_mma.cuh"
#include "gram_parts.h"

namespace fastagg::cuda {
namespace {

constexpr int kPairs = kTileRows / 16;  // pairs of row groups of a strip, one for each warp
static_assert(kPairs * kWarp == kTileThreads);
constexpr int kLoads = 4;  // of a thread: two row groups of strip I, and two of strip J

// A stage is the words of one step of both strips. With two stages, a step is stored while others
// are multiplied; with one, there is a barrier in between.
template <Precision kPrecision, bool kSmall>
struct Many {
  static constexpr int kWords = Products<kPrecision>::kWords;
  static constexpr int kStages = kWords == 1 ? 2 : 1;
  static constexpr int kStripVectors = kPairs * kWords * 2 * kWarp;  // of Words4
  static constexpr int kStageVectors = 2 * kStripVectors;
  static constexpr int kSumBytes = kSmall ? 0 : kTileSlots * int{sizeof(double)};  // 128 KB
  static constexpr int kStripBytes = 2 * int{sizeof(int)};  // besides, see `strips`
  static constexpr int kStageBytes = kStages * kStageVectors * int{sizeof(Words4)};
  static constexpr int kSourceBytes =
      kSmall ? kLoads * kTileThreads * int{sizeof(const float*)} : 0;
  static constexpr int kSharedBytes = kSumBytes + kStageBytes + kSourceBytes;
  static_assert(kSharedBytes + kStripBytes <= (kSmall ? kSmallShared : kLargeShared));
};

template <int V>
__device__ __forceinline__ float4 load_vector(const float* row, int64_t column, int64_t d) {
  float x[4] = {};
  if (row)
#pragma unroll
    for (int k = 0; k < 4; k += V) {
      const Floats<V> part = load<V>(row + column + k, d - column - k);
#pragma unroll
      for (int v = 0; v < V; ++v) x[k + v] = part.at[v];
    }
  return make_float4(x[0], x[1], x[2], x[3]);
}

// Strip I is stored as operand A, [pair of row groups, word, half, lane], and strip J as operand B,
// [row group, word, lane].
template <int kWords>
__device__ __forceinline__ OperandA<kWords> load_a(const Words4* strip, int pair) {
  OperandA<kWords> a;
#pragma unroll
  for (int n = 0; n < kWords; ++n)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const Words4 words = strip[((pair * kWords + n) * 2 + half) * kWarp];
#pragma unroll
      for (int r = 0; r < 4; ++r) a.at[n][half][r] = words.at[r];
    }
  return a;
}
template <int kWords>
__device__ __forceinline__ OperandB<kWords> load_b(const Words4* strip, int group) {
  OperandB<kWords> b;
#pragma unroll
  for (int n = 0; n < kWords; ++n) b.at[n] = strip[(group * kWords + n) * kWarp];
  return b;
}

// wide[n * kTileThreads] += sums[n], and sums[n] = 0, for n in [0, N), in global memory:
// kTogether are loaded before the first is stored.
template <int N, int kTogether>
__device__ __forceinline__ void flush_far(float* sums, double* wide) {
  static_assert(N % kTogether == 0);
#pragma unroll
  for (int n = 0; n < N; n += kTogether) {
    double before[kTogether];
#pragma unroll
    for (int k = 0; k < kTogether; ++k) before[k] = wide[(n + k) * kTileThreads];
#pragma unroll
    for (int k = 0; k < kTogether; ++k) {
      wide[(n + k) * kTileThreads] = __dadd_rn(before[k], static_cast<double>(sums[n + k]));
      sums[n + k] = 0.0f;
    }
  }
}

//   first      // the first column of the first of `count` chunks. A chunk has `columns` columns;
//              // the last one ends at column d.
//   partials   // [chunks of the grid / together, slots]
template <int V, Precision kPrecision, bool kSmall>
__global__ void __launch_bounds__(kTileThreads, 1)
    gram_many_kernel(const float* const* rows, Wanted wanted, int64_t first, int64_t d,
                     int64_t columns, int64_t count, int together, const uint8_t* needed,
                     int64_t slots, double* partials, int32_t* found) {
  using T = Many<kPrecision, kSmall>;
  constexpr int kWords = T::kWords;
  if (blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x < kFound) found[threadIdx.x] = 0;
  const int64_t tile = blockIdx.x;
  if (needed && !needed[tile]) return;
  const int I = static_cast<int>(triangle_row(tile));
  const int J = static_cast<int>(tile - triangle_index(I, 0));
  __shared__ int strips[2];  // I and J, for the end of a chunk: no registers are left for them
  if (threadIdx.x == 0) {
    strips[0] = I;
    strips[1] = J;
  }

  extern __shared__ float4 shared[];
  double* const out = partials + blockIdx.y * slots + tile * kTileSlots + threadIdx.x;
  double* const wide = kSmall ? out : reinterpret_cast<double*>(shared) + threadIdx.x;
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  auto* stages = reinterpret_cast<Words4*>(shared + T::kSumBytes / int{sizeof(float4)}) + lane;
  const bool diagonal = I == J;
  const int used = diagonal ? kLoads / 2 : kLoads;
  const int entries = diagonal ? kDiagonalSums : kTileSums;

  // Row groups 2 * warp and 2 * warp + 1 of strip I, then of J. With kSmall, their addresses are in
  // shared memory: the address of the sums takes the registers.
  const float* source[kLoads];
  auto* const sources = reinterpret_cast<const float**>(shared + (T::kSumBytes + T::kStageBytes) /
                                                                     int{sizeof(float4)}) +
                        threadIdx.x;
#pragma unroll
  for (int n = 0; n < kLoads; ++n) {
    const int64_t s = int64_t{n < 2 ? I : J} * kTileRows + (2 * warp + n % 2) * 8 + lane_row(lane);
    source[n] = s < wanted.S && n < used ? rows[s] : nullptr;
    if (kSmall) sources[n * kTileThreads] = source[n];
  }
  float4 coming[kLoads];
  const auto fetch = [&](int64_t column) {
#pragma unroll
    for (int n = 0; n < kLoads; ++n)
      coming[n] = load_vector<V>(kSmall ? sources[n * kTileThreads] : source[n],
                                 column + lane_column(lane), d);
  };
  const auto put = [&](int stage) {
    Words4* const strip_i = stages + stage * T::kStageVectors;
    Words4* const strip_j = strip_i + T::kStripVectors;
    Words4 even[kWords], odd[kWords];
    Products<kPrecision>::split(coming[0], even);
    Products<kPrecision>::split(coming[1], odd);
    const OperandA<kWords> a = operand_a(even, odd);
#pragma unroll
    for (int n = 0; n < kWords; ++n)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint32_t (&r)[4] = a.at[n][half];
        strip_i[((warp * kWords + n) * 2 + half) * kWarp] = {{r[0], r[1], r[2], r[3]}};
      }
    if (!diagonal) {
      Products<kPrecision>::split(coming[2], even);
      Products<kPrecision>::split(coming[3], odd);
    }
#pragma unroll
    for (int n = 0; n < kWords; ++n) {
      strip_j[(2 * warp * kWords + n) * kWarp] = even[n];
      strip_j[((2 * warp + 1) * kWords + n) * kWarp] = odd[n];
    }
  };

  float sums[kTileSums] = {};
  const auto multiply = [&](int stage) {
    const Words4* const strip_i = stages + stage * T::kStageVectors;
    const Words4* const strip_j = strip_i + T::kStripVectors;
    if (diagonal) {
      const int turn = diagonal_turn(warp);
      OperandA<kWords> a;
#pragma unroll
      for (int n = 0; n < kDiagonalTiles; ++n) {
        const DiagonalTile at = diagonal_tile(warp, n);
        if (n == 0 || n == turn) a = load_a<kWords>(strip_i, at.a);
        add_step<kPrecision>(sums + 4 * n, a, load_b<kWords>(strip_j, at.b));
      }
      return;
    }
    OperandB<kWords> b[4];
#pragma unroll
    for (int n = 0; n < 4; ++n) b[n] = load_b<kWords>(strip_j, warp_column(warp) / 8 + n);
#pragma unroll
    for (int m = 0; m < 4; ++m) {
      const OperandA<kWords> a = load_a<kWords>(strip_i, warp_row(warp) / 16 + m);
#pragma unroll
      for (int n = 0; n < 4; ++n) add_step<kPrecision>(sums + tile_sum(m, n, 0), a, b[n]);
    }
  };
  const auto flush_sums = [&] {
    constexpr int kTogether = V == 1 ? 1 : 4;  // as registers allow
    if (kSmall && diagonal)
      flush_far<kDiagonalSums, kTogether>(sums, wide);
    else if (kSmall)
      flush_far<kTileSums, kTogether>(sums, wide);
    else if (diagonal)
      flush<kDiagonalSums>(sums, wide, kTileThreads);
    else
      flush<kTileSums>(sums, wide, kTileThreads);
  };

  for (int c = 0; c < (kSmall ? 1 : together); ++c) {
    const int64_t chunk = kSmall ? blockIdx.y : int64_t{blockIdx.y} * together + c;
    if (chunk >= count) break;
    const int64_t begin = first + chunk * columns, end = at_most(begin + columns, d);
    const int steps = static_cast<int>(ceil_div(end - begin, kStep));
    for (int n = 0; n < entries; ++n) wide[n * kTileThreads] = 0.0;
    fetch(begin);
    put(0);
    __syncthreads();
    for (int step = 0; step < steps; ++step) {
      const bool more = step + 1 < steps;
      if (more) fetch(begin + int64_t{step + 1} * kStep);
      multiply(static_cast<int>(step % T::kStages));
      if (step % kBlockSteps == kBlockSteps - 1) flush_sums();
      // This overwrites a stage that all warps have read before the last barrier.
      if (T::kStages == 1) __syncthreads();
      if (more) put(static_cast<int>((step + 1) % T::kStages));
      __syncthreads();
    }
    flush_sums();
    // The first sum of a group is stored, the others are added to it: each in order of the chunks.
    if constexpr (!kSmall) {        // otherwise the sums of one chunk are in their place
      constexpr int kTogether = 4;  // loaded before the first is stored
      static_assert(kTileSums % kTogether == 0 && kDiagonalSums % kTogether == 0);
#pragma unroll 1
      for (int n = 0; n < entries; n += kTogether) {
        bool stored[kTogether];
        double before[kTogether];
#pragma unroll
        for (int k = 0; k < kTogether; ++k) {
          const Entry e =
              tile_slot_entry(strips[0], strips[1], static_cast<int>(threadIdx.x), n + k);
          stored[k] = wanted(e.i, e.j);
          before[k] = c > 0 && stored[k] ? out[(n + k) * kTileThreads] : 0.0;
        }
#pragma unroll
        for (int k = 0; k < kTogether; ++k) {
          const double sum = wide[(n + k) * kTileThreads];
          if (stored[k]) out[(n + k) * kTileThreads] = c == 0 ? sum : __dadd_rn(before[k], sum);
        }
      }
    }
  }
}

}  // namespace

cudaError_t gram_many(const float* const* rows, Wanted wanted, const GramPlan& plan,
                      int64_t segment, int64_t first, int64_t count, const uint8_t* needed,
                      double* partials, int32_t* found, Precision precision, int width,
                      cudaStream_t stream) {
  const auto launch = [&](auto p, auto w, auto small) {
    constexpr bool kSmall = decltype(small)::value;
    const auto kernel = gram_many_kernel<decltype(w)::value, decltype(p)::value, kSmall>;
    constexpr int kSharedBytes = Many<decltype(p)::value, kSmall>::kSharedBytes;
    if (cudaError_t error =
            cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes))
      return error;
    const int64_t from = segment * plan.segment, columns = plan.part_of(segment).chunk;
    const dim3 grid(static_cast<unsigned>(plan.tiles),
                    static_cast<unsigned>(ceil_div(count, plan.together)));
    kernel<<<grid, kTileThreads, kSharedBytes, stream>>>(
        rows, wanted, from + first * columns, from + plan.columns_of(segment), columns, count,
        plan.together, needed, plan.slots, partials, found);
    return cudaGetLastError();
  };
  return with_precision(precision, [&](auto p) {
    return with_width(width, [&](auto w) {
      return plan.small ? launch(p, w, std::true_type()) : launch(p, w, std::false_type());
    });
  });
}

}  // namespace fastagg::cuda
