// SPDX-License-Identifier: Apache-2.0
#include "../memory.h"

#include <type_traits>

#include "apply.h"
#include "faded.h"
#include "magnitude.h"
#include "row_blocks.h"
#include "row_peaks.h"
#include "streaming.h"

namespace fastagg::cpu {
namespace {

constexpr int kRows = 4;  // updates taken together, each with its memory row; 1, 2, 8 were slower

// What remember_step does with the new rows. Streamed rows go past the caches.
enum class Keep { kNothing, kStore, kStream };

// sums = from + weight * (row - old) for n columns of G rows, in ascending order of rows; kept =
// row; and peaks = the largest magnitudes of updates. With kFaded, adds faded.weight * (row -
// faded.fading * old) to faded.out as well. A row or old row that is computed here (params +
// update, reference + memory) is rounded to float32 before it is used, so `sums` stay the sums of
// what memory holds. `kept` may be `memory`, and `from` may be `sums`; otherwise no two arguments
// overlap.
//
// It is one loop, so that the loads of the next columns overlap the stores of these.
template <int W, int G, bool kModels, bool kReference, bool kFaded, Keep kKeep>
FASTAGG_INLINE void remember_step(double* sums, const double* from, const float* params,
                                  const float* const (&update)[G], const float* const (&memory)[G],
                                  const float* const (&reference)[G], float* const (&kept)[G],
                                  const double* weights, const FadedTotal& faded,
                                  Magnitude<W> (&peaks)[G], int64_t n) {
  constexpr int kHalf = W / 2;
  using Floats = Vec<float, W>;
  using Doubles = Vec<double, kHalf>;
  int64_t k = 0;
  for (; k + W <= n; k += W) {
    Doubles low = load<kHalf>(from + k), high = load<kHalf>(from + k + kHalf);
    Doubles faded_low, faded_high;
    if constexpr (kFaded) faded_low = load<kHalf>(faded.out + k);
    if constexpr (kFaded) faded_high = load<kHalf>(faded.out + k + kHalf);
    unroll<G>([&](auto g) FASTAGG_INLINE_LAMBDA {
      const Floats given = load<W>(update[g] + k);
      Floats row = given, old = load<W>(memory[g] + k);
      if constexpr (kModels) row = load<W>(params + k) + row;
      if constexpr (kReference) old = load<W>(reference[g] + k) + old;
      Doubles row_low, row_high, old_low, old_high;
      widen_halves<W>(bits_of<W>(row), &row_low, &row_high);
      widen_halves<W>(bits_of<W>(old), &old_low, &old_high);
      low += weights[g] * (row_low - old_low);
      high += weights[g] * (row_high - old_high);
      if constexpr (kFaded) {
        faded_low += faded.weights[g] * (row_low - faded.fading * old_low);
        faded_high += faded.weights[g] * (row_high - faded.fading * old_high);
      }
      peaks[g].add(given);
      if constexpr (kKeep == Keep::kStore) store<W>(kept[g] + k, row);
      if constexpr (kKeep == Keep::kStream) stream<W>(kept[g] + k, row);
    });
    store<kHalf>(sums + k, low);
    store<kHalf>(sums + k + kHalf, high);
    if constexpr (kFaded) store<kHalf>(faded.out + k, faded_low);
    if constexpr (kFaded) store<kHalf>(faded.out + k + kHalf, faded_high);
  }
  for (; k < n; ++k) {
    double sum = from[k], other = kFaded ? faded.out[k] : 0.0;
    for (int g = 0; g < G; ++g) {
      const float row = kModels ? params[k] + update[g][k] : update[g][k];
      const float old = kReference ? reference[g][k] + memory[g][k] : memory[g][k];
      const double new_row = row, old_row = old;
      sum += weights[g] * (new_row - old_row);
      if constexpr (kFaded) other += faded.weights[g] * (new_row - faded.fading * old_row);
      peaks[g].add(update[g][k]);
      if constexpr (kKeep != Keep::kNothing) kept[g][k] = row;
    }
    sums[k] = sum;
    if constexpr (kFaded) faded.out[k] = other;
  }
}

// The reference of rows that have none: adding zero changes no sum.
constexpr float kZeros[kRowColumns] = {};

// remember_step for n columns. They begin at `update_from` in rows of updates, at `memory_from` in
// rows of memory, and at `column` in all others. If `peaks` is given, raises each of them to the
// largest magnitude of its update.
//   faded        // `out` begins at the first of the columns; then there are no params and no
//                // references
//   params       // [d]: remember models; nullptr: remember updates
//   references   // [G], each may be nullptr, or nullptr
//   kept         // [G] or nullptr: nothing is kept
//   peaks        // [G] or nullptr
//   scales       // [G] or nullptr
template <int G>
struct Remember {
  template <int W>
  FASTAGG_INLINE static void run(double* sums, const double* from, const float* params,
                                 const float* const* updates, int64_t update_from,
                                 const float* const* memory, int64_t memory_from,
                                 const float* const* references, float* const* kept,
                                 Transfer transfer, const double* weights, FadedTotal faded,
                                 const float* scales, int32_t* peaks, int64_t column, int64_t n) {
    const float* u[G];
    const float* m[G];
    const float* r[G];
    float* out[G];
    double w[G], faded_weights[G] = {};
    bool referring = false;
    Magnitude<W> largest[G];
    for (int g = 0; g < G; ++g) {
      u[g] = updates[g] + update_from;
      m[g] = memory[g] + memory_from;
      r[g] = references && references[g] ? references[g] + column : kZeros;
      out[g] = kept ? kept[g] + column : nullptr;
      w[g] = weights[g];
      if (faded.out) faded_weights[g] = faded.weights[g];
      referring = referring || r[g] != kZeros;
    }
    const float* p = params ? params + column : nullptr;
    for_even_steps<W>(n, [&](int64_t begin, auto count) FASTAGG_INLINE_LAMBDA {
      const float* update[G];
      const float* own[G];
      const float* reference[G];
      float* target[G] = {};
      float update_room[G][kStep];
      if (transfer.fetched) {
        fetch_step(u, begin, count);
        fetch_step(m, begin, count);
      }
      widen_step(update, u, begin, count, update_room, scales);
      for (int g = 0; g < G; ++g) {
        own[g] = m[g] + begin;
        reference[g] = r[g] + begin;
        target[g] = kept ? out[g] + begin : nullptr;
      }
      double* sum = sums + begin;
      const double* earlier = from + begin;
      const float* base = p ? p + begin : nullptr;
      FadedTotal other;
      if (faded.out) other = {faded.out + begin, faded_weights, faded.fading};
      const auto step = [&](auto models, auto refers, auto fades) FASTAGG_INLINE_LAMBDA {
        constexpr bool kModels = decltype(models)::value, kReference = decltype(refers)::value;
        const auto run = [&](auto keep) FASTAGG_INLINE_LAMBDA {
          remember_step<W, G, kModels, kReference, fades(), keep()>(
              sum, earlier, base, update, own, reference, target, w, other, largest, count);
        };
        if (!kept) return run(std::integral_constant<Keep, Keep::kNothing>());
        if constexpr (!kReference)  // with references, rows are seldom copied
          if (transfer.streamed) return run(std::integral_constant<Keep, Keep::kStream>());
        run(std::integral_constant<Keep, Keep::kStore>());
      };
      constexpr std::true_type kYes;
      constexpr std::false_type kNo;
      if (faded.out)
        step(kNo, kNo, kYes);
      else if (p && referring)
        step(kYes, kYes, kNo);
      else if (p)
        step(kYes, kNo, kNo);
      else if (referring)
        step(kNo, kYes, kNo);
      else
        step(kNo, kNo, kNo);
    });
    if (peaks)
      for (int g = 0; g < G; ++g) peaks[g] = std::max(peaks[g], largest[g].bits());
  }
};

// Remember for n columns of S rows.
//   sums, earlier   // [n], sums = earlier + ...
//   faded           // of all columns
template <int W, class T, class Memory>
FASTAGG_INLINE void remember_all(double* sums, const double* earlier, const float* params,
                                 const T* const* updates, const Memory* const* memory,
                                 const float* const* references, float* const* kept,
                                 Transfer transfer, const double* weights, const FadedTotal& faded,
                                 const float* scales, int32_t* peaks, int64_t S, int64_t column,
                                 int64_t n) {
  const auto from = [&](auto* p, int64_t s) FASTAGG_INLINE_LAMBDA { return p ? p + s : nullptr; };
  const FadedTotal other = begin_faded(faded, earlier, column, n);
  const auto take = [&](auto rows, int64_t s) FASTAGG_INLINE_LAMBDA {
    constexpr int G = decltype(rows)::value;
    const auto take_updates = [&](const float* const* u, int64_t u_from, int64_t u_begin,
                                  int64_t u_count) FASTAGG_INLINE_LAMBDA {
      const auto take_memory = [&](const float* const* m, int64_t m_from, int64_t m_begin,
                                   int64_t count) FASTAGG_INLINE_LAMBDA {
        const int64_t begin = u_begin + m_begin;
        call<W, Remember<G>>(sums + begin, earlier + begin, params, u, u_from + m_begin, m, m_from,
                             from(references, s), from(kept, s), transfer, weights + s,
                             part_of(other, s, begin), from(scales, s), from(peaks, s),
                             column + begin, count);
      };
      for_widened<W, G>(memory + s, column + u_begin, u_count, take_memory);
    };
    for_widened<W, G>(updates + s, column, n, take_updates);
    earlier = sums;
  };
  if (S == 0 && earlier != sums) std::copy_n(earlier, n, sums);
  int64_t s = 0;
  for (; s + kRows <= S; s += kRows) take(std::integral_constant<int, kRows>(), s);
  for (; s + 2 <= S; s += 2) take(std::integral_constant<int, 2>(), s);
  for (; s < S; ++s) take(std::integral_constant<int, 1>(), s);
  if (transfer.streamed) finish_streams();
}

struct MemoryUpdate {
  template <int W, class T>
  FASTAGG_INLINE static void run(float* params, double* total, const T* const* updates,
                                 float* const* memory, Transfer transfer, const double* weights,
                                 int64_t S, double lr, double norm, bool models, int64_t column,
                                 int64_t n) {
    const float* const* old = memory;
    double* const sums = total + column;
    remember_all<W>(sums, sums, models ? params : nullptr, updates, old, nullptr, memory, transfer,
                    weights, {}, nullptr, nullptr, S, column, n);
    apply_total(params + column, total + column, n, lr, norm, models);
  }
};

struct MemoryTotal {
  template <int W, class T>
  FASTAGG_INLINE static void run(double* out, int32_t* peaks, const double* total,
                                 const T* const* updates, const T* const* memory,
                                 const float* const* references, const double* weights, int64_t S,
                                 const float* params, float* const* kept, Transfer transfer,
                                 const FadedTotal& faded, const float* scales, int64_t column,
                                 int64_t n) {
    remember_all<W>(out + column, total + column, params, updates, memory, references, kept,
                    transfer, weights, faded, scales, peaks, S, column, n);
  }
};

struct LerpTotal {
  template <int W>
  FASTAGG_INLINE static void run(double* total, const double* end, int64_t n, double weight) {
    if (weight < 0.5)
      for (int64_t k = 0; k < n; ++k) total[k] += weight * (end[k] - total[k]);
    else
      for (int64_t k = 0; k < n; ++k) total[k] = end[k] - (end[k] - total[k]) * (1.0 - weight);
  }
};

struct AddTotal {
  template <int W>
  FASTAGG_INLINE static void run(float* params, const double* total, int64_t n, double lr,
                                 double norm, bool models) {
    apply_total(params, total, n, lr, norm, models);
  }
};

}  // namespace

template <class T>
void memory_update(float* params, double* total, const T* const* updates, float* const* memory,
                   int64_t S, int64_t d, const double* weights, double lr, double norm, bool models,
                   const Parallel& parallel) {
  const Isa isa = current_isa();
  const int64_t bytes = (S * int64_t{8 + sizeof(T)} + 24) * d;
  const Transfer transfer = {should_fetch<T>(bytes), false};
  const Parallel team = parallel.for_work(bytes);
  for_blocks(d, block_columns(d, team.workers), team, [&](int64_t column, int64_t n, int) {
    dispatch<MemoryUpdate>(isa, params, total, updates, memory, transfer, weights, S, lr, norm,
                           models, column, n);
  });
}

template <class T>
void memory_total(double* out, float* peaks, const double* total, const T* const* updates,
                  const T* const* memory, const float* const* references, int64_t S, int64_t d,
                  const double* weights, const float* params, float* const* kept,
                  const float* scales, const FadedTotal& faded, const Parallel& parallel) {
  const Isa isa = current_isa();
  const int64_t bytes = (S * (kept ? 3 : 2) * int64_t{sizeof(T)} + (faded.out ? 24 : 16)) * d;
  const Transfer transfer = {should_fetch<T>(bytes), kept && should_stream(kept, S, bytes)};
  const Parallel team = parallel.for_work(bytes);
  const RowPeaks row_peaks(S, team);
  for_blocks(d, block_columns(d, team.workers), team, [&](int64_t column, int64_t n, int worker) {
    dispatch<MemoryTotal>(isa, out, row_peaks.of(worker), total, updates, memory, references,
                          weights, S, params, kept, transfer, faded, scales, column, n);
  });
  row_peaks.write(peaks);
}

void add_total(float* params, const double* total, int64_t d, double lr, double norm, bool models,
               const Parallel& parallel) {
  const Isa isa = current_isa();
  const Parallel team = parallel.for_work(16 * d);
  for_blocks(d, block_columns(d, team.workers), team, [&](int64_t column, int64_t n, int) {
    dispatch<AddTotal>(isa, params + column, total + column, n, lr, norm, models);
  });
}

void lerp_total(double* total, const double* end, int64_t d, double weight,
                const Parallel& parallel) {
  const Isa isa = current_isa();
  const Parallel team = parallel.for_work(24 * d);
  for_blocks(d, block_columns(d, team.workers), team, [&](int64_t column, int64_t n, int) {
    dispatch<LerpTotal>(isa, total + column, end + column, n, weight);
  });
}

template void memory_update(float*, double*, const float* const*, float* const*, int64_t, int64_t,
                            const double*, double, double, bool, const Parallel&);
template void memory_update(float*, double*, const Bfloat16* const*, float* const*, int64_t,
                            int64_t, const double*, double, double, bool, const Parallel&);
template void memory_update(float*, double*, const Half* const*, float* const*, int64_t, int64_t,
                            const double*, double, double, bool, const Parallel&);
template void memory_total(double*, float*, const double*, const float* const*, const float* const*,
                           const float* const*, int64_t, int64_t, const double*, const float*,
                           float* const*, const float*, const FadedTotal&, const Parallel&);
template void memory_total(double*, float*, const double*, const Bfloat16* const*,
                           const Bfloat16* const*, const float* const*, int64_t, int64_t,
                           const double*, const float*, float* const*, const float*,
                           const FadedTotal&, const Parallel&);
template void memory_total(double*, float*, const double*, const Half* const*, const Half* const*,
                           const float* const*, int64_t, int64_t, const double*, const float*,
                           float* const*, const float*, const FadedTotal&, const Parallel&);

}  // namespace fastagg::cpu
