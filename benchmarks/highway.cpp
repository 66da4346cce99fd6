// SPDX-License-Identifier: Apache-2.0
// Two kernels with Google Highway, for highway.py: the tiles of `gram` with AVX2, off the diagonal,
// and a weighted sum of rows. They compute what highway_ours.cpp does with csrc/kernels/cpu/simd.h,
// in the same order. Highway includes this file once for each instruction set.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "highway.cpp"
#include <hwy/foreach_target.h>
// After it:
#include <hwy/cache_control.h>
#include <hwy/highway.h>

#include <cstdint>

#ifndef BENCHMARKS_HIGHWAY_ONCE
#define BENCHMARKS_HIGHWAY_ONCE
constexpr int kRows = 4, kOthers = 3;  // of a tile
constexpr int kSlots = 12;             // float64 sums of a tile
constexpr int64_t kStride = 768;       // floats from one packed row to the next
#endif

HWY_BEFORE_NAMESPACE();
namespace highway_kernels {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using F = hn::ScalableTag<float>;
using VF = hn::Vec<F>;
using D = hn::ScalableTag<double>;

// ---- tiles --------------------------------------------------------------------------------------

// Adds the lanes of four vectors to sums[0 .. 3], the last two levels in float64.
#if HWY_MAX_BYTES >= 32 && !HWY_HAVE_SCALABLE
using F4 = hn::FixedTag<float, 4>;
using D4 = hn::FixedTag<double, 4>;

template <class Tag>
HWY_INLINE hn::Vec<F4> FoldToFour(Tag d, hn::Vec<Tag> v) {
  if constexpr (hn::MaxLanes(Tag()) > 4) {
    const hn::Half<Tag> half;
    return FoldToFour(half, hn::Add(hn::LowerHalf(half, v), hn::UpperHalf(half, v)));
  } else {
    (void)d;
    return v;
  }
}
HWY_INLINE hn::Vec<D4> AddPairs(VF a, VF b) {
  const F d;
  const D4 d4;
  const auto wide_a = hn::PromoteTo(d4, FoldToFour(d, a)),
             wide_b = hn::PromoteTo(d4, FoldToFour(d, b));
  return hn::Add(hn::InterleaveLower(d4, wide_a, wide_b), hn::InterleaveUpper(d4, wide_a, wide_b));
}
HWY_INLINE void AddLanes(VF v0, VF v1, VF v2, VF v3, double* sums) {
  const D4 d4;
  const auto low = AddPairs(v0, v1), high = AddPairs(v2, v3);
  const auto four =
      hn::Add(hn::ConcatLowerLower(d4, high, low), hn::ConcatUpperUpper(d4, high, low));
  hn::StoreU(hn::Add(hn::LoadU(d4, sums), four), d4, sums);
}
#else
// A tag has no more lanes than a register, and SVE no constant number of lanes.
HWY_INLINE void AddLanes(VF v0, VF v1, VF v2, VF v3, double* sums) {
  const D d;
  const auto sum = [&](VF v) HWY_ATTR {
    return hn::ReduceSum(d, hn::Add(hn::PromoteLowerTo(d, v), hn::PromoteUpperTo(d, v)));
  };
  sums[0] += sum(v0);
  sums[1] += sum(v1);
  sums[2] += sum(v2);
  sums[3] += sum(v3);
}
#endif

// The accumulators are named one by one, because vectors of SVE cannot be elements of an array.
HWY_INLINE void AddRow(VF x, VF y0, VF y1, VF y2, VF& s0, VF& s1, VF& s2) {
  s0 = hn::MulAdd(x, y0, s0);
  s1 = hn::MulAdd(x, y1, s1);
  s2 = hn::MulAdd(x, y2, s2);
}

// sums += the 4 x 3 products of packed rows over `columns` columns, a multiple of 16.
HWY_INLINE void Tile(const float* a, const float* b, int64_t columns, double* sums) {
  const F d;
  const auto N = static_cast<int64_t>(hn::Lanes(d));
  for (int k = 0; k < kSlots; k += 8) hwy::Prefetch(sums + k);
  VF s00 = hn::Zero(d), s01 = s00, s02 = s00, s10 = s00, s11 = s00, s12 = s00, s20 = s00, s21 = s00,
     s22 = s00, s30 = s00, s31 = s00, s32 = s00;
  const auto add = [&](const float* x, const float* y) HWY_ATTR {
    const VF y0 = hn::LoadU(d, y), y1 = hn::LoadU(d, y + kStride),
             y2 = hn::LoadU(d, y + 2 * kStride);
    AddRow(hn::LoadU(d, x), y0, y1, y2, s00, s01, s02);
    AddRow(hn::LoadU(d, x + kStride), y0, y1, y2, s10, s11, s12);
    AddRow(hn::LoadU(d, x + 2 * kStride), y0, y1, y2, s20, s21, s22);
    AddRow(hn::LoadU(d, x + 3 * kStride), y0, y1, y2, s30, s31, s32);
  };
  for (int64_t k = 0; k < columns; k += 2 * N) {
    hwy::Prefetch(a + k);
    hwy::Prefetch(b + k);
    hwy::Prefetch(b + columns + k);
    add(a + k, b + k);
    add(a + k + N, b + k + N);
  }
  AddLanes(s00, s01, s02, s10, sums);
  AddLanes(s11, s12, s20, s21, sums + 4);
  AddLanes(s22, s30, s31, s32, sums + 8);
}

void Tiles(const float* packed, int64_t rows, int64_t columns, int64_t repeats, double* sums) {
  for (int64_t r = 0; r < repeats; ++r) {
    double* out = sums;
    for (int64_t i = 0; i < rows; i += kRows)
      for (int64_t j = 0; j < rows; j += kOthers, out += kSlots)
        Tile(packed + i * kStride, packed + j * kStride, columns, out);
  }
}

#ifndef TILES_ONLY

// ---- weighted sum of rows -----------------------------------------------------------------------

// sums[k] += sum_g weights[g] * rows[g][column + k] for k in [0, n), float32 in the group.
template <int G>
HWY_INLINE void AddGroup(const float* const* rows, const float* weights, int64_t column, int64_t n,
                         double* HWY_RESTRICT sums) {
  const F d;
  const D dd;
  const auto N = static_cast<int64_t>(hn::Lanes(d)), half = static_cast<int64_t>(hn::Lanes(dd));
  const float* row[G];
  float w[G];
  for (int g = 0; g < G; ++g) {
    row[g] = rows[g] + column;
    w[g] = weights[g];
  }
  const auto add = [&](int64_t k) HWY_ATTR {
    // As GCC contracts w0 x0 + w1 x1 + ...: the second product is the one that is rounded.
    constexpr int second = G > 1;
    VF sum = hn::Mul(hn::Set(d, w[second]), hn::LoadU(d, row[second] + k));
    if (G > 1) sum = hn::MulAdd(hn::Set(d, w[0]), hn::LoadU(d, row[0] + k), sum);
    for (int g = 2; g < G; ++g) sum = hn::MulAdd(hn::Set(d, w[g]), hn::LoadU(d, row[g] + k), sum);
    double* to = sums + k;
    hn::StoreU(hn::Add(hn::LoadU(dd, to), hn::PromoteLowerTo(dd, sum)), dd, to);
    hn::StoreU(hn::Add(hn::LoadU(dd, to + half), hn::PromoteUpperTo(dd, sum)), dd, to + half);
  };
  int64_t k = 0;
  for (; k + N <= n; k += N) add(k);
  for (; k < n; ++k) {
    float sum = w[0] * row[0][k];
    for (int g = 1; g < G; ++g) sum += w[g] * row[g][k];
    sums[k] += static_cast<double>(sum);
  }
}

void Rows(float* out, const float* const* rows, int64_t S, const float* weights, double factor,
          int64_t column, int64_t n, double* HWY_RESTRICT sums) {
  const D dd;
  const hn::Rebind<float, D> narrow;
  const auto half = static_cast<int64_t>(hn::Lanes(dd));
  for (int64_t k = 0; k < n; ++k) sums[k] = 0.0;
  int64_t s = 0;
  for (; s + 8 <= S; s += 8) AddGroup<8>(rows + s, weights + s, column, n, sums);
  for (; s + 4 <= S; s += 4) AddGroup<4>(rows + s, weights + s, column, n, sums);
  for (; s + 2 <= S; s += 2) AddGroup<2>(rows + s, weights + s, column, n, sums);
  for (; s < S; ++s) AddGroup<1>(rows + s, weights + s, column, n, sums);
  int64_t k = 0;
  for (; k + half <= n; k += half) {
    const auto scaled = hn::Mul(hn::Set(dd, factor), hn::LoadU(dd, sums + k));
    hn::StoreU(hn::DemoteTo(narrow, scaled), narrow, out + column + k);
  }
  for (; k < n; ++k) out[column + k] = static_cast<float>(factor * sums[k]);
}
#endif

}  // namespace HWY_NAMESPACE
}  // namespace highway_kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace highway_kernels {
HWY_EXPORT(Tiles);
#ifndef TILES_ONLY
HWY_EXPORT(Rows);
#endif
}  // namespace highway_kernels

extern "C" {

int highway_rows_of_strip() {
  return kRows;
}
int highway_others_of_tile() {
  return kOthers;
}
int highway_slots() {
  return kSlots;
}
int highway_slot(int product) {
  return product;
}
// Later calls use AVX2, also where there is something better. Returns the name of the target.
const char* highway_use_avx2() {
  hwy::DisableTargets(~(HWY_AVX2 | HWY_SSE2));
  hwy::GetChosenTarget().Update(hwy::SupportedTargets());
  return hwy::TargetName(hwy::SupportedTargets() & -hwy::SupportedTargets());
}
void highway_tiles(const float* packed, int64_t rows, int64_t columns, int64_t repeats,
                   double* sums) {
  HWY_DYNAMIC_DISPATCH(highway_kernels::Tiles)(packed, rows, columns, repeats, sums);
}
#ifndef TILES_ONLY
void highway_weighted_sum(float* out, const float* const* rows, int64_t S, int64_t d,
                          const float* quotients, double factor, double* memory, int64_t block) {
  for (int64_t column = (d - 1) / block * block; column >= 0; column -= block)
    HWY_DYNAMIC_DISPATCH(highway_kernels::Rows)
  (out, rows, S, quotients, factor, column, d - column < block ? d - column : block, memory);
}
#endif
}
#endif  // HWY_ONCE
