// SPDX-License-Identifier: Apache-2.0
#include "../sketch.h"

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "../elements.h"
#include "scratch.h"
#include "simd.h"

namespace fastagg::cpu {
namespace {

// Buckets that are handled together: a cache line of floats, and the words of a unit.
constexpr int64_t kLanes = kUnitWords;

// Columns ahead of the current ones. The accesses are sequential, but hardware prefetchers stop at
// the end of a page.
constexpr int64_t kAhead = 1024;

// sums[q] += the number of bucket q, negated if its sign says so, for n buckets from `first` on:
// the numbers from[0], ..., from[n - 1]. n and `first` are multiples of kLanes.
template <int W>
FASTAGG_INLINE void add_buckets(double* sums, double* squares, const float* from, int64_t first,
                                int64_t n, const uint32_t* words) {
  constexpr int kParts = kLanes / W, kHalf = W / 2;
  Vec<double, kHalf> square[2 * kParts];
  unroll<2 * kParts>([&](auto i)
                         FASTAGG_INLINE_LAMBDA { square[i] = load<kHalf>(squares + i * kHalf); });
  for (int64_t q = first; q < first + n;) {
    const int64_t unit_end = std::min((q / kUnitBuckets + 1) * kUnitBuckets, first + n);
    const auto shift = static_cast<uint32_t>(q % kUnitBuckets / kLanes);
    Vec<uint32_t, W> signs[kParts];
    unroll<kParts>([&](auto p) FASTAGG_INLINE_LAMBDA {
      signs[p] = load<W>(words + q / kUnitBuckets * kUnitWords + p * W) << shift;
    });
    for (; q < unit_end; q += kLanes) {
      const float* x = from + (q - first);
      prefetch(x, kAhead);
      unroll<kParts>([&](auto p) FASTAGG_INLINE_LAMBDA {
        Vec<uint32_t, W> bits;
        std::memcpy(&bits, x + p * W, sizeof bits);
        bits ^= signs[p] & 0x80000000u;
        signs[p] += signs[p];
        float numbers[W];
        std::memcpy(numbers, &bits, sizeof bits);
        unroll<2>([&](auto h) FASTAGG_INLINE_LAMBDA {
          const auto wide = load_double<kHalf>(numbers + h * kHalf);
          double* sum = sums + q + p * W + h * kHalf;
          store<kHalf>(sum, load<kHalf>(sum) + wide);
          square[2 * p + h] += wide * wide;
        });
      });
    }
  }
  unroll<2 * kParts>([&](auto i)
                         FASTAGG_INLINE_LAMBDA { store<kHalf>(squares + i * kHalf, square[i]); });
}

// Adds block b, k columns, to k buckets.
template <int W>
FASTAGG_INLINE void add_block(double* sums, double* squares, const float* x, int64_t k,
                              uint64_t seed, uint64_t b, uint32_t* words) {
  const uint64_t first = first_output(b, k) + 1;
  for (int64_t i = 0; i < kUnitOutputs * sketch_units(k); ++i) {
    const uint64_t both = split_mix(seed, first + i);
    words[2 * i] = static_cast<uint32_t>(both);
    words[2 * i + 1] = static_cast<uint32_t>(both >> 32);
  }
  // Columns [0, k - turn) go to the buckets from `turn` on, the others to those from 0 on. The
  // lanes around `turn` have both the first columns and the last ones.
  const int64_t turn = rotation(seed, b, k);
  const int64_t around = turn / kLanes * kLanes, inside = turn - around;
  int64_t next = turn;  // the first bucket whose lanes are whole
  if (inside > 0) {
    float both[kLanes];
    for (int64_t l = 0; l < kLanes; ++l) both[l] = l < inside ? x[k - inside + l] : x[l - inside];
    add_buckets<W>(sums, squares, both, around, kLanes, words);
    next = around + kLanes;
  }
  add_buckets<W>(sums, squares, x + (next - turn), next, k - next, words);
  add_buckets<W>(sums, squares, x + (k - turn), 0, around, words);
}

// Adds n columns of a row, from column `begin` on.
struct SketchRow {
  template <int W, class T>
  FASTAGG_INLINE static void run(double* sums, double* square, const T* x, int64_t n, int64_t k,
                                 uint64_t seed, int64_t begin, float* part, uint32_t* words) {
    double lanes[kLanes] = {};
    for (int64_t done = 0; done < n;) {
      const int64_t b = (begin + done) / k, skipped = (begin + done) % k;
      const int64_t count = std::min(k - skipped, n - done);
      const T* from = x + done;
      const float* block = part;
      if (std::is_same_v<T, float> && count == k) {
        block = reinterpret_cast<const float*>(from);
      } else {  // convert it; a part of a block gets zeros for the rest
        std::fill_n(part, skipped, 0.0f);
        FASTAGG_WHOLE_VECTORS
        for (int64_t i = 0; i < count; ++i) part[skipped + i] = widened(from[i]);
        std::fill(part + skipped + count, part + k, 0.0f);
      }
      add_block<W>(sums, lanes, block, k, seed, static_cast<uint64_t>(b), words);
      done += count;
    }
    double sum = 0.0;
    for (double lane : lanes) sum += lane;
    *square += sum;
  }
};

}  // namespace

template <class T>
void sketch(double* out, double* squares, const T* const* rows, int64_t S, int64_t d, int64_t k,
            uint64_t seed, int64_t begin, const Parallel& parallel) {
  const Isa isa = current_isa();
  const Parallel team = parallel.for_work(S * d * int64_t{sizeof(T)});
  const int64_t words = kUnitWords * sketch_units(k);
  const int64_t room = k * int64_t{sizeof(float)} + words * int64_t{sizeof(uint32_t)};
  const Scratch scratch(team.workers * room);
  team.for_each(S, [&](int64_t s, int worker) {
    auto* const part = reinterpret_cast<float*>(scratch.as<char>() + worker * room);
    auto* const own = reinterpret_cast<uint32_t*>(part + k);
    dispatch<SketchRow>(isa, out + s * k, squares + s, rows[s], d, k, seed, begin, part, own);
  });
}

template void sketch(double*, double*, const float* const*, int64_t, int64_t, int64_t, uint64_t,
                     int64_t, const Parallel&);
template void sketch(double*, double*, const Bfloat16* const*, int64_t, int64_t, int64_t, uint64_t,
                     int64_t, const Parallel&);
template void sketch(double*, double*, const Half* const*, int64_t, int64_t, int64_t, uint64_t,
                     int64_t, const Parallel&);

}  // namespace fastagg::cpu
