// SPDX-License-Identifier: Apache-2.0
// Every CPU kernel on small operands, for valgrind: `make valgrind`. The kernels know nothing of
// torch, so this runs in seconds where a Python process would take an hour.
//
// Each row is a heap block of exactly its size, so that a read or write beyond its end is seen, and
// results are compared with plain loops, so that a result made from memory that was never written
// is seen. valgrind has no AVX-512: it sees the portable and the AVX2 instances of the templates
// (`make sanitize` runs the AVX-512 ones).
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <new>
#include <random>
#include <thread>
#include <vector>

#include "../../csrc/kernels/abs_max.h"
#include "../../csrc/kernels/cpu/simd.h"
#include "../../csrc/kernels/friends.h"
#include "../../csrc/kernels/gram.h"
#include "../../csrc/kernels/int8_rows.h"
#include "../../csrc/kernels/memory.h"
#include "../../csrc/kernels/mimic.h"
#include "../../csrc/kernels/moments.h"
#include "../../csrc/kernels/pair_gram.h"
#include "../../csrc/kernels/scores.h"
#include "../../csrc/kernels/sketch.h"
#include "../../csrc/kernels/sorted_columns.h"
#include "../../csrc/kernels/weighted_sum.h"

using namespace fastagg;

namespace {

int failures = 0;
std::mt19937 generator(1);

// Sums of products of normal numbers in float32, relative to the largest term.
void expect(double got, double right, double scale, const char* what) {
  if (std::abs(got - right) <= 1e-5 * scale) return;  // false for NaN, too
  ++failures;
  std::printf("FAILED: %s: expected %.9g, got %.9g\n", what, right, got);
}

// A task must not allocate: if an allocation failed, other workers could wait forever for the
// result of the task. (valgrind replaces operator new, so only the run without it counts.)
thread_local bool in_task = false;
std::atomic<int64_t> allocations_in_tasks{0};

void launch(int workers, void (*entry)(void*, int), void* context) {
  const auto run = [&](int worker) {
    in_task = true;
    entry(context, worker);
    in_task = false;
  };
  std::vector<std::thread> threads;
  for (int worker = 1; worker < workers; ++worker) threads.emplace_back(run, worker);
  run(0);
  for (auto& thread : threads) thread.join();
}

// S rows of d floats, each in a separate heap block.
class Rows {
 public:
  Rows(int64_t S, int64_t d) {
    std::normal_distribution<float> normal;
    for (int64_t s = 0; s < S; ++s) {
      blocks_.emplace_back(new float[d]);
      for (int64_t k = 0; k < d; ++k) blocks_.back()[k] = normal(generator);
      pointers_.push_back(blocks_.back().get());
    }
  }
  float* const* data() const { return pointers_.data(); }
  const float* const* read() const { return pointers_.data(); }
  float* operator[](int64_t s) const { return pointers_[s]; }

 private:
  std::vector<std::unique_ptr<float[]>> blocks_;
  std::vector<float*> pointers_;
};

void check_gram(int64_t S, int64_t d, const cpu::Parallel& parallel) {
  const Rows x(S, d);
  const std::unique_ptr<double[]> dense(new double[S * S]), masked(new double[S * S]);
  cpu::gram(x.read(), S, d, nullptr, dense.get(), parallel);
  std::vector<uint8_t> pairs(S * S);
  for (int64_t i = 0; i < S; ++i)
    for (int64_t j = 0; j < S; ++j) pairs[i * S + j] = i % 3 == j % 3 && (i + j) % 5 != 0;
  cpu::pair_gram(x.read(), S, d, pairs.data(), masked.get(), parallel);
  for (int64_t i = 0; i < S; ++i)
    for (int64_t j = 0; j < S; ++j) {
      double sum = 0.0;
      for (int64_t k = 0; k < d; ++k) sum += double{x[i][k]} * x[j][k];
      expect(dense[i * S + j], sum, static_cast<double>(d), "gram");
      const bool wanted = i == j || pairs[i * S + j];
      expect(masked[i * S + j], wanted ? dense[i * S + j] : 0.0, 0.0, "gram of pairs");
    }
  for (const int64_t C : {1, 2, 7, 20}) {  // few: in one pass over the rows
    if (C > S) break;
    std::vector<int64_t> changed(C);
    for (int64_t c = 0; c < C; ++c) changed[c] = S - 1 - c;
    const std::unique_ptr<double[]> some(new double[C * S]);
    cpu::gram_rows(x.read(), S, d, changed.data(), C, some.get(), parallel);
    for (int64_t c = 0; c < C; ++c)
      for (int64_t j = 0; j < S; ++j)
        expect(some[c * S + j], dense[changed[c] * S + j], 0.0, "rows of gram");
  }
  const std::unique_ptr<double[]> scores(new double[S * S]);
  cpu::cosine_scores(dense.get(), S, scores.get(), parallel);
  for (int64_t i = 0; i < S; ++i) expect(scores[i * S + i], 1.0, 1.0, "cosine_scores");
  cpu::distance_scores(dense.get(), S, scores.get(), parallel);
  for (int64_t i = 0; i < S; ++i) expect(scores[i * S + i], 0.0, 1.0, "distance_scores");
}

void check_rows(int64_t S, int64_t d, const cpu::Parallel& parallel) {
  const Rows x(S, d), memory(S, d), state(2, d);
  const std::vector<double> weights(S, 0.5);
  const std::unique_ptr<float[]> peaks(new float[S]);
  const auto scale = static_cast<double>(S + 1) * 10.0;

  cpu::abs_max(x.read(), S, d, peaks.get(), parallel);
  for (int64_t s = 0; s < S; ++s) {
    float peak = 0.0f;
    for (int64_t k = 0; k < d; ++k) peak = std::max(peak, std::abs(x[s][k]));
    expect(peaks[s], peak, 0.0, "abs_max");
  }

  constexpr int64_t kBuckets = 64;
  const std::unique_ptr<double[]> sketches(new double[S * kBuckets]()), squares(new double[S]());
  for (int64_t begin = 0; begin < d; begin += 1000) {  // also from the middle of a block
    std::vector<const float*> parts(S);
    for (int64_t s = 0; s < S; ++s) parts[s] = x[s] + begin;
    cpu::sketch(sketches.get(), squares.get(), parts.data(), S, std::min<int64_t>(1000, d - begin),
                kBuckets, 7, begin, parallel);
  }
  for (int64_t s = 0; s < S; ++s) {
    double square = 0.0, total_square = 0.0;
    for (int64_t k = 0; k < d; ++k) square += double{x[s][k]} * x[s][k];
    for (int64_t q = 0; q < kBuckets; ++q)
      total_square += sketches[s * kBuckets + q] * sketches[s * kBuckets + q];
    expect(squares[s], square, static_cast<double>(d), "squares of sketch");
    if (d <= kBuckets) expect(total_square, square, static_cast<double>(d), "sketch of one block");
  }

  const std::unique_ptr<float[]> mean_row(new float[d]);  // its old content is not read
  std::fill_n(sketches.get(), S * kBuckets, 0.0);
  std::fill_n(squares.get(), S, 0.0);
  cpu::sketch_and_sum(sketches.get(), squares.get(), mean_row.get(), x.read(), S, d, weights.data(),
                      kBuckets, 7, 5, parallel);

  std::vector<double> sum(d), old(d), total(d);
  for (int64_t k = 0; k < d; ++k)
    for (int64_t s = 0; s < S; ++s) {
      sum[k] += x[s][k];
      old[k] += memory[s][k];
    }
  const std::unique_ptr<float[]> out(new float[d]);  // with beta = 0 its content is not read
  cpu::weighted_sum(out.get(), x.read(), S, d, weights.data(), 0.0, parallel);
  for (int64_t k = 0; k < d; ++k) expect(out[k], 0.5 * sum[k], scale, "weighted_sum");
  for (int64_t k = 0; k < d; ++k) expect(mean_row[k], out[k], 0.0, "sum of sketch_and_sum");

  const std::unique_ptr<double[]> mean(new double[d]);
  const std::unique_ptr<float[]> rounded(new float[d]);
  std::vector<const float*> references(S, nullptr);
  references[0] = state[1];
  const Rows kept(S, d);
  cpu::mimic_mean(mean.get(), rounded.get(), peaks.get(), x.read(), memory.read(),
                  references.data(), nullptr, kept.data(), false, nullptr, S, d, parallel);
  for (int64_t k = 0; k < d; ++k) {
    const double first = double{state[1][k]} - 2.0 * memory[0][k];  // reference - row, not row
    expect(mean[k], (sum[k] + old[k] + first) / static_cast<double>(S), scale, "mimic_mean");
  }
  cpu::mimic_mean(mean.get(), rounded.get(), peaks.get(), x.read(), memory.read(), nullptr,
                  weights.data(), kept.data(), true, nullptr, S, d, parallel);  // weights are 0.5
  for (int64_t k = 0; k < d; ++k)
    expect(mean[k], (sum[k] + 0.5 * old[k]) / static_cast<double>(S), scale, "weighted mimic_mean");
  const std::vector<float> halves(S, 0.5f);
  for (bool copies : {false, true}) {
    cpu::mimic_mean(mean.get(), rounded.get(), peaks.get(), x.read(), memory.read(), nullptr,
                    nullptr, kept.data(), copies, halves.data(), S, d, parallel);
    for (int64_t k = 0; k < d; ++k) {
      const double last = 0.5 * x[S - 1][k];
      expect(mean[k], (0.5 * sum[k] + old[k]) / static_cast<double>(S), scale, "scaled mimic_mean");
      expect(kept[S - 1][k], copies ? last : rounded[k] - last, scale, "scaled mimic_mean, kept");
    }
  }

  const std::vector<float> before(state[0], state[0] + d);
  cpu::mimic(state[0], x.read(), memory.data(), S, d, 0.5, parallel);
  for (int64_t k = 0; k < d; ++k) {
    const double v = (sum[k] + old[k]) / static_cast<double>(S);
    expect(state[0][k], before[k] + 0.5 * v, scale, "mimic");
    expect(memory[S - 1][k], v - x[S - 1][k], scale, "mimic, corrections");
  }

  const std::unique_ptr<double[]> fresh(new double[d]), other(new double[d]);
  const FadedTotal faded = {other.get(), weights.data(), 0.5};
  std::vector<double> moved(d), halved(d), faint(d);
  for (int64_t k = 0; k < d; ++k)
    for (int64_t s = 0; s < S; ++s) {
      faint[k] += 0.5 * (x[s][k] - 0.5 * memory[s][k]);
      moved[k] += 0.5 * (double{x[s][k]} - memory[s][k]);
      halved[k] += 0.5 * (0.5 * x[s][k] - memory[s][k]);
    }
  cpu::memory_total(fresh.get(), peaks.get(), total.data(), x.read(), memory.read(), nullptr, S, d,
                    weights.data(), nullptr, kept.data(), halves.data(), {}, parallel);
  for (int64_t k = 0; k < d; ++k) {
    expect(fresh[k], halved[k], scale, "memory_total, scales");
    expect(kept[S - 1][k], 0.5f * x[S - 1][k], 0.0, "memory_total, scaled rows");
  }
  cpu::memory_total(fresh.get(), peaks.get(), total.data(), x.read(), memory.read(), nullptr, S, d,
                    weights.data(), nullptr, kept.data(), nullptr, faded, parallel);
  const std::vector<double> before_total = total;
  cpu::memory_update(state[0], total.data(), x.read(), memory.data(), S, d, weights.data(), 0.5,
                     1.0, false, parallel);
  for (int64_t k = 0; k < d; ++k) {
    expect(other[k], 0.5 * before_total[k] + faint[k], scale, "memory_total, faded");
    expect(fresh[k], moved[k], scale, "memory_total");
    expect(total[k], fresh[k], 0.0, "memory_update");
    expect(memory[S - 1][k], x[S - 1][k], 0.0, "memory_update, memory");
  }
  cpu::add_total(state[1], total.data(), d, 0.5, 1.0, true, parallel);

  const Rows moments(2, d);
  const std::vector<float> at(state[1], state[1] + d), m(moments[0], moments[0] + d);
  cpu::add_momentum(state[1], moments[0], x[0], d, 0.5, 0.25, true, 1.0, false, parallel);
  for (int64_t k = 0; k < d; ++k) {
    const double next = 0.25 * m[k] + x[0][k];
    expect(moments[0][k], next, scale, "add_momentum, m");
    expect(state[1][k], at[k] + 0.5 * (x[0][k] + 0.25 * next), scale, "add_momentum");
  }
  std::fill_n(moments[1], d, 1.0f);
  for (const SecondMoment kind :
       {SecondMoment::kAdagrad, SecondMoment::kAdam, SecondMoment::kYogi}) {
    const std::vector<float> first(moments[0], moments[0] + d), second(moments[1], moments[1] + d);
    const std::vector<float> from(state[1], state[1] + d);
    cpu::add_adaptive(state[1], moments[0], moments[1], total.data(), d, kind, 0.5, 0.25, 0.5, 0.5,
                      0.25, true, parallel);
    for (int64_t k = 0; k < d; ++k) {
      const double v = 0.25 * total[k] - from[k], q = v * v, s = second[k];
      const double next = kind == SecondMoment::kAdagrad ? s + q
                          : kind == SecondMoment::kAdam  ? 0.5 * s + 0.5 * q
                                                         : s + (q > s ? 0.5 * q : -0.5 * q);
      const double step = 0.25 * first[k] + 0.75 * v;
      expect(moments[0][k], step, scale, "add_adaptive, m");
      expect(moments[1][k], next, scale * scale, "add_adaptive, s");
      expect(state[1][k], from[k] + 0.5 * step / (std::sqrt(next) + 0.5), scale, "add_adaptive");
    }
  }
}

void check_int8_rows(int64_t S, int64_t d, const cpu::Parallel& parallel) {
  const Rows x(S, d), old(S, d), read(S, d), scales(3 * S, ceil_div(d, kScaleBlock));
  std::vector<std::unique_ptr<int8_t[]>> blocks;
  std::vector<int8_t*> numbers;
  for (int64_t s = 0; s < 3 * S; ++s) {
    blocks.emplace_back(new int8_t[d]);
    numbers.push_back(blocks.back().get());
  }
  const std::vector<double> weights(S, 0.5), total(d, 1.0);
  const std::unique_ptr<double[]> out(new double[d]), other(new double[d]);
  const FadedTotal faded = {other.get(), weights.data(), 1.0};  // so the sums are the same
  const std::unique_ptr<float[]> peaks(new float[S]);
  // Rows [0, S) are the updates, rows [S, 2 S) the memory; the pass keeps rows [2 S, 3 S).
  cpu::quantize(numbers.data(), scales.data(), x.read(), S, d, parallel);
  cpu::quantize(numbers.data() + S, scales.data() + S, old.read(), S, d, parallel);
  cpu::quantized_total(out.get(), peaks.get(), total.data(), x.read(), numbers.data() + S,
                       scales.read() + S, S, d, weights.data(), numbers.data() + 2 * S,
                       scales.data() + 2 * S, faded, parallel);
  cpu::dequantize(read.data(), numbers.data() + 2 * S, scales.read() + 2 * S, S, d, parallel);
  for (int64_t k = 0; k < d; ++k) {
    double sum = 1.0;
    for (int64_t s = 0; s < S; ++s) {
      expect(numbers[2 * S + s][k], numbers[s][k], 0.0, "quantized_total, numbers");
      expect(read[s][k], x[s][k], 0.501 * scales[s][k / kScaleBlock] * 1e5,
             "quantize");  // half a step
      sum += 0.5 *
             (read[s][k] - static_cast<double>(numbers[S + s][k]) * scales[S + s][k / kScaleBlock]);
    }
    expect(out[k], sum, 10.0 * static_cast<double>(S), "quantized_total");
    expect(other[k], out[k], 0.0, "quantized_total, faded");
  }
  for (int64_t s = 0; s < S; ++s) {
    float peak = 0.0f;
    for (int64_t k = 0; k < d; ++k) peak = std::max(peak, std::abs(read[s][k]));
    expect(peaks[s], peak, 0.0, "quantized_total, peaks");
  }
}

void check_bfloat16_rows(int64_t S, int64_t d, const cpu::Parallel& parallel) {
  const Rows x(S, d), old(S, d);
  std::vector<std::unique_ptr<Bfloat16[]>> blocks;
  std::vector<Bfloat16*> memory, kept;
  for (int64_t s = 0; s < S; ++s) {
    for (auto* rows : {&memory, &kept}) {
      blocks.emplace_back(new Bfloat16[d]);
      rows->push_back(blocks.back().get());
    }
    for (int64_t k = 0; k < d; ++k)
      memory[s][k].bits = static_cast<uint16_t>(bfloat16_bits(old[s][k]) >> 16);
  }
  const std::vector<double> weights(S, 0.5), total(d, 1.0);
  const std::unique_ptr<double[]> out(new double[d]), other(new double[d]);
  const FadedTotal faded = {other.get(), weights.data(), 1.0};  // so the sums are the same
  const std::unique_ptr<float[]> peaks(new float[S]);
  cpu::rounded_total(out.get(), peaks.get(), total.data(), x.read(), memory.data(), S, d,
                     weights.data(), kept.data(), nullptr, faded, parallel);
  std::vector<float> largest(S, 0.0f);
  for (int64_t k = 0; k < d; ++k) {
    double sum = 1.0;
    for (int64_t s = 0; s < S; ++s) {
      const float row = widened(kept[s][k]);
      expect(row, x[s][k], std::abs(x[s][k]) * 1e5 / 256, "rounded_total, rows");  // 2^-8 of it
      largest[s] = std::max(largest[s], std::abs(row));
      sum += 0.5 * (double{row} - widened(memory[s][k]));
    }
    expect(out[k], sum, static_cast<double>(S), "rounded_total");
    expect(other[k], out[k], 0.0, "rounded_total, faded");
  }
  for (int64_t s = 0; s < S; ++s) expect(peaks[s], largest[s], 0.0, "rounded_total, peaks");
}

template <class Count>
void check_friends(int64_t K, bool packed, const cpu::Parallel& parallel) {
  const Rows normal(1, K * K);
  const float* scores = normal[0];
  const std::unique_ptr<Count[]> counts(new Count[K * K]);
  for (int64_t i = 0; i < K * K; ++i) counts[i] = static_cast<Count>(i % 4);
  const int64_t bytes = packed ? ceil_div(K, 8) : K;
  const std::unique_ptr<uint8_t[]> candidates(new uint8_t[K * bytes]);
  std::fill_n(candidates.get(), K * bytes, static_cast<uint8_t>(packed ? 0xff : 1));
  const std::unique_ptr<uint8_t[]> active(new uint8_t[K]);
  for (int64_t k = 0; k < K; ++k) active[k] = k % 2;
  const std::unique_ptr<int64_t[]> friends(new int64_t[K]);
  const Counts known{counts.get(), sizeof(Count) == 2};
  cpu::select_friends(scores, known, active.get(), {candidates.get(), packed}, K, friends.get(),
                      parallel);
  for (int64_t k = 0; k < K; ++k) {
    int64_t best = active[k] ? k : -1;
    for (int64_t i = 0; i < K && !active[k]; ++i)
      if (active[i] && counts[k * K + i] > 0 &&
          (best < 0 || scores[k * K + i] > scores[k * K + best]))
        best = i;
    expect(static_cast<double>(friends[k]), static_cast<double>(best), 0.0, "select_friends");
  }
  cpu::eliminate(candidates.get(), packed, scores, known, K, 0.5, parallel);
  std::vector<int64_t> clients;
  for (int64_t k = 1; k < K; k += 2) clients.push_back(k);
  const auto S = static_cast<int64_t>(clients.size());
  const std::vector<double> fresh(S * S, 0.25);
  cpu::update_scores(normal[0], counts.get(), K, fresh.data(), clients.data(), S, nullptr,
                     parallel);
}

void check_sorted(const Rows& x, int64_t S, int64_t d, const cpu::Parallel& parallel, bool scaled) {
  const std::unique_ptr<float[]> median(new float[d]), mean(new float[d]), peak(new float[1]);
  const std::vector<float> halves(S, 0.5f);
  const float* const scales = scaled ? halves.data() : nullptr;
  cpu::trimmed_mean(median.get(), peak.get(), x.read(), S, d, (S - 1) / 2, scales, parallel);
  cpu::meamed(mean.get(), peak.get(), x.read(), S, d, S, scales, parallel);
  std::vector<double> column(S);
  double largest = 0.0;
  for (int64_t k = 0; k < d; ++k) {
    double sum = 0.0;
    for (int64_t s = 0; s < S; ++s) {
      column[s] = scaled ? 0.5 * x[s][k] : x[s][k];
      sum += column[s];
      largest = std::max(largest, std::abs(column[s]));
    }
    std::sort(column.begin(), column.end());
    expect(median[k], (column[(S - 1) / 2] + column[S / 2]) / 2.0, 1.0, "trimmed_mean");
    expect(mean[k], sum / static_cast<double>(S), 1.0, "meamed");
  }
  expect(peak[0], largest, 0.0, "peak of meamed");
}

void check_sorted(int64_t S, int64_t d, const cpu::Parallel& parallel) {
  const Rows x(S, d);
  for (const bool scaled : {false, true}) check_sorted(x, S, d, parallel, scaled);
}

void check_all(const cpu::Parallel& parallel) {
  for (const int64_t d : {1, 15, 17, 130, 1100})
    for (const int64_t S : {1, 2, 3, 5, 11, 27}) {
      check_gram(S, d, parallel);
      check_rows(S, d, parallel);
      check_int8_rows(S, d, parallel);
      check_bfloat16_rows(S, d, parallel);
      check_sorted(S, d, parallel);
    }
  for (const int64_t S : {33, 150, 300}) check_sorted(S, 70, parallel);  // more than one run
  check_gram(250, 140, parallel);  // more panels than L2 holds
  check_rows(9, 9000, parallel);   // more than one block of columns
  check_int8_rows(9, 20000, parallel);
  check_bfloat16_rows(9, 20000, parallel);
  for (const int64_t K : {1, 2, 7, 8, 33, 300}) {
    check_friends<int16_t>(K, true, parallel);
    check_friends<int32_t>(K, false, parallel);
  }
}

}  // namespace

__attribute__((noinline)) void* operator new(std::size_t bytes) {
  if (in_task) ++allocations_in_tasks;
  if (void* memory = std::malloc(bytes)) return memory;
  throw std::bad_alloc();
}

__attribute__((noinline)) void operator delete(void* memory) noexcept {
  std::free(memory);
}

__attribute__((noinline)) void operator delete(void* memory, std::size_t) noexcept {
  std::free(memory);
}

int main() {
  for (const cpu::Isa isa : cpu::kEveryIsa) {
    if (!cpu::set_isa(isa)) {
      std::printf("%s: not on this processor\n", cpu::isa_name(isa));
      continue;
    }
    for (const int workers : {1, 3}) check_all({workers, launch});
    std::printf("%s: %d failures\n", cpu::isa_name(isa), failures);
  }
  if (allocations_in_tasks > 0) {
    ++failures;
    std::printf("FAILED: tasks allocated memory %lld times\n",
                static_cast<long long>(allocations_in_tasks));
  }
  return failures == 0 ? 0 : 1;
}
