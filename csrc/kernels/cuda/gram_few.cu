// SPDX-License-Identifier: Apache-2.0
// The Gram kernel for few rows, which is bound by memory. Two warps have one chunk and the whole
// triangle of products: they take its blocks of columns in turn, and add their float32 sums to
// common float64 sums in the order of the blocks. A warp copies whole cache lines of rows,
// asynchronously and one or two stages ahead, into a ring in shared memory that no other warp uses.
// The A operand of 16 rows is also the B operand of two tiles, so nothing is loaded twice. Up to 8
// rows, two warps have several chunks, whose rows fill one row group.
#include "gram_copy.cuh"
#include "gram_mma.cuh"
#include "gram_parts.h"

namespace fastagg::cuda {
namespace {

// One of two warps announces that it has written, and the other waits for that.
__device__ __forceinline__ void announce(int barrier) {
  asm volatile("bar.arrive %0, 64;" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void wait_for_other(int barrier) {
  asm volatile("bar.sync %0, 64;" ::"r"(barrier) : "memory");
}

template <int kGroups, bool kSmall, int kBytes, Precision kPrecision>
__global__ void __launch_bounds__(kFewWarps* kWarp, 1)
    gram_few_kernel(const float* const* rows, int64_t S, GramPlan plan, int64_t first,
                    double* partials, int32_t* found) {
  using T = Few<kGroups, kSmall>;
  extern __shared__ float4 shared[];
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int own = warp % kChunkWarps, in_block = warp / kChunkWarps;
  const int64_t segment = first + blockIdx.y, columns = plan.columns_of(segment);
  const Partition part = plan.part_of(segment);
  const int shared_row = kGroups == 1 ? shared_rows(S) : 8 * kGroups;  // rows of a chunk
  auto* table = reinterpret_cast<const float**>(shared);
  for (int v = threadIdx.x; v < 8 * kGroups; v += blockDim.x)
    table[v] =
        rows[at_most(v % shared_row, S - 1)] + segment * plan.segment + v / shared_row * part.chunk;
  if (blockIdx.x == 0 && threadIdx.x < kFound) found[blockIdx.y * kFound + threadIdx.x] = 0;
  __syncthreads();

  // The first chunk, and how many: all but the last one of a segment have part.chunk columns.
  const int64_t chunk = (int64_t{blockIdx.x} * kFewPairs + in_block) * (8 * kGroups / shared_row);
  const int chunks =
      static_cast<int>(at_least(at_most(8 * kGroups / shared_row, part.chunks - chunk), 0));
  const int64_t begin = chunk * part.chunk, end = at_most(begin + part.chunk, columns);
  // The columns that all chunks have.
  const int64_t whole = at_most(end, columns - (chunks - 1) * part.chunk);
  // The blocks of columns of a chunk, and those of this warp: own, own + 2, ...
  const int blocks = chunks > 0 ? static_cast<int>(ceil_div(end - begin, kBlockColumns)) : 0;
  float4* ring = shared + (T::kTableBytes + warp * T::kRingBytes) / int{sizeof(float4)};
  double* wide =
      reinterpret_cast<double*>(shared) +
      (T::kTableBytes + kFewWarps * T::kRingBytes + in_block * T::kSumBytes) / int{sizeof(double)} +
      lane;

  // The next stage to fetch: a column, a place in the ring, and how many stages of its block of
  // columns have been fetched. Rows past S are zeros. Only the last stages of a row need to know
  // where it ends. Past the last stage, an empty group of copies is committed, so that wait_group
  // still counts right.
  int64_t coming = begin + own * kBlockColumns;
  int coming_place = 0, fetched = 0;
  // In access n of a row group, a lane has row n * kAccessRows + line.row of it.
  const LineAccess line(lane, T::kLanes, kGroups);
  const auto is_there = [&](int v) {
    return kGroups == 1 ? v / shared_row < chunks && v % shared_row < S : v < S;
  };
  // Columns of row v from `from` on. A row of a later chunk ends at an earlier column, counted from
  // that of row 0.
  const auto columns_left = [&](int v, int64_t from) -> int64_t {
    return is_there(v) ? columns - (kGroups == 1 ? v / shared_row : 0) * part.chunk - from : 0;
  };
  const auto fetch = [&] {
    float4* const to = ring + coming_place * T::kStageVectors * kWarp + line.target;
    if (kBytes > 4 && coming + T::kStageColumns <= whole) {
      constexpr int kFetched = kBytes == 8 && kGroups >= 5 ? 1 : kGroups;  // as registers allow
#pragma unroll(kFetched)
      for (int group = 0; group < kGroups; ++group)
#pragma unroll
        for (int n = 0; n < T::kAccesses; ++n) {
          const int row = line.row + group * 8 + n * T::kAccessRows;
          const int valid = is_there(row) ? 4 : 0;
          const float* from = table[kGroups > 1 || valid > 0 ? row : 0] + coming + line.column;
#pragma unroll
          for (int step = 0; step < T::kSteps; step += T::kAccesses)
            copy_async<kBytes>(to + (step * kGroups + group) * kWarp + n * T::kAccessRows * 4,
                               from + step * kStep, valid);
        }
    } else if (coming < end) {
#pragma unroll 1
      for (int v = 0; v < T::kStageVectors; ++v) {
        const int group = v % kGroups, n = v / kGroups % T::kAccesses;
        const int step = v / kGroups / T::kAccesses * T::kAccesses;
        const int row = line.row + group * 8 + n * T::kAccessRows;
        const int64_t column = coming + step * kStep + line.column;
        const int64_t valid = columns_left(row, column);
        copy_async<4>(to + (step * kGroups + group) * kWarp + n * T::kAccessRows * 4,
                      valid > 0 ? table[row] + column : table[0], valid);
      }
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
    coming += T::kStageColumns;
    if (++fetched == T::kBlockStages) {
      fetched = 0;
      coming += (kChunkWarps - 1) * kBlockColumns;
    }
    coming_place = coming_place + 1 == T::kStages ? 0 : coming_place + 1;
  };

  float sums[T::kSums] = {};
  if (own == 0)
#pragma unroll
    for (int n = 0; n < T::kSums; ++n) wide[n * kWarp] = 0.0;
  if (own < blocks)
#pragma unroll
    for (int stage = 0; stage < T::kStages - 1; ++stage) fetch();

  // Barriers of a chunk: the warp that names it has added a block of columns.
  const int added = 1 + in_block * kChunkWarps;
  int place = 0;                                           // of this stage in the ring
  constexpr int kTogether = kGroups >= 7 ? 1 : T::kSteps;  // steps, as registers allow
  for (int block = own; block < blocks; block += kChunkWarps) {
    const int64_t left = end - begin - int64_t{block} * kBlockColumns;
    const int stages = static_cast<int>(at_most(ceil_div(left, T::kStageColumns), T::kBlockStages));
    for (int stage = 0; stage < stages; ++stage) {
      asm volatile("cp.async.wait_group %0;" ::"n"(T::kStages - 2) : "memory");
      __syncwarp();  // for what other lanes have copied, and read
      fetch();       // overwrites the stage before this one, which has been read
#pragma unroll(kTogether)
      for (int step = 0; step < T::kSteps; ++step) {
        constexpr int kUsed = 2 * T::kStrips;  // the last one may be zeros
        OperandB<Products<kPrecision>::kWords> groups[kUsed] = {};
#pragma unroll
        for (int group = 0; group < kGroups; ++group)
          Products<kPrecision>::split(
              ring[(place * T::kStageVectors + step * kGroups + group) * kWarp + lane],
              groups[group].at);
#pragma unroll
        for (int a = 0; a < T::kStrips; ++a)
#pragma unroll
          for (int b = 0; b <= at_most(2 * a + 1, kGroups - 1); ++b)
            add_step<kPrecision, T::kTileSums>(sums + T::kTileSums * few_tile(a, b),
                                               operand_a(groups[2 * a].at, groups[2 * a + 1].at),
                                               groups[b]);
      }
      place = place + 1 == T::kStages ? 0 : place + 1;
    }
    if (block > 0) wait_for_other(added + 1 - own);
    flush<T::kSums>(sums, wide, kWarp);
    if (block + 1 < blocks) announce(added + own);
  }
  __syncthreads();
  if (chunks == 0) return;
  double* out = partials + (blockIdx.y * plan.chunks() + chunk) * plan.slots;
  if constexpr (kGroups == 1) {
#pragma unroll
    for (int n = own; n < T::kSums; n += kChunkWarps) {
      const SharedSlot at = shared_slot(S, tile_entry(lane, n));
      if (at.chunk >= 0 && at.chunk < chunks)
        out[at.chunk * plan.slots + at.slot] = wide[n * kWarp];
    }
  } else {
#pragma unroll 4
    for (int n = own; n < T::kSums; n += kChunkWarps) out[n * kWarp + lane] = wide[n * kWarp];
  }
}

template <int kGroups, int kBytes, Precision kPrecision, bool kSmall = false>
cudaError_t launch(const float* const* rows, int64_t S, const GramPlan& plan, int64_t first,
                   int64_t count, double* partials, int32_t* found, cudaStream_t stream) {
  const auto kernel = gram_few_kernel<kGroups, kSmall, kBytes, kPrecision>;
  constexpr int kSharedBytes = Few<kGroups, kSmall>::kSharedBytes;
  if (cudaError_t error =
          cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes))
    return error;
  const dim3 grid(
      static_cast<unsigned>(ceil_div(plan.chunks(), int64_t{kFewPairs} * shared_chunks(S))),
      static_cast<unsigned>(count));
  kernel<<<grid, kFewWarps * kWarp, kSharedBytes, stream>>>(rows, S, plan, first, partials, found);
  return cudaGetLastError();
}

}  // namespace

cudaError_t gram_few(const float* const* rows, int64_t S, const GramPlan& plan, int64_t first,
                     int64_t count, double* partials, int32_t* found, Precision precision,
                     int width, cudaStream_t stream) {
  return with_precision(precision, [&](auto p) {
    return with_width(width, [&](auto w) {
      constexpr Precision kPrecision = decltype(p)::value;
      constexpr int kBytes = 4 * decltype(w)::value;
      const auto call = plan.groups == 1   ? launch<1, kBytes, kPrecision>
                        : plan.groups == 2 ? launch<2, kBytes, kPrecision>
                        : plan.groups == 3 ? launch<3, kBytes, kPrecision>
                        : plan.groups == 4 ? launch<4, kBytes, kPrecision>
                        : plan.groups == 5 ? launch<5, kBytes, kPrecision>
                        : plan.groups == 6 ? launch<6, kBytes, kPrecision>
                        : plan.groups == 7 ? launch<7, kBytes, kPrecision>
                        : plan.small       ? launch<8, kBytes, kPrecision, true>
                                           : launch<8, kBytes, kPrecision>;
      return call(rows, S, plan, first, count, partials, found, stream);
    });
  });
}

}  // namespace fastagg::cuda
