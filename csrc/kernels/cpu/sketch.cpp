// SPDX-License-Identifier: Apache-2.0
#include "../sketch.h"

#include <algorithm>
#include <cstring>
#include <type_traits>
#include <vector>

#include "../elements.h"
#include "../weighted_sum.h"
#include "cache.h"
#include "row_blocks.h"
#include "scratch.h"
#include "simd.h"
#include "weighted_sum_block.h"

namespace fastagg::cpu {
namespace {

// Buckets that are handled together: a cache line of floats, and the words of a unit.
constexpr int64_t kLanes = kUnitWords;

// Fetches what will be read kAheadBytes later into the L2 cache, in the order of addresses, so that
// the hardware's prefetchers follow. Near the end of a run, that is the beginning of the next one.
constexpr int64_t kAheadBytes = 4096;

class Ahead {
 public:
  // A run of n numbers from x on, and the next one, from `then` on. Only addresses are computed:
  // both may end outside of the rows.
  template <class T>
  Ahead(const T* x, int64_t n, const T* then)
      : next_(reinterpret_cast<uintptr_t>(x) + kAheadBytes),
        then_(reinterpret_cast<uintptr_t>(then)),
        step_(kLanes * sizeof(T)),
        left_(n / kLanes - kAheadBytes / static_cast<int64_t>(step_)) {
    if (left_ <= 0) next_ = then_;
  }
  // For the next kLanes numbers.
  FASTAGG_INLINE void fetch() {
    prefetch_l2(reinterpret_cast<const float*>(next_));
    next_ += step_;
    if (--left_ == 0) next_ = then_;
  }

 private:
  uintptr_t next_, then_, step_;
  int64_t left_;
};

// Sums of squares of a row, one for each of kLanes lanes. They stay in registers from block to
// block.
template <int W>
class Squares {
 public:
  static constexpr int kParts = kLanes / W, kHalf = W / 2;

  FASTAGG_INLINE explicit Squares(const double* lanes) {
    unroll<2 * kParts>([&](auto i)
                           FASTAGG_INLINE_LAMBDA { sums_[i] = load<kHalf>(lanes + i * kHalf); });
  }
  FASTAGG_INLINE void write(double* lanes) const {
    unroll<2 * kParts>([&](auto i)
                           FASTAGG_INLINE_LAMBDA { store<kHalf>(lanes + i * kHalf, sums_[i]); });
  }
  template <int P>
  FASTAGG_INLINE void add(const Vec<double, kHalf>& low, const Vec<double, kHalf>& high) {
    sums_[2 * P] += low * low;
    sums_[2 * P + 1] += high * high;
  }

 private:
  Vec<double, kHalf> sums_[2 * kParts];
};

// sums[q] += the number of bucket q, negated if its sign says so, for n buckets from `first` on:
// from[0], ..., from[n - 1]. n and `first` are multiples of kLanes.
template <int W>
FASTAGG_INLINE void add_buckets(double* sums, Squares<W>& squares, const float* from, int64_t first,
                                int64_t n, const uint32_t* words, Ahead& ahead) {
  constexpr int kParts = kLanes / W, kHalf = W / 2;
  for (int64_t q = first; q < first + n;) {
    const int64_t unit_end = std::min((q / kUnitBuckets + 1) * kUnitBuckets, first + n);
    const auto shift = static_cast<uint32_t>(q % kUnitBuckets / kLanes);
    Vec<uint32_t, W> signs[kParts];
    unroll<kParts>([&](auto p) FASTAGG_INLINE_LAMBDA {
      signs[p] = load<W>(words + q / kUnitBuckets * kUnitWords + p * W) << shift;
    });
    for (; q < unit_end; q += kLanes) {
      ahead.fetch();
      unroll<kParts>([&](auto p) FASTAGG_INLINE_LAMBDA {
        double* sum = sums + q + p * W;
        const Vec<uint32_t, W> number = bits_of<W>(load<W>(from + (q - first) + p * W));
        Vec<double, kHalf> low, high;
        widen_halves<W>(number ^ (signs[p] & 0x80000000u), &low, &high);
        signs[p] += signs[p];
        store<kHalf>(sum, load<kHalf>(sum) + low);
        store<kHalf>(sum + kHalf, load<kHalf>(sum + kHalf) + high);
        squares.template add<p()>(low, high);
      });
    }
  }
}

// Adds a block, k columns, to k buckets, in the order of columns.
template <int W>
FASTAGG_INLINE void add_block(double* sums, Squares<W>& squares, const float* x, int64_t k,
                              int64_t turn, const uint32_t* words, Ahead& ahead) {
  // Columns [0, k - turn) go to the buckets from `turn` on, the others to those from 0 on. The
  // lanes around `turn` have both the last columns and the first ones: they are put side by side.
  const int64_t inside = turn % kLanes, around = turn - inside, after = around + kLanes;
  float ends[2 * kLanes];
  std::memcpy(ends, x + (k - kLanes), sizeof ends / 2);
  std::memcpy(ends + kLanes, x, sizeof ends / 2);
  add_buckets<W>(sums, squares, x + (after - turn), after, k - after, words, ahead);
  add_buckets<W>(sums, squares, x + (k - turn), 0, around, words, ahead);
  add_buckets<W>(sums, squares, ends + (kLanes - inside), around, kLanes, words, ahead);
}

// Columns of a row that are read before those of the next row, at least a block. The hashes of
// their blocks serve all rows of a group. Longer runs are faster, since prefetchers begin anew with
// every row.
constexpr int64_t kRun = 131072;

// The same if the rows of a group are summed after each run: they must be in L2 still, and the sums
// of all groups, which are kept until all are there, in the last cache.
constexpr int64_t kSummedRun = 16384, kLeastRun = 4096;

int64_t summed_run(int64_t fitting) {
  const int64_t in_l2 = l2_bytes() / (2 * kGroup * int64_t{sizeof(float)});
  int64_t run = kSummedRun;
  while (run > kLeastRun && run > std::min(fitting, in_l2)) run /= 2;
  return run;
}

// What a worker needs for k buckets: a block of floats, and the hashes of the blocks of a run.
class Rooms {
 public:
  Rooms(int workers, int64_t k, int64_t run)
      : words_(kUnitWords * sketch_units(k)),
        blocks_(ceil_div(run, k) + 1),
        bytes_(k * int64_t{sizeof(float)} +
               blocks_ * (int64_t{sizeof(int64_t)} + words_ * int64_t{sizeof(uint32_t)})),
        memory_(workers * bytes_) {}

  // [blocks] rotations, [blocks, words] words and [k] floats
  int64_t* turns(int worker) const {
    return reinterpret_cast<int64_t*>(memory_.as<char>() + worker * bytes_);
  }
  uint32_t* words(int worker) const { return reinterpret_cast<uint32_t*>(turns(worker) + blocks_); }
  float* block(int worker) const {
    return reinterpret_cast<float*>(words(worker) + blocks_ * words_);
  }

 private:
  int64_t words_, blocks_, bytes_;
  Scratch memory_;
};

// Outputs i, ..., i + N - 1 of SplitMix64.
template <int N, int... I>
FASTAGG_INLINE Vec<uint64_t, N> split_mix_vector(uint64_t seed, uint64_t i,
                                                 std::integer_sequence<int, I...>) {
  return split_mix(Vec<uint64_t, N>{} + seed, Vec<uint64_t, N>{(i + I)...});
}

template <int W>
FASTAGG_INLINE void hash_block(uint64_t seed, int64_t b, int64_t k, int64_t* turn,
                               uint32_t* words) {
  constexpr int kOutputs = W / 2;  // of a vector; each is two words, the lower one first
  const auto block = static_cast<uint64_t>(b);
  const uint64_t first = first_output(block, k) + 1;
  *turn = rotation(seed, block, k);
  for (int64_t i = 0; i < kUnitOutputs * sketch_units(k); i += kOutputs) {
    const Vec<uint64_t, kOutputs> outputs =
        split_mix_vector<kOutputs>(seed, first + i, std::make_integer_sequence<int, kOutputs>());
    std::memcpy(words + 2 * i, &outputs, sizeof outputs);
  }
}

// Adds n columns of a group of rows, from `column` on, to their sketches, and their squares to
// `lanes`. `begin` is the number of the column; at most a run of columns up to the end of a block.
//   sketches   // [size, k]
//   lanes      // [size, kLanes]
template <int W, class T>
FASTAGG_INLINE void add_run(double* sketches, double* lanes, const T* const* rows, int64_t size,
                            int64_t column, int64_t n, int64_t k, uint64_t seed, int64_t begin,
                            int64_t* turns, uint32_t* words, float* part) {
  const int64_t first = begin / k, last = (begin + n - 1) / k, width = kUnitWords * sketch_units(k);
  for (int64_t b = first; b <= last; ++b)
    hash_block<W>(seed, b, k, turns + (b - first), words + (b - first) * width);
  for (int64_t s = 0; s < size; ++s) {
    const T* const x = rows[s] + column;
    Squares<W> squares(lanes + s * kLanes);
    // The next run is that of the next row; after the last row, the next one of the first row.
    Ahead ahead(x, n, s + 1 < size ? rows[s + 1] + column : rows[0] + column + n);
    for (int64_t done = 0; done < n;) {
      const int64_t skipped = (begin + done) % k, b = (begin + done) / k - first;
      const int64_t count = std::min(k - skipped, n - done);
      auto* block = reinterpret_cast<const float*>(x + done);
      if (!std::is_same_v<T, float> || count < k) {  // convert; the rest of a block is zero
        std::fill_n(part, skipped, 0.0f);
        FASTAGG_WHOLE_VECTORS
        for (int64_t j = 0; j < count; ++j) part[skipped + j] = widened(x[done + j]);
        std::fill(part + skipped + count, part + k, 0.0f);
        block = part;
      }
      add_block<W>(sketches + s * k, squares, block, k, turns[b], words + b * width, ahead);
      done += count;
    }
    squares.write(lanes + s * kLanes);
  }
}

// Calls body(column, n) for the runs of [0, d): up to the next multiple of the width of a run.
template <class Body>
FASTAGG_INLINE void for_runs(int64_t d, int64_t width, int64_t begin, const Body& body) {
  for (int64_t column = 0; column < d;) {
    const int64_t n = std::min(width - (begin + column) % width, d - column);
    body(column, n);
    column += n;
  }
}

struct SketchRows {
  template <int W, class T>
  FASTAGG_INLINE static void run(double* sketches, double* lanes, const T* const* rows,
                                 int64_t size, int64_t d, int64_t k, uint64_t seed, int64_t begin,
                                 int64_t* turns, uint32_t* words, float* part) {
    for_runs(d, std::max(kRun, k), begin, [&](int64_t column, int64_t n) FASTAGG_INLINE_LAMBDA {
      add_run<W>(sketches, lanes, rows, size, column, n, k, seed, begin + column, turns, words,
                 part);
    });
  }
};

double sum_of(const double* lanes) {
  double sum = 0.0;
  for (int64_t l = 0; l < kLanes; ++l) sum += lanes[l];
  return sum;
}

// Columns whose group sums are added up in one task, at most: their float64 sums stay in L1.
constexpr int64_t kTotalColumns = 2048;

// Bytes of the sums of all groups, which are added up before the next columns are read.
constexpr int64_t kGroupSumBytes = int64_t{8} << 20;

// The groups of S rows that weighted_sum adds in float32: [first, first + size).
struct RowGroup {
  int64_t first, size;
};

std::vector<RowGroup> row_groups(int64_t S) {
  std::vector<RowGroup> groups;
  for (int64_t first = 0; first < S;) {
    int64_t size = kGroup;
    while (size > S - first) size /= 2;
    groups.push_back({first, size});
    first += size;
  }
  return groups;
}

// Columns [column, column + n) of a group of rows: adds them to the rows' sketches, and writes
// their weighted sums to `sums`. `begin` is the number of the rows' first column.
//   rows      // [size]
//   sketches  // [size, k]
//   lanes     // [size, kLanes]
//   sums      // [n]
struct SketchGroup {
  template <int W, class T>
  FASTAGG_INLINE static void run(double* sketches, double* lanes, float* __restrict sums,
                                 const T* const* rows, int64_t size, const float* weights,
                                 int64_t column, int64_t n, int64_t k, uint64_t seed, int64_t begin,
                                 int64_t run, int64_t* turns, uint32_t* words, float* part) {
    for_runs(n, run, begin + column, [&](int64_t done, int64_t count) FASTAGG_INLINE_LAMBDA {
      const int64_t at = column + done;
      add_run<W>(sketches, lanes, rows, size, at, count, k, seed, begin + at, turns, words, part);
      float* __restrict const to = sums + done;
      const auto take = [&](int64_t i, float sum) FASTAGG_INLINE_LAMBDA { to[i] = sum; };
      if (size == 8) sum_group<W, 8>(rows, weights, at, count, take);
      if (size == 4) sum_group<W, 4>(rows, weights, at, count, take);
      if (size == 2) sum_group<W, 2>(rows, weights, at, count, take);
      if (size == 1) sum_group<W, 1>(rows, weights, at, count, take);
    });
  }
};

static_assert(kGroup == 8);

// out[i] = factor * sum_g sums[g][i] for i in [0, n), in the order of g.
struct AddGroups {
  template <int W>
  FASTAGG_INLINE static void run(float* __restrict out, const float* sums, int64_t groups,
                                 int64_t stride, double factor, int64_t n,
                                 double* __restrict total) {
    std::fill_n(total, n, 0.0);
    for (int64_t g = 0; g < groups; ++g) {
      const float* __restrict from = sums + g * stride;
      FASTAGG_WHOLE_VECTORS
      for (int64_t i = 0; i < n; ++i) total[i] += static_cast<double>(from[i]);
    }
    for (int64_t i = 0; i < n; ++i) out[i] = static_cast<float>(factor * total[i]);
  }
};

}  // namespace

template <class T>
void sketch(double* out, double* squares, const T* const* rows, int64_t S, int64_t d, int64_t k,
            uint64_t seed, int64_t begin, const Parallel& parallel) {
  const Isa isa = current_isa();
  const Parallel team = parallel.for_work(S * d * int64_t{sizeof(T)});
  const Rooms rooms(team.workers, k, kRun);
  // Rows of a task share hashes, but there should be many tasks for each worker.
  const int64_t together = std::clamp<int64_t>(S / (12 * team.workers), 1, kGroup);
  team.for_each(ceil_div(S, together), [&](int64_t task, int worker) {
    const int64_t first = task * together, size = std::min(together, S - first);
    double lanes[kGroup * kLanes] = {};
    dispatch<SketchRows>(isa, out + first * k, &lanes[0], rows + first, size, d, k, seed, begin,
                         rooms.turns(worker), rooms.words(worker), rooms.block(worker));
    for (int64_t s = 0; s < size; ++s) squares[first + s] += sum_of(lanes + s * kLanes);
  });
}

template <class T>
void sketch_and_sum(double* out, double* squares, float* sum, const T* const* rows, int64_t S,
                    int64_t d, const double* weights, int64_t k, uint64_t seed, int64_t begin,
                    const Parallel& parallel) {
  const Isa isa = current_isa();
  const Parallel team = parallel.for_work(S * d * int64_t{sizeof(T)});
  const std::vector<RowGroup> found = row_groups(S);
  const auto groups = static_cast<int64_t>(found.size());
  if (groups < team.workers) {  // S rows, or columns, keep more workers busy
    sketch(out, squares, rows, S, d, k, seed, begin, parallel);
    weighted_sum(sum, rows, S, d, weights, 0.0, parallel);
    return;
  }
  const ScaledWeights scaled(weights, S);
  const int64_t fitting = kGroupSumBytes / (groups * int64_t{sizeof(float)});
  const int64_t run = std::max(summed_run(fitting), k);
  const int64_t width = std::clamp(fitting / run, int64_t{1}, ceil_div(d, run) + 1) * run;
  const Rooms rooms(team.workers, k, run);
  const Scratch all_lanes(S * kLanes * int64_t{sizeof(double)});
  const Scratch of_groups(groups * width * int64_t{sizeof(float)});
  const Scratch totals(team.workers * kTotalColumns * int64_t{sizeof(double)});
  auto* const lanes = all_lanes.as<double>();
  auto* const sums = of_groups.as<float>();
  std::fill_n(lanes, S * kLanes, 0.0);
  for (int64_t column = 0; column < d;) {
    const int64_t n = std::min(width - (begin + column) % width, d - column);
    team.for_each(groups, [&](int64_t g, int worker) {
      const auto [first, size] = found[g];
      dispatch<SketchGroup>(isa, out + first * k, lanes + first * kLanes, sums + g * width,
                            rows + first, size, scaled.quotients.data() + first, column, n, k, seed,
                            begin, run, rooms.turns(worker), rooms.words(worker),
                            rooms.block(worker));
    });
    const int64_t columns = std::min(block_columns(n, team.workers), kTotalColumns);
    for_blocks(n, columns, team, [&](int64_t first, int64_t count, int worker) {
      dispatch<AddGroups>(isa, sum + column + first, sums + first, groups, width, scaled.factor,
                          count, totals.as<double>() + worker * kTotalColumns);
    });
    column += n;
  }
  for (int64_t s = 0; s < S; ++s) squares[s] += sum_of(lanes + s * kLanes);
}

template void sketch(double*, double*, const float* const*, int64_t, int64_t, int64_t, uint64_t,
                     int64_t, const Parallel&);
template void sketch(double*, double*, const Bfloat16* const*, int64_t, int64_t, int64_t, uint64_t,
                     int64_t, const Parallel&);
template void sketch(double*, double*, const Half* const*, int64_t, int64_t, int64_t, uint64_t,
                     int64_t, const Parallel&);
template void sketch_and_sum(double*, double*, float*, const float* const*, int64_t, int64_t,
                             const double*, int64_t, uint64_t, int64_t, const Parallel&);
template void sketch_and_sum(double*, double*, float*, const Bfloat16* const*, int64_t, int64_t,
                             const double*, int64_t, uint64_t, int64_t, const Parallel&);
template void sketch_and_sum(double*, double*, float*, const Half* const*, int64_t, int64_t,
                             const double*, int64_t, uint64_t, int64_t, const Parallel&);

}  // namespace fastagg::cpu
