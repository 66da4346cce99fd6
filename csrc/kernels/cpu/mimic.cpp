// SPDX-License-Identifier: Apache-2.0
#include "../mimic.h"

#include <type_traits>
#include <vector>

#include "../weight_scale.h"
#include "apply.h"
#include "magnitude.h"
#include "row_blocks.h"
#include "row_peaks.h"
#include "scratch.h"
#include "streaming.h"

namespace fastagg::cpu {
namespace {

constexpr int64_t kCacheBytes = 1 << 20;  // of L2, for the updates and corrections of a block

// Columns of a block: few enough that the second pass finds the block's 2 S rows in L2, but at
// least 2 KB of each row, because shorter streams cost more than reading from L3.
int64_t cached_columns(int64_t S, int64_t d, int workers) {
  const int64_t fitting = kCacheBytes / (8 * S) / kStep * kStep;
  return std::min(std::max<int64_t>(fitting, 512), block_columns(d, workers));
}

// to = from for n columns that do not overlap. (GCC would call memmove for each short piece.)
template <int W>
FASTAGG_INLINE void keep_row(float* to, const float* from, int64_t n) {
  int64_t k = 0;
  for (; k + W <= n; k += W) store<W>(to + k, load<W>(from + k));
  for (; k < n; ++k) to[k] = from[k];
}

// sums[k] += sum_g weights[g] * x[g][column + k] for G rows, in float32, with x[g] = rows[g], or
// references[g] - rows[g] where references[g] is given. If `peaks` is given, raises each of them to
// the largest magnitude of its row. If `scales` are given, rows are multiplied by them. If `kept`
// is given, copies each row there, past the caches if `streamed`.
//   rows         // [G] pointers to whole rows
//   references   // [G], each may be nullptr, or nullptr
//   peaks, kept, scales  // [G] or nullptr
//   weights      // [G], or nullptr: all are `equal`
template <int W, int G, class T>
FASTAGG_INLINE void add_group(double* __restrict sums, const T* const* rows,
                              const float* const* references, int32_t* peaks, float* const* kept,
                              bool streamed, const float* scales, const float* weights, float equal,
                              int64_t column, int64_t n) {
  const T* row[G];
  float weight[G];
  const float* reference[G];
  bool stored = true, referring = true;  // no row has a reference; every row has one
  Magnitude<W> largest[G];
  for (int g = 0; g < G; ++g) {
    row[g] = rows[g] + column;
    weight[g] = weights ? weights[g] : equal;
    reference[g] = references && references[g] ? references[g] + column : nullptr;
    stored = stored && !reference[g];
    referring = referring && reference[g];
  }
  for_steps(n, [&](int64_t begin, auto count) FASTAGG_INLINE_LAMBDA {
    const auto add = [&](const auto& element) FASTAGG_INLINE_LAMBDA {
      FASTAGG_WHOLE_VECTORS
      for (int64_t k = 0; k < count; ++k) {
        float sum = weight[0] * element(0, k);
        for (int g = 1; g < G; ++g) sum += weight[g] * element(g, k);
        sums[begin + k] += static_cast<double>(sum);
      }
    };
    const float* x[G];
    float room[G][kStep];
    widen_step(x, row, begin, count, room, scales);
    if (peaks)
      for (int g = 0; g < G; ++g) largest[g].add(x[g], count);
    if (kept && streamed)
      for (int g = 0; g < G; ++g) stream_row<W>(kept[g] + column + begin, nullptr, x[g], count);
    else if (kept)
      for (int g = 0; g < G; ++g) keep_row<W>(kept[g] + column + begin, x[g], count);
    if (stored) return add([&](int g, int64_t k) FASTAGG_INLINE_LAMBDA { return x[g][k]; });
    if (referring)
      return add([&](int g, int64_t k)
                     FASTAGG_INLINE_LAMBDA { return reference[g][begin + k] - x[g][k]; });
    float corrections[G][kStep];
    for (int g = 0; g < G; ++g)
      if (const float* r = reference[g])
        for (int64_t k = 0; k < count; ++k) corrections[g][k] = r[begin + k] - x[g][k];
      else
        for (int64_t k = 0; k < count; ++k) corrections[g][k] = x[g][k];
    add([&](int g, int64_t k) FASTAGG_INLINE_LAMBDA { return corrections[g][k]; });
  });
  if (peaks)
    for (int g = 0; g < G; ++g) peaks[g] = std::max(peaks[g], largest[g].bits());
}

// add_group for S rows, in groups of at most kGroup; float64 across groups.
template <int W, class T>
FASTAGG_INLINE void add_all(double* sums, const T* const* rows, const float* const* references,
                            int32_t* peaks, float* const* kept, bool streamed, const float* scales,
                            const float* weights, int64_t S, float equal, int64_t column,
                            int64_t n) {
  const auto from = [](auto* p, int64_t s) FASTAGG_INLINE_LAMBDA { return p ? p + s : nullptr; };
  const auto add = [&](auto group, int64_t s) FASTAGG_INLINE_LAMBDA {
    add_group<W, group()>(sums, rows + s, from(references, s), from(peaks, s), from(kept, s),
                          streamed, from(scales, s), from(weights, s), equal, column, n);
  };
  int64_t s = 0;
  for (; s + kGroup <= S; s += kGroup) add(std::integral_constant<int, kGroup>(), s);
  for (; s + 4 <= S; s += 4) add(std::integral_constant<int, 4>(), s);
  for (; s + 2 <= S; s += 2) add(std::integral_constant<int, 2>(), s);
  for (; s < S; ++s) add(std::integral_constant<int, 1>(), s);
  if (streamed) finish_streams();
}

// v[k] = 1/S sum_s (updates[s][column + k] + weights[s] c[s][column + k]) for n columns, and v
// rounded to float32. The updates are read last, because `mimic` reads them again and then finds
// them in a nearer cache; they are copied to `kept`, if that is given. Rows are multiplied by a
// power of two and by their weights in float32, and the rest of 1/S is a factor of the float64
// sums.
//   weights   // [S] weights * mean_quotient(S), or nullptr for weights 1
template <int W, class T, class Own>
FASTAGG_INLINE void block_mean(double* v, float* rounded, int32_t* peaks, const T* const* updates,
                               Own* const* corrections, const float* const* references,
                               const float* weights, float* const* kept, bool streamed,
                               const float* scales, int64_t S, int64_t column, int64_t n) {
  const float equal = mean_quotient(S);
  const double factor = 1.0 / (static_cast<double>(S) * equal);
  std::fill_n(v, n, 0.0);
  const std::remove_const_t<Own>* const* own = corrections;
  add_all<W>(v, own, references, nullptr, nullptr, false, nullptr, weights, S, equal, column, n);
  add_all<W>(v, updates, nullptr, peaks, kept, streamed, scales, nullptr, S, equal, column, n);
  for (int64_t k = 0; k < n; ++k) {
    v[k] *= factor;
    rounded[k] = static_cast<float>(v[k]);
  }
}

// corrections[s] = v - updates[s] for n columns. `rounded` is v of these columns in float32.
template <int W, bool kStream = false, class T>
FASTAGG_INLINE void write_corrections(float* const* corrections, const float* rounded,
                                      const T* const* updates, const float* scales, int64_t S,
                                      int64_t column, int64_t n) {
  for (int64_t s = S - 1; s >= 0; --s) {  // the row read last is in the nearest cache
    const T* u[1] = {updates[s] + column};
    float* c = corrections[s] + column;
    for_steps(n, [&](int64_t begin, auto count) FASTAGG_INLINE_LAMBDA {
      const float* x[1];
      float room[1][kStep];
      widen_step(x, u, begin, count, room, scales ? scales + s : nullptr);
      const float* v_step = rounded + begin;
      int64_t k = 0;
      for (; k + W <= count; k += W) {
        const Vec<float, W> difference = load<W>(v_step + k) - load<W>(x[0] + k);
        if constexpr (kStream)
          stream<W>(c + begin + k, difference);
        else
          store<W>(c + begin + k, difference);
      }
      for (; k < count; ++k) c[begin + k] = v_step[k] - x[0][k];
    });
  }
  if constexpr (kStream) finish_streams();
}

//   v, rounded   // [n] scratch
struct Mimic {
  template <int W, class T>
  FASTAGG_INLINE static void run(float* params, const T* const* updates, float* const* corrections,
                                 int64_t S, double lr, int64_t column, int64_t n, double* v,
                                 float* rounded) {
    block_mean<W>(v, rounded, nullptr, updates, corrections, nullptr, nullptr, nullptr, false,
                  nullptr, S, column, n);
    apply_total(params + column, v, n, lr, 1.0, false);
    write_corrections<W>(corrections, rounded, updates, nullptr, S, column, n);
  }
};

struct MimicMean {
  template <int W, class T>
  FASTAGG_INLINE static void run(double* v, float* rounded, int32_t* peaks, const T* const* updates,
                                 const T* const* corrections, const float* const* references,
                                 const float* weights, float* const* kept, bool copies,
                                 bool streamed, const float* scales, int64_t S, int64_t column,
                                 int64_t n) {
    float* const* copied = copies ? kept : nullptr;
    block_mean<W>(v + column, rounded + column, peaks, updates, corrections, references, weights,
                  copied, copied && streamed, scales, S, column, n);
    if (!kept || copies) return;
    if (streamed)
      write_corrections<W, true>(kept, rounded + column, updates, scales, S, column, n);
    else
      write_corrections<W>(kept, rounded + column, updates, scales, S, column, n);
  }
};

}  // namespace

template <class T>
void mimic(float* params, const T* const* updates, float* const* corrections, int64_t S, int64_t d,
           double lr, const Parallel& parallel) {
  if (S == 0) return;
  const Isa isa = current_isa();
  const Parallel team = parallel.for_work((S * int64_t{8 + sizeof(T)} + 8) * d);
  const int64_t columns = cached_columns(S, d, team.workers), used = team.workers * columns;
  const Scratch means(used * int64_t{sizeof(double)}), rounded(used * int64_t{sizeof(float)});
  for_blocks(d, columns, team, [&](int64_t column, int64_t n, int worker) {
    dispatch<Mimic>(isa, params, updates, corrections, S, lr, column, n,
                    means.as<double>() + worker * columns, rounded.as<float>() + worker * columns);
  });
}

template <class T>
void mimic_mean(double* v, float* rounded, float* peaks, const T* const* updates,
                const T* const* corrections, const float* const* references, const double* weights,
                float* const* kept, bool copies, const float* scales, int64_t S, int64_t d,
                const Parallel& parallel) {
  const Isa isa = current_isa();
  std::vector<float> quotients;
  for (int64_t s = 0; weights && s < S; ++s)
    quotients.push_back(static_cast<float>(weights[s] * mean_quotient(S)));
  const float* given = weights ? quotients.data() : nullptr;
  const int64_t bytes = (S * (kept ? 3 : 2) * int64_t{sizeof(T)} + 16) * d;
  const bool streamed = kept && should_stream(kept, S, bytes);
  const Parallel team = parallel.for_work(bytes);
  const RowPeaks row_peaks(S, team);
  const int64_t columns =
      kept && !copies ? cached_columns(S, d, team.workers) : block_columns(d, team.workers);
  for_blocks(d, columns, team, [&](int64_t column, int64_t n, int worker) {
    dispatch<MimicMean>(isa, v, rounded, row_peaks.of(worker), updates, corrections, references,
                        given, kept, copies, streamed, scales, S, column, n);
  });
  row_peaks.write(peaks);
}

template void mimic(float*, const float* const*, float* const*, int64_t, int64_t, double,
                    const Parallel&);
template void mimic(float*, const Bfloat16* const*, float* const*, int64_t, int64_t, double,
                    const Parallel&);
template void mimic(float*, const Half* const*, float* const*, int64_t, int64_t, double,
                    const Parallel&);
template void mimic_mean(double*, float*, float*, const float* const*, const float* const*,
                         const float* const*, const double*, float* const*, bool, const float*,
                         int64_t, int64_t, const Parallel&);
template void mimic_mean(double*, float*, float*, const Bfloat16* const*, const Bfloat16* const*,
                         const float* const*, const double*, float* const*, bool, const float*,
                         int64_t, int64_t, const Parallel&);
template void mimic_mean(double*, float*, float*, const Half* const*, const Half* const*,
                         const float* const*, const double*, float* const*, bool, const float*,
                         int64_t, int64_t, const Parallel&);

}  // namespace fastagg::cpu
