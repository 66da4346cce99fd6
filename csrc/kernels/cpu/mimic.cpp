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

// N floats at p: a vector, or a float if N is 1.
template <int N>
FASTAGG_INLINE auto floats_at(const float* p) {
  if constexpr (N == 1)
    return *p;
  else
    return load<N>(p);
}

// The float64 sums of n columns, over all groups of rows.
//   first     // whether the next group of rows is the first one, before which there are no values
//   rounded   // [n] or nullptr; given for the last group: values are multiplied by `factor`, and
//             // rounded is set to them as floats
struct Sums {
  double* values;
  bool first = false;
  float* rounded = nullptr;
  double factor = 1.0;

  FASTAGG_INLINE Sums from(int64_t k) const {
    return {values + k, first, rounded ? rounded + k : nullptr, factor};
  }

  // Adds N floats at column k.
  template <int N, class T>
  FASTAGG_INLINE void add(int64_t k, const T& x) const {
    double* const to = values + k;
    if constexpr (N == 1) {
      double sum = (first ? 0.0 : *to) + static_cast<double>(x);
      if (rounded) {
        sum *= factor;
        rounded[k] = static_cast<float>(sum);
      }
      *to = sum;
    } else {
      constexpr int kHalf = N / 2;
      Vec<double, kHalf> low, high;
      widen_halves<N>(bits_of<N>(x), &low, &high);
      if (first) {
        low += 0.0;  // -0 becomes 0, as in a sum that begins with 0
        high += 0.0;
      } else {
        low += load<kHalf>(to);
        high += load<kHalf>(to + kHalf);
      }
      if (rounded) {
        low *= factor;
        high *= factor;
        store<kHalf>(rounded + k, __builtin_convertvector(low, Vec<float, kHalf>));
        store<kHalf>(rounded + k + kHalf, __builtin_convertvector(high, Vec<float, kHalf>));
      }
      store<kHalf>(to, low);
      store<kHalf>(to + kHalf, high);
    }
  }
};

// to = x for N floats, past the caches.
template <int N, class T>
FASTAGG_INLINE void keep_far(float* to, const T& x) {
  if constexpr (N == 1)
    *to = x;
  else
    stream<N>(to, x);
}

// sums += sum_g weights[g] * element(g, k) for G rows in float32, and for the columns of a step of
// for_even_steps. If kStream, also peaks = the largest magnitudes of rows, and kept = rows, past
// the caches.
//   element   // (g, k, lanes) -> the floats of row g at column k, as of floats_at<lanes()>
//
// It takes one or more cache lines of a row before the next row. So streamed stores fill whole
// lines one after the other; half lines of eight rows in turn took twice as long with AVX2. With 16
// registers, it takes more, because the peaks of eight rows are not in registers all the time.
template <int W, int G, bool kStream, class Element, class Count>
FASTAGG_INLINE void add_step(const Sums& sums, const Element& element, const float* weights,
                             Magnitude<W>* peaks, float* const* kept, Count) {
  constexpr int kLanes = Count() % W == 0 ? W : 1;
  constexpr int kVectors = std::min<int>(Count() / kLanes, kRegisters<W> == 32 ? 16 / W : 8);
  constexpr std::integral_constant<int, kLanes> lanes;
  for (int64_t k = 0; k < Count(); k += kVectors * kLanes) {
    decltype(element(0, k, lanes)) sum[kVectors];
    unroll<G>([&](auto i) FASTAGG_INLINE_LAMBDA {
      constexpr int g = row_in_order<G>(i());
      Magnitude<W> peak;
      if constexpr (kStream) peak = peaks[g];
      unroll<kVectors>([&](auto v) FASTAGG_INLINE_LAMBDA {
        const int64_t at = k + v * kLanes;
        const auto row = element(g, at, lanes);
        add_product<W>(&sum[v], i == 0, weights[g], row);
        if constexpr (kStream) {
          peak.add(row);
          keep_far<kLanes>(kept[g] + at, row);
        }
      });
      if constexpr (kStream) peaks[g] = peak;
    });
    // Each sum ends here: a compiler that moves the last product into a branch of `add` does not
    // fuse it.
    unroll<kVectors>(
        [&](auto v) FASTAGG_INLINE_LAMBDA { sums.add<kLanes>(k + v * kLanes, opaque(sum[v])); });
  }
}

// What a pass over the updates does with each of them, besides adding it.
//   peaks    // [S] or nullptr: raised to the largest magnitudes of rows
//   kept     // [S] or nullptr: rows are copied there
//   scales   // [S] or nullptr: factors of rows
struct Extras {
  int32_t* peaks = nullptr;
  float* const* kept = nullptr;
  Transfer transfer;
  const float* scales = nullptr;

  FASTAGG_INLINE Extras from(int64_t s) const {
    return {peaks ? peaks + s : nullptr, kept ? kept + s : nullptr, transfer,
            scales ? scales + s : nullptr};
  }
};

// sums[k] += sum_g weights[g] * rows[g][from + k] for n columns of G rows, in float32.
//   column   // of extras.kept
template <int G>
struct AddRows {
  template <int W>
  FASTAGG_INLINE static void run(Sums sums, const float* const* rows, int64_t from,
                                 const float* weights, Extras extras, int64_t column, int64_t n) {
    const float* row[G];
    float* out[G];
    float weight[G];
    Magnitude<W> largest[G];
    for (int g = 0; g < G; ++g) {
      row[g] = rows[g] + from;
      out[g] = extras.kept ? extras.kept[g] + column : nullptr;
      weight[g] = weights[g];
    }
    for_even_steps<W>(n, [&](int64_t begin, auto count) FASTAGG_INLINE_LAMBDA {
      const float* x[G];
      float* target[G];
      float room[G][kStep];
      widen_step(x, row, begin, count, room, extras.scales);
      for (int g = 0; g < G; ++g) target[g] = extras.kept ? out[g] + begin : nullptr;
      const auto element = [&](int g, int64_t k, auto lanes)
                               FASTAGG_INLINE_LAMBDA { return floats_at<lanes()>(x[g] + k); };
      if (extras.transfer.streamed) {
        // Only here: with rows in a cache, one more branch for each step showed in the time.
        if (extras.transfer.fetched) fetch_step(row, begin, count);
        return add_step<W, G, true>(sums.from(begin), element, weight, largest, target, count);
      }
      add_step<W, G, false>(sums.from(begin), element, weight, largest, target, count);
      for (int g = 0; extras.peaks && g < G; ++g) largest[g].add(x[g], count);
      for (int g = 0; extras.kept && g < G; ++g) keep_row<W>(target[g], x[g], count);
    });
    for (int g = 0; extras.peaks && g < G; ++g)
      extras.peaks[g] = std::max(extras.peaks[g], largest[g].bits());
  }
};

// The same for corrections, which are references[g] - rows[g] where references[g] is given.
//   references   // [G], each may be nullptr, or nullptr
//   column       // of references
template <int G>
struct AddCorrections {
  template <int W>
  FASTAGG_INLINE static void run(Sums sums, const float* const* rows, int64_t from,
                                 const float* const* references, bool fetched, const float* weights,
                                 int64_t column, int64_t n) {
    const float* row[G];
    float weight[G];
    const float* reference[G];
    bool stored = true, referring = true;  // no row has a reference; every row has one
    for (int g = 0; g < G; ++g) {
      row[g] = rows[g] + from;
      weight[g] = weights[g];
      reference[g] = references && references[g] ? references[g] + column : nullptr;
      stored = stored && !reference[g];
      referring = referring && reference[g];
    }
    if (stored) return call<W, AddRows<G>>(sums, rows, from, weights, Extras(), column, n);
    for_even_steps<W>(n, [&](int64_t begin, auto count) FASTAGG_INLINE_LAMBDA {
      if (fetched) fetch_step(row, begin, count);
      const auto add = [&](const auto& element) FASTAGG_INLINE_LAMBDA {
        add_step<W, G, false>(sums.from(begin), element, weight, nullptr, nullptr, count);
      };
      if (referring)
        return add([&](int g, int64_t k, auto lanes) FASTAGG_INLINE_LAMBDA {
          const int64_t at = begin + k;
          return floats_at<lanes()>(reference[g] + at) - floats_at<lanes()>(row[g] + at);
        });
      float corrections[G][kStep];
      for (int g = 0; g < G; ++g)
        if (const float* r = reference[g])
          for (int64_t k = 0; k < count; ++k) corrections[g][k] = r[begin + k] - row[g][begin + k];
        else
          for (int64_t k = 0; k < count; ++k) corrections[g][k] = row[g][begin + k];
      add([&](int g, int64_t k, auto lanes)
              FASTAGG_INLINE_LAMBDA { return floats_at<lanes()>(corrections[g] + k); });
    });
  }
};

// Calls add(G, s) with a constant G for each group of rows [s, s + G): at most kGroup of S rows,
// which are added in float32. Groups are added in float64.
template <class Add>
FASTAGG_INLINE void for_groups(int64_t S, const Add& add) {
  int64_t s = 0;
  for (; s + kGroup <= S; s += kGroup) add(std::integral_constant<int, kGroup>(), s);
  for (; s + 4 <= S; s += 4) add(std::integral_constant<int, 4>(), s);
  for (; s + 2 <= S; s += 2) add(std::integral_constant<int, 2>(), s);
  for (; s < S; ++s) add(std::integral_constant<int, 1>(), s);
}

// v[k] = 1/S sum_s (updates[s][column + k] + weights[s] c[s][column + k]) for n columns, and v
// rounded to float32. The updates are read last, because `mimic` reads them again and then finds
// them in a nearer cache; they are copied to `kept`, if that is given. Rows are multiplied by a
// power of two and by their weights in float32, and the rest of 1/S is a factor of the float64
// sums.
//   weights   // [S] weights * mean_quotient(S), or nullptr for weights 1
template <int W, class T, class Own>
FASTAGG_INLINE void block_mean(double* v, float* rounded, const T* const* updates,
                               Own* const* corrections, const float* const* references,
                               const float* weights, const Extras& extras, int64_t S,
                               int64_t column, int64_t n) {
  const float quotient = mean_quotient(S);
  const double factor = 1.0 / (static_cast<double>(S) * quotient);
  float equal[kGroup];
  std::fill_n(equal, kGroup, quotient);
  const float* const same = equal;
  const std::remove_const_t<Own>* const* own = corrections;
  for_groups(S, [&](auto group, int64_t s) FASTAGG_INLINE_LAMBDA {
    const float* const* theirs = references ? references + s : nullptr;
    const float* const factors = weights ? weights + s : same;
    const auto add = [&](const float* const* x, int64_t from, int64_t begin,
                         int64_t count) FASTAGG_INLINE_LAMBDA {
      const Sums sums = {v + begin, s == 0};
      call<W, AddCorrections<group()>>(sums, x, from, theirs, extras.transfer.fetched, factors,
                                       column + begin, count);
    };
    for_widened<W, group()>(own + s, column, n, add);
  });
  for_groups(S, [&](auto group, int64_t s) FASTAGG_INLINE_LAMBDA {
    const Extras these = extras.from(s);
    float* const last = s + group() == S ? rounded : nullptr;
    const auto add = [&](const float* const* x, int64_t from, int64_t begin,
                         int64_t count) FASTAGG_INLINE_LAMBDA {
      const Sums sums = Sums{v, false, last, factor}.from(begin);
      call<W, AddRows<group()>>(sums, x, from, same, these, column + begin, count);
    };
    for_widened<W, group()>(updates + s, column, n, add);
  });
  if (extras.transfer.streamed) finish_streams();
}

// corrections[s] = v - updates[s] for n columns. `rounded` is v of these columns in float32.
template <int W, bool kStream = false, class T>
FASTAGG_INLINE void write_corrections(float* const* corrections, const float* rounded,
                                      const T* const* updates, const float* scales, int64_t S,
                                      int64_t column, int64_t n) {
  for (int64_t s = S - 1; s >= 0; --s) {  // the row read last is in the nearest cache
    const T* u[1] = {updates[s] + column};
    float* c = corrections[s] + column;
    for_even_steps<W>(n, [&](int64_t begin, auto count) FASTAGG_INLINE_LAMBDA {
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
                                 Transfer transfer, int64_t S, double lr, int64_t column, int64_t n,
                                 double* v, float* rounded) {
    Extras extras;
    extras.transfer = transfer;
    block_mean<W>(v, rounded, updates, corrections, nullptr, nullptr, extras, S, column, n);
    apply_total(params + column, v, n, lr, 1.0, false);
    write_corrections<W>(corrections, rounded, updates, nullptr, S, column, n);
  }
};

struct MimicMean {
  template <int W, class T>
  FASTAGG_INLINE static void run(double* v, float* rounded, int32_t* peaks, const T* const* updates,
                                 const T* const* corrections, const float* const* references,
                                 const float* weights, float* const* kept, bool copies,
                                 Transfer transfer, const float* scales, int64_t S, int64_t column,
                                 int64_t n) {
    const Transfer reading = {transfer.fetched, copies && transfer.streamed};
    const Extras extras = {peaks, copies ? kept : nullptr, reading, scales};
    block_mean<W>(v + column, rounded + column, updates, corrections, references, weights, extras,
                  S, column, n);
    if (!kept || copies) return;
    if (transfer.streamed)
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
  const int64_t bytes = (S * int64_t{8 + sizeof(T)} + 8) * d;
  const Transfer transfer = {should_fetch<T>(bytes), false};
  const Parallel team = parallel.for_work(bytes);
  const int64_t columns = cached_columns(S, d, team.workers), used = team.workers * columns;
  const Scratch means(used * int64_t{sizeof(double)}), rounded(used * int64_t{sizeof(float)});
  for_blocks(d, columns, team, [&](int64_t column, int64_t n, int worker) {
    dispatch<Mimic>(isa, params, updates, corrections, transfer, S, lr, column, n,
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
  const Transfer transfer = {should_fetch<T>(bytes), kept && should_stream(kept, S, bytes)};
  const Parallel team = parallel.for_work(bytes);
  const RowPeaks row_peaks(S, team);
  const int64_t columns =
      kept && !copies ? cached_columns(S, d, team.workers) : block_columns(d, team.workers);
  for_blocks(d, columns, team, [&](int64_t column, int64_t n, int worker) {
    dispatch<MimicMean>(isa, v, rounded, row_peaks.of(worker), updates, corrections, references,
                        given, kept, copies, transfer, scales, S, column, n);
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
