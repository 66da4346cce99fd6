// SPDX-License-Identifier: Apache-2.0
#include "../memory.h"

#include <cstring>

#include "magnitude.h"
#include "rounded_rows.h"
#include "row_peaks.h"
#include "streaming.h"

namespace fastagg::cpu {
namespace {

constexpr int kRows = 4;  // updates taken together, each with its memory row

// bfloat16_bits of W numbers.
template <int W>
FASTAGG_INLINE Vec<uint32_t, W> rounded_bits(const Vec<float, W>& x) {
  const Vec<uint32_t, W> bits = bits_of<W>(x);
  const Vec<uint32_t, W> rounded = bits + 0x7fffu + (bits >> 16 & 1u);
  return ((bits & 0x7fffffffu) > 0x7f800000u ? Vec<uint32_t, W>{} + 0x7fc00000u : rounded) &
         0xffff0000u;
}

// The upper halves of the numbers of two vectors, in order. They are joined in registers: to write
// two halves to memory and to read them as one vector makes the processor wait for the writes.
template <int W, int... I>
FASTAGG_INLINE Vec<uint16_t, 2 * W> upper_halves(const Vec<uint32_t, W>& first,
                                                 const Vec<uint32_t, W>& second,
                                                 std::integer_sequence<int, I...>) {
  Vec<uint16_t, 2 * W> a, b;
  std::memcpy(&a, &first, sizeof a);
  std::memcpy(&b, &second, sizeof b);
  return __builtin_shufflevector(a, b, (2 * I + 1)...);
}

// to = row rounded to Bfloat16, as floats, and kept = to, past the caches if `streamed`. kept may
// be nullptr.
template <int W, class Count>
FASTAGG_INLINE void round_step(const float* row, float* to, Bfloat16* kept, bool streamed,
                               Count count) {
  int64_t k = 0;
  for (; k + 2 * W <= count; k += 2 * W) {
    const Vec<uint32_t, W> first = rounded_bits<W>(load<W>(row + k)),
                           second = rounded_bits<W>(load<W>(row + k + W));
    std::memcpy(to + k, &first, sizeof first);
    std::memcpy(to + k + W, &second, sizeof second);
    if (!kept) continue;
    const auto both = upper_halves<W>(first, second, std::make_integer_sequence<int, 2 * W>());
    if (streamed) {
      Vec<float, W> bytes;
      std::memcpy(&bytes, &both, sizeof bytes);
      stream<W>(reinterpret_cast<float*>(kept + k), bytes);
    } else {
      std::memcpy(kept + k, &both, sizeof both);
    }
  }
  for (; k < count; ++k) {
    const uint32_t bits = bfloat16_bits(row[k]);
    to[k] = float_of_bits(bits);
    if (kept) kept[k].bits = static_cast<uint16_t>(bits >> 16);
  }
}

// sums = from + weight * (row - old) for n columns of G rows, as in memory_total; row is the update
// after rounding, which is kept. Raises the peaks.
//   faded    // of these columns
//   kept     // [G] or nullptr
//   scales   // [G] or nullptr
template <int G>
struct RememberRounded {
  template <int W>
  FASTAGG_INLINE static void run(double* sums, const double* from, const float* const* updates,
                                 const Bfloat16* const* memory, Bfloat16* const* kept,
                                 Transfer transfer, const double* weights, const FadedTotal& faded,
                                 const float* scales, int32_t* peaks, int64_t column, int64_t n) {
    Magnitude<W> largest[G];
    double w[G], faded_weights[G] = {};
    const FadedTotal other = {faded.out, faded_weights, faded.fading};
    const float* u[G];
    const Bfloat16* m[G];
    for (int g = 0; g < G; ++g) {
      w[g] = weights[g];
      if (faded.out) faded_weights[g] = faded.weights[g];
      u[g] = updates[g] + column;
      m[g] = memory[g] + column;
    }
    for_even_steps<W>(n, [&](int64_t begin, auto count) FASTAGG_INLINE_LAMBDA {
      if (transfer.fetched) {
        fetch_step(u, begin, count);
        fetch_step(m, begin, count);
      }
      alignas(64) float rows[G][kStep];
      alignas(64) float old[G][kStep];
      // Written out for each row: see Widen.
      unroll<G>([&](auto g) FASTAGG_INLINE_LAMBDA {
        const float* update = u[g] + begin;
        const Bfloat16* own = m[g] + begin;
        for (int64_t k = 0; k < count; ++k) old[g][k] = widened(own[k]);
        if (scales && scales[g] != 1.0f) {
          for (int64_t k = 0; k < count; ++k) rows[g][k] = update[k] * scales[g];
          update = rows[g];
        }
        round_step<W>(update, rows[g], kept ? kept[g] + column + begin : nullptr, transfer.streamed,
                      count);
        largest[g].add(rows[g], count);
      });
      add_both<W, G>(sums, from, rows, old, w, other, begin, count);
    });
    for (int g = 0; g < G; ++g) peaks[g] = std::max(peaks[g], largest[g].bits());
  }
};

struct RoundedTotal {
  template <int W>
  FASTAGG_INLINE static void run(double* out, int32_t* peaks, const double* total,
                                 const float* const* updates, const Bfloat16* const* memory,
                                 const double* weights, int64_t S, Bfloat16* const* kept,
                                 Transfer transfer, const FadedTotal& faded, const float* scales,
                                 int64_t column, int64_t n) {
    double* const sums = out + column;
    const double* from = total + column;
    const FadedTotal other = begin_faded(faded, from, column, n);
    if (S == 0) std::copy_n(from, n, sums);
    const auto take = [&](auto rows, int64_t s) FASTAGG_INLINE_LAMBDA {
      call<W, RememberRounded<decltype(rows)::value>>(
          sums, from, updates + s, memory + s, kept ? kept + s : nullptr, transfer, weights + s,
          part_of(other, s, 0), scales ? scales + s : nullptr, peaks + s, column, n);
      from = sums;
    };
    int64_t s = 0;
    for (; s + kRows <= S; s += kRows) take(std::integral_constant<int, kRows>(), s);
    for (; s + 2 <= S; s += 2) take(std::integral_constant<int, 2>(), s);
    for (; s < S; ++s) take(std::integral_constant<int, 1>(), s);
    if (transfer.streamed) finish_streams();
  }
};

}  // namespace

void rounded_total(double* out, float* peaks, const double* total, const float* const* updates,
                   const Bfloat16* const* memory, int64_t S, int64_t d, const double* weights,
                   Bfloat16* const* kept, const float* scales, const FadedTotal& faded,
                   const Parallel& parallel) {
  const Isa isa = current_isa();
  const int64_t bytes = (S * (kept ? 8 : 6) + (faded.out ? 24 : 16)) * d;
  const Transfer transfer = {should_fetch<float>(bytes), kept && should_stream(kept, S, bytes)};
  const Parallel team = parallel.for_work(bytes);
  const RowPeaks row_peaks(S, team);
  for_blocks(d, block_columns(d, team.workers), team, [&](int64_t column, int64_t n, int worker) {
    dispatch<RoundedTotal>(isa, out, row_peaks.of(worker), total, updates, memory, weights, S, kept,
                           transfer, faded, scales, column, n);
  });
  row_peaks.write(peaks);
}

}  // namespace fastagg::cpu
