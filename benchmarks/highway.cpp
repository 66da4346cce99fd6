// SPDX-License-Identifier: Apache-2.0
// Two kernels with Google Highway, for highway.py: the tiles of `gram` off the diagonal, and a
// weighted sum of rows. They compute what highway_ours.cpp does with csrc/kernels/cpu/simd.h, in
// the same order. Highway includes this file once for each instruction set.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "highway.cpp"
#include <hwy/foreach_target.h>
// After it:
#include <hwy/cache_control.h>
#include <hwy/highway.h>

#include <cstdint>

#ifndef BENCHMARKS_HIGHWAY_ONCE
#define BENCHMARKS_HIGHWAY_ONCE
constexpr int kRows = 3;             // of a strip
constexpr int kSlots = 12;           // float64 sums of a tile, of which 9 are used
constexpr int64_t kPanel = 3 * 768;  // floats of a packed strip
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
HWY_INLINE void AddProducts(const float* a, const float* b, VF& s00, VF& s01, VF& s02, VF& s10,
                            VF& s11, VF& s12, VF& s20, VF& s21, VF& s22) {
  const F d;
  const size_t N = hn::Lanes(d);
  const VF x0 = hn::LoadU(d, a), x1 = hn::LoadU(d, a + N), x2 = hn::LoadU(d, a + 2 * N);
  const VF y0 = hn::LoadU(d, b);
  s00 = hn::MulAdd(x0, y0, s00);
  s10 = hn::MulAdd(x1, y0, s10);
  s20 = hn::MulAdd(x2, y0, s20);
  const VF y1 = hn::LoadU(d, b + N);
  s01 = hn::MulAdd(x0, y1, s01);
  s11 = hn::MulAdd(x1, y1, s11);
  s21 = hn::MulAdd(x2, y1, s21);
  const VF y2 = hn::LoadU(d, b + 2 * N);
  s02 = hn::MulAdd(x0, y2, s02);
  s12 = hn::MulAdd(x1, y2, s12);
  s22 = hn::MulAdd(x2, y2, s22);
}

// sums += the 3 x 3 products of two panels of `columns` columns, a multiple of 16.
HWY_INLINE void Tile(const float* a, const float* b, int64_t columns, double* sums) {
  const F d;
  const auto N = static_cast<int64_t>(hn::Lanes(d));
  for (int k = 0; k < kSlots; k += 8) hwy::Prefetch(sums + k);
  VF s00 = hn::Zero(d), s01 = s00, s02 = s00, s10 = s00, s11 = s00, s12 = s00, s20 = s00, s21 = s00,
     s22 = s00;
  for (int64_t k = 0; k < columns; k += 2 * N) {
    hwy::Prefetch(a + k);
    hwy::Prefetch(b + k);
    hwy::Prefetch(b + columns + k);
    AddProducts(a + k * kRows, b + k * kRows, s00, s01, s02, s10, s11, s12, s20, s21, s22);
    AddProducts(a + (k + N) * kRows, b + (k + N) * kRows, s00, s01, s02, s10, s11, s12, s20, s21,
                s22);
  }
  AddLanes(s00, s01, s02, s10, sums);
  AddLanes(s11, s12, s20, s21, sums + 4);
  AddLanes(s22, hn::Zero(d), hn::Zero(d), hn::Zero(d), sums + 8);
}

void Tiles(const float* panels, int64_t strips, int64_t columns, int64_t repeats, double* sums) {
  for (int64_t r = 0; r < repeats; ++r) {
    double* out = sums;
    for (int64_t I = 1; I < strips; ++I)
      for (int64_t J = 0; J < I; ++J, out += kSlots)
        Tile(panels + I * kPanel, panels + J * kPanel, columns, out);
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
void highway_tiles(const float* panels, int64_t strips, int64_t columns, int64_t repeats,
                   double* sums) {
  HWY_DYNAMIC_DISPATCH(highway_kernels::Tiles)(panels, strips, columns, repeats, sums);
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
