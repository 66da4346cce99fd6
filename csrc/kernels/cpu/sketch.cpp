// SPDX-License-Identifier: Apache-2.0
#include "../sketch.h"

#include <algorithm>
#include <cstring>
#include <optional>
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

// Rows of float32 that are added at the same time. They have the same signs, and their numbers are
// in registers if their weighted sum is wanted, too. With AVX2, two streams of memory are faster
// than one; with AVX-512, one row at a time is faster unless the sum is wanted. Narrower vectors
// have too few registers.
template <int W, bool kSum>
constexpr int kTogether = W == 8 || (W == 16 && kSum) ? 2 : 1;
constexpr int kMostTogether = 2;

// The same for rows of T and k buckets: one row if the sums of more would not leave a quarter of
// the L1 cache.
template <int W, bool kSum, class T>
FASTAGG_INLINE int rows_together(int64_t k) {
  constexpr int R = kTogether<W, kSum>;
  const bool fits = R * k * int64_t{sizeof(double)} <= l1_bytes() / 4 * 3;
  return std::is_same_v<T, float> && fits ? R : 1;
}

// The hardware's prefetchers begin anew on every page.
constexpr int64_t kPageBytes = 4096, kAheadBytes = kPageBytes;

// Bytes at the beginning of a page that are fetched by software. If rows are read one at a time,
// the hardware does the rest; two at a time are read faster if every line is fetched.
template <int R>
constexpr uintptr_t kFetchedBytes = R > 1 ? kPageBytes : 512;

// Fetches what will be read kAheadBytes later into the L2 cache, in the order of addresses. Near
// the end of a run, that is the beginning of the next one.
template <int R, class T>
class Ahead {
 public:
  // Runs of n numbers from x[r] on, and the next ones, from then[r] on. Only addresses are
  // computed: both may end outside of the rows.
  FASTAGG_INLINE Ahead(const T* const (&x)[R], int64_t n, const T* const (&then)[R]) : n_(n) {
    unroll<R>([&](auto r) FASTAGG_INLINE_LAMBDA {
      x_[r] = reinterpret_cast<uintptr_t>(x[r]);
      then_[r] = reinterpret_cast<uintptr_t>(then[r]);
    });
  }
  // What follows is a block of k columns, the first of which is number `column` of the run.
  FASTAGG_INLINE void begin_block(int64_t column, int64_t k) {
    const int64_t fetched = column + kAheadBytes / kSize;
    const bool inside = fetched + k <= n_;
    unroll<R>([&](auto r) FASTAGG_INLINE_LAMBDA {
      block_[r] =
          inside ? x_[r] + fetched * kSize : then_[r] + std::max<int64_t>(fetched - n_, 0) * kSize;
    });
  }
  // For kLanes columns of the block.
  FASTAGG_INLINE void fetch(int64_t column) const {
    unroll<R>([&](auto r) FASTAGG_INLINE_LAMBDA {
      const uintptr_t address = block_[r] + column * kSize;
      if (address % kPageBytes < kFetchedBytes<R>)
        prefetch_l2(reinterpret_cast<const float*>(address));
    });
  }

 private:
  static constexpr int64_t kSize = sizeof(T);
  uintptr_t x_[R], then_[R], block_[R];
  int64_t n_;
};

struct NoFetch {
  FASTAGG_INLINE void fetch(int64_t) const {}
};

// What is done with the numbers of R rows besides: nothing, or their weighted sum is written to
// to[0], ..., as one group of weighted_sum, or added to what is there.
struct NoSum {
  template <int W, int R>
  FASTAGG_INLINE void take(float*, const Vec<float, W> (&)[R]) const {}
};
template <bool kAdded>
struct WeightedSum {
  const float* weights;
  template <int W, int R>
  FASTAGG_INLINE void take(float* to, const Vec<float, W> (&x)[R]) const {
    Vec<float, W> sum;
    if constexpr (kAdded) sum = load<W>(to);
    unroll<R>([&](auto i) FASTAGG_INLINE_LAMBDA {
      constexpr int r = kAdded ? i() : row_in_order<R>(i());
      add_product<W>(&sum, !kAdded && i == 0, weights[r], x[r]);
    });
    store<W>(to, sum);
  }
};

// Sums of squares of a row, one for each of kLanes lanes. They stay in registers from block to
// block.
template <int W>
class Squares {
 public:
  static constexpr int kParts = kLanes / W, kHalf = W / 2;

  FASTAGG_INLINE void read(const double* lanes) {
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

// For each of R rows r: sums[r * k + q] += the number of bucket q, negated if its sign says so, for
// n buckets from `first` on: x[r][offset], ..., x[r][offset + n - 1]. n and `first` are multiples
// of kLanes. `ahead` fetches what will be read in place of these columns.
template <int W, int R, class Fetch, class Sum>
FASTAGG_INLINE void add_buckets(double* sums, int64_t k, Squares<W> (&squares)[R],
                                const float* const (&x)[R], int64_t offset, int64_t first,
                                int64_t n, const uint32_t* words, const Fetch& ahead,
                                const Sum& sum, float* to) {
  constexpr int kParts = kLanes / W, kHalf = W / 2;
  for (int64_t q = first; q < first + n;) {
    const int64_t unit_end = std::min((q / kUnitBuckets + 1) * kUnitBuckets, first + n);
    const auto shift = static_cast<uint32_t>(q % kUnitBuckets / kLanes);
    Vec<uint32_t, W> signs[kParts];
    unroll<kParts>([&](auto p) FASTAGG_INLINE_LAMBDA {
      signs[p] = load<W>(words + q / kUnitBuckets * kUnitWords + p * W) << shift;
    });
    for (; q < unit_end; q += kLanes) {
      const int64_t column = offset + (q - first);
      ahead.fetch(column);
      unroll<kParts>([&](auto p) FASTAGG_INLINE_LAMBDA {
        const int64_t i = column + p * W;
        Vec<float, W> row[R];
        unroll<R>([&](auto r) FASTAGG_INLINE_LAMBDA {
          double* const own = sums + r * k + q + p * W;
          row[r] = load<W>(x[r] + i);
          Vec<double, kHalf> low, high;
          widen_halves<W>(bits_of<W>(row[r]) ^ (signs[p] & 0x80000000u), &low, &high);
          store<kHalf>(own, load<kHalf>(own) + low);
          store<kHalf>(own + kHalf, load<kHalf>(own + kHalf) + high);
          squares[r].template add<p()>(low, high);
        });
        signs[p] += signs[p];
        sum.template take<W>(to + i, row);
      });
    }
  }
}

// Adds a block of R rows, k columns, to k buckets, in the order of columns.
//   x    // [R]
//   to   // [k]: the sums of the block
template <int W, int R, class Fetch, class Sum>
FASTAGG_INLINE void add_block(double* sums, Squares<W> (&squares)[R], const float* const (&x)[R],
                              int64_t k, int64_t turn, const uint32_t* words, const Fetch& ahead,
                              const Sum& sum, float* to) {
  constexpr bool kSum = !std::is_same_v<Sum, NoSum>;
  // Columns [0, k - turn) go to the buckets from `turn` on, the others to those from 0 on. The
  // lanes around `turn` have both the last columns and the first ones: they are put side by side.
  const int64_t inside = turn % kLanes, around = turn - inside, after = around + kLanes;
  ahead.fetch(0);
  add_buckets<W, R>(sums, k, squares, x, after - turn, after, k - after, words, ahead, sum, to);
  add_buckets<W, R>(sums, k, squares, x, k - turn, 0, around, words, ahead, sum, to);
  constexpr std::size_t kBytes = kLanes * sizeof(float);
  float ends[R][2 * kLanes], sum_of_ends[2 * kLanes];
  const float* first[R];
  unroll<R>([&](auto r) FASTAGG_INLINE_LAMBDA {
    std::memcpy(ends[r], x[r] + (k - kLanes), kBytes);
    std::memcpy(ends[r] + kLanes, x[r], kBytes);
    first[r] = ends[r];
  });
  if constexpr (kSum) {
    std::memcpy(sum_of_ends, to + (k - kLanes), kBytes);
    std::memcpy(sum_of_ends + kLanes, to, kBytes);
  }
  add_buckets<W, R>(sums, k, squares, first, kLanes - inside, around, kLanes, words, NoFetch(), sum,
                    sum_of_ends);
  if constexpr (kSum) {
    std::memcpy(to + (k - kLanes), sum_of_ends, kBytes);
    std::memcpy(to, sum_of_ends + kLanes, kBytes);
  }
}

// Columns of a row that are read before those of the next row, at least a block. The hashes of
// their blocks serve all rows of a group. Longer runs are faster, since prefetchers begin anew with
// every row.
constexpr int64_t kRun = 131072;

// The same if the rows of a group are summed, too. The sums of the groups of a batch are kept until
// all are there, in the last cache, so a run has at most `fitting` columns. If rows are added
// together, the sum of a run takes a quarter of L2; otherwise rows are summed after each run, when
// they must still be in L2.
constexpr int64_t kMostSummedRun = 65536, kLeastSummedRun = 4096;

int64_t summed_run(int64_t fitting, bool together) {
  const int64_t rows = together ? 4 : 2 * kGroup;
  const int64_t in_l2 = l2_bytes() / (rows * int64_t{sizeof(float)});
  int64_t run = kMostSummedRun;
  while (run > kLeastSummedRun && run > std::min(fitting, in_l2)) run /= 2;
  return run;
}

// What a worker needs for k buckets: a block of some rows, and the hashes of the blocks of a run.
struct Room {
  float* part;      // [kMostTogether + 1, k]: rows, and their sum
  int64_t* turns;   // [blocks]
  uint32_t* words;  // [blocks, words]
};

class Rooms {
 public:
  Rooms(int workers, int64_t k, int64_t run) {
    const int64_t blocks = ceil_div(run, k) + 1;
    const auto take = [&](int64_t numbers, std::size_t size) {  // whole cache lines
      const int64_t begin = bytes_;
      bytes_ += ceil_div(numbers * static_cast<int64_t>(size), 64) * 64;
      return begin;
    };
    part_ = take((kMostTogether + 1) * k, sizeof(float));
    turns_ = take(blocks, sizeof(int64_t));
    words_ = take(blocks * kUnitWords * sketch_units(k), sizeof(uint32_t));
    memory_.emplace(workers * bytes_);
  }
  Room of(int worker) const {
    char* const own = memory_->as<char>() + worker * bytes_;
    return {reinterpret_cast<float*>(own + part_), reinterpret_cast<int64_t*>(own + turns_),
            reinterpret_cast<uint32_t*>(own + words_)};
  }

 private:
  int64_t bytes_ = 0, part_ = 0, turns_ = 0, words_ = 0;
  std::optional<Scratch> memory_;
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

// The blocks of n columns from number `begin` on, and the hashes of each.
struct Blocks {
  int64_t k, begin;
  const int64_t* turns;   // [blocks]
  const uint32_t* words;  // [blocks, width]
  int64_t width;

  template <int W>
  FASTAGG_INLINE static Blocks hashed(int64_t n, int64_t k, uint64_t seed, int64_t begin,
                                      int64_t* turns, uint32_t* words) {
    const int64_t width = kUnitWords * sketch_units(k), first = begin / k;
    for (int64_t b = 0; b <= (begin + n - 1) / k - first; ++b)
      hash_block<W>(seed, first + b, k, turns + b, words + b * width);
    return {k, begin, turns, words, width};
  }
};

// Adds n columns of R rows to their sketches, and their squares to `lanes`.
//   sketches   // [R, k]
//   lanes      // [R, kLanes]
//   rows       // [R], where the columns begin
//   to         // [n]: their sum
//   part       // [R + 1, k]
template <int W, int R, class T, class Sum>
FASTAGG_INLINE void add_rows(double* sketches, double* lanes, const T* const (&rows)[R], int64_t n,
                             const Blocks& blocks, float* part, Ahead<R, T>& ahead, const Sum& sum,
                             float* to) {
  constexpr bool kFloats = std::is_same_v<T, float>, kSum = !std::is_same_v<Sum, NoSum>;
  const int64_t k = blocks.k;
  Squares<W> squares[R];
  unroll<R>([&](auto r) FASTAGG_INLINE_LAMBDA { squares[r].read(lanes + r * kLanes); });
  for (int64_t done = 0; done < n;) {
    const int64_t skipped = (blocks.begin + done) % k;
    const int64_t b = (blocks.begin + done) / k - blocks.begin / k;
    const int64_t count = std::min(k - skipped, n - done);
    const float* block[R];
    unroll<R>([&](auto r) FASTAGG_INLINE_LAMBDA {
      block[r] = reinterpret_cast<const float*>(rows[r] + done);
      if (kFloats && count == k) return;
      float* const own = part + r * k;  // converted; the rest of a block is zero
      std::fill_n(own, skipped, 0.0f);
      const T* const x = rows[r] + done;
      FASTAGG_WHOLE_VECTORS
      for (int64_t j = 0; j < count; ++j) own[skipped + j] = widened(x[j]);
      std::fill(own + skipped + count, own + k, 0.0f);
      block[r] = own;
    });
    float* const whole = count == k ? to + done : part + R * k;
    if (kSum && count < k) std::memcpy(whole + skipped, to + done, count * sizeof(float));
    ahead.begin_block(done - skipped, k);
    add_block<W, R>(sketches, squares, block, k, blocks.turns[b], blocks.words + b * blocks.width,
                    ahead, sum, whole);
    if (kSum && count < k) std::memcpy(to + done, whole + skipped, count * sizeof(float));
    done += count;
  }
  unroll<R>([&](auto r) FASTAGG_INLINE_LAMBDA { squares[r].write(lanes + r * kLanes); });
}

// Adds n columns of a group of rows, from `column` on, to their sketches, and their squares to
// `lanes`. At most a run of columns up to the end of a block.
//   sketches   // [size, k]
//   lanes      // [size, kLanes]
//   weights    // [size]: of the sum, if kSum
//   to         // [n]: the sum, which is written if true is returned
template <int W, bool kSum, class T>
FASTAGG_INLINE bool add_run(double* sketches, double* lanes, const T* const* rows, int64_t size,
                            int64_t column, int64_t n, const Blocks& blocks, Room room,
                            const float* weights, float* to) {
  constexpr int R = kTogether<W, kSum>;
  const int64_t k = blocks.k;
  int64_t s = 0;
  // The next run is that of the next rows; after the last ones, the next one of the first ones.
  const auto next = [&](int64_t row) FASTAGG_INLINE_LAMBDA {
    return row < size ? rows[row] + column : rows[row - size] + column + n;
  };
  if constexpr (R > 1 && std::is_same_v<T, float>) {
    // A short run has mostly incomplete blocks. Their weighted sums are copied, which costs more
    // than two rows at a time save.
    const bool summed = size % R == 0 && n >= 4 * k;
    const bool together = rows_together<W, kSum, T>(k) == R && (!kSum || summed);
    for (; together && s + R <= size; s += R) {
      const T *from[R], *then[R];
      unroll<R>([&](auto r) FASTAGG_INLINE_LAMBDA {
        from[r] = rows[s + r] + column;
        then[r] = next(s + R + r);
      });
      Ahead<R, T> ahead(from, n, then);
      const auto add = [&](const auto& sum) FASTAGG_INLINE_LAMBDA {
        add_rows<W, R>(sketches + s * k, lanes + s * kLanes, from, n, blocks, room.part, ahead, sum,
                       to);
      };
      if constexpr (!kSum)
        add(NoSum());
      else if (s == 0)
        add(WeightedSum<false>{weights});
      else
        add(WeightedSum<true>{weights + s});
    }
    if (together && kSum) return true;
  }
  for (; s < size; ++s) {
    const T* const from[1] = {rows[s] + column};
    const T* const then[1] = {next(s + 1)};
    Ahead<1, T> ahead(from, n, then);
    add_rows<W, 1>(sketches + s * k, lanes + s * kLanes, from, n, blocks, room.part, ahead, NoSum(),
                   to);
  }
  return false;
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
                                 Room room) {
    for_runs(d, std::max(kRun, k), begin, [&](int64_t column, int64_t n) FASTAGG_INLINE_LAMBDA {
      const Blocks blocks = Blocks::hashed<W>(n, k, seed, begin + column, room.turns, room.words);
      add_run<W, false>(sketches, lanes, rows, size, column, n, blocks, room, nullptr, room.part);
    });
  }
};

// Rows of a task of S rows, of which `at_once` are added together. They share hashes, but there
// should be many tasks for each worker.
int64_t rows_of_task(int64_t S, int workers, int64_t at_once) {
  const int64_t sharing = std::clamp<int64_t>(S / (12 * workers), 1, kGroup);
  return S < at_once * workers ? sharing : ceil_div(sharing, at_once) * at_once;
}

double sum_of(const double* lanes) {
  double sum = 0.0;
  for (int64_t l = 0; l < kLanes; ++l) sum += lanes[l];
  return sum;
}

// Columns whose group sums are added up in one task, at most: their float64 sums stay in L1.
constexpr int64_t kTotalColumns = 2048;

// Bytes of the sums of the groups of a batch, which are added up before the next columns are read.
constexpr int64_t kGroupSumBytes = int64_t{4} << 20;

// Groups of a batch, at most. Its sketches stay in L2 while all its columns are read.
constexpr int64_t kBatchGroups = 16;

// Columns that are read of all batches, before the next ones. Their float64 sums are in memory.
constexpr int64_t kBatchColumns = int64_t{1} << 20;

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
                                 int64_t run, Room room) {
    for_runs(n, run, begin + column, [&](int64_t done, int64_t count) FASTAGG_INLINE_LAMBDA {
      const int64_t at = column + done;
      const Blocks blocks = Blocks::hashed<W>(count, k, seed, begin + at, room.turns, room.words);
      float* __restrict const to = sums + done;
      if (add_run<W, true>(sketches, lanes, rows, size, at, count, blocks, room, weights, to))
        return;
      const auto take = [&](int64_t i, float sum) FASTAGG_INLINE_LAMBDA { to[i] = sum; };
      if (size == 8) sum_group<W, 8>(rows, weights, at, count, take);
      if (size == 4) sum_group<W, 4>(rows, weights, at, count, take);
      if (size == 2) sum_group<W, 2>(rows, weights, at, count, take);
      if (size == 1) sum_group<W, 1>(rows, weights, at, count, take);
    });
  }
};

static_assert(kGroup == 8);

// total[i] += sum_g sums[g][i] for i in [0, n), in the order of g, from zero if `first`; and out[i]
// = factor * total[i] if `last`.
struct AddGroups {
  template <int W>
  FASTAGG_INLINE static void run(float* __restrict out, const float* sums, int64_t groups,
                                 int64_t stride, double factor, int64_t n, double* __restrict total,
                                 bool first, bool last) {
    if (first) std::fill_n(total, n, 0.0);
    for (int64_t g = 0; g < groups; ++g) {
      const float* __restrict from = sums + g * stride;
      FASTAGG_WHOLE_VECTORS
      for (int64_t i = 0; i < n; ++i) total[i] += static_cast<double>(from[i]);
    }
    if (!last) return;
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
  const auto at_once =
      with_lanes(isa, [&](auto w) { return rows_together<decltype(w)::value, false, T>(k); });
  const int64_t task_rows = rows_of_task(S, team.workers, at_once);
  team.for_each(ceil_div(S, task_rows), [&](int64_t task, int worker) {
    const int64_t first = task * task_rows, size = std::min(task_rows, S - first);
    double lanes[kGroup * kLanes] = {};
    dispatch<SketchRows>(isa, out + first * k, &lanes[0], rows + first, size, d, k, seed, begin,
                         rooms.of(worker));
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
  const int64_t batches = ceil_div(groups, kBatchGroups), together = ceil_div(groups, batches);
  const int64_t fitting = kGroupSumBytes / (together * int64_t{sizeof(float)});
  const bool at_once =
      with_lanes(isa, [&](auto w) { return rows_together<decltype(w)::value, true, T>(k) > 1; });
  const int64_t run = std::max(summed_run(fitting, at_once), k);
  const int64_t width = std::clamp(fitting / run, int64_t{1}, ceil_div(d, run) + 1) * run;
  const int64_t most = batches == 1 ? 0 : std::max(kBatchColumns / width, int64_t{1}) * width;
  const Rooms rooms(team.workers, k, run);
  const Scratch all_lanes(S * kLanes * int64_t{sizeof(double)});
  const Scratch of_groups(together * width * int64_t{sizeof(float)});
  const Scratch totals(std::max(team.workers * kTotalColumns, most) * int64_t{sizeof(double)});
  auto* const lanes = all_lanes.as<double>();
  auto* const sums = of_groups.as<float>();
  std::fill_n(lanes, S * kLanes, 0.0);
  const auto add_batch = [&](int64_t batch, int64_t column, int64_t n, double* total) {
    const int64_t begin_group = batch * together;
    const int64_t count = std::min(together, groups - begin_group);
    team.for_each(count, [&](int64_t g, int worker) {
      const auto [first, size] = found[begin_group + g];
      dispatch<SketchGroup>(isa, out + first * k, lanes + first * kLanes, sums + g * width,
                            rows + first, size, scaled.quotients.data() + first, column, n, k, seed,
                            begin, run, rooms.of(worker));
    });
    const int64_t columns = std::min(block_columns(n, team.workers), kTotalColumns);
    for_blocks(n, columns, team, [&](int64_t first, int64_t part, int worker) {
      double* const own = total ? total + first : totals.as<double>() + worker * kTotalColumns;
      dispatch<AddGroups>(isa, sum + column + first, sums + first, count, width, scaled.factor,
                          part, own, batch == 0, batch == batches - 1);
    });
  };
  for_runs(d, batches == 1 ? width : most, begin, [&](int64_t column, int64_t n) {
    for (int64_t batch = 0; batch < batches; ++batch)
      for_runs(n, width, begin + column, [&](int64_t done, int64_t part) {
        double* const total = batches == 1 ? nullptr : totals.as<double>() + done;
        add_batch(batch, column + done, part, total);
      });
  });
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
