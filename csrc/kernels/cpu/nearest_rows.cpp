// SPDX-License-Identifier: Apache-2.0
#include "../nearest_rows.h"

#include <algorithm>
#include <limits>
#include <vector>

#include "fixed_sum.h"
#include "simd.h"

namespace fastagg::cpu {

namespace {

FASTAGG_INLINE double sum(const double* x, int64_t n) {
  return fixed_sum(n, [&](int64_t i) FASTAGG_INLINE_LAMBDA { return x[i]; });
}

FASTAGG_INLINE double dot(const double* x, const double* y, int64_t n) {
  return fixed_sum(n, [&](int64_t i) FASTAGG_INLINE_LAMBDA { return x[i] * y[i]; });
}

// The squared distance of two rows, from the product and the squares of their norms. It is
// symmetric in them. Twice a number is exact, so no instruction set rounds otherwise.
FASTAGG_INLINE double square_distance(double a, double b, double product) {
  const double square = (a + b) - 2.0 * product;
  return square < 0.0 ? 0.0 : square;  // a NaN stays NaN
}

// Sorts W lists of n numbers at once, each by itself: number i of list l is lists[i * W + l].
// Batcher's odd-even merge sort (as in sort_network.h), for any n.
template <int W>
FASTAGG_INLINE void sort_lists(double* lists, int64_t n) {
  for (int64_t p = 1; p < n; p *= 2)
    for (int64_t k = p; k >= 1; k /= 2)
      for (int64_t j = k % p; j + k < n; j += 2 * k) {
        if (((j + k) & (2 * p - 1)) == 0) continue;  // those would be of two blocks of 2p numbers
        const int64_t count = std::min(k, n - k - j);
        for (int64_t i = j; i < j + count; ++i) {
          double *low = lists + i * W, *high = low + k * W;
          unroll<2>([&](auto half) FASTAGG_INLINE_LAMBDA {
            const auto a = load<W / 2>(low + half * (W / 2));
            const auto b = load<W / 2>(high + half * (W / 2));
            store<W / 2>(low + half * (W / 2), b < a ? b : a);
            store<W / 2>(high + half * (W / 2), b < a ? a : b);
          });
        }
      }
}

// The sorted squared distances of each of n rows to the n - 1 others: lists [n, n - 1]. `block` has
// room for W x n numbers.
struct SortedDistances {
  template <int W>
  FASTAGG_INLINE static void run(const double* gram, const double* squares, int64_t stride,
                                 int64_t n, double* block, double* lists) {
    for (int64_t begin = 0; begin < n; begin += W) {
      const int64_t count = std::min<int64_t>(W, n - begin);
      for (int64_t l = 0; l < count; ++l) {
        const int64_t i = begin + l;
        for (int64_t j = 0; j < n; ++j)
          block[j * W + l] = square_distance(squares[i], squares[j], gram[i * stride + j]);
        block[i * W + l] = -1.0;  // the row itself is first
      }
      sort_lists<W>(block, n);
      for (int64_t l = 0; l < count; ++l)
        for (int64_t j = 1; j < n; ++j) lists[(begin + l) * (n - 1) + j - 1] = block[j * W + l];
    }
  }
};

// The diagonal of a Gram matrix, and the sorted distances of its first n rows.
class Neighbours {
 public:
  Neighbours(const double* gram, int64_t stride, int64_t n)
      : n_(n), squares_(n), lists_(n * (n - 1)) {
    constexpr int kMostLists = 16;
    for (int64_t i = 0; i < n; ++i) squares_[i] = gram[i * stride + i];
    std::vector<double> block(kMostLists * n);
    dispatch<SortedDistances>(current_isa(), gram, squares(), stride, n, block.data(), list(0));
  }
  const double* squares() const { return squares_.data(); }
  double* list(int64_t i) { return lists_.data() + i * (n_ - 1); }

 private:
  int64_t n_;
  std::vector<double> squares_, lists_;
};

struct Scores {
  template <int W>
  FASTAGG_INLINE static void run(const double* lists, int64_t n, int64_t count, double* scores) {
    for (int64_t i = 0; i < n; ++i) scores[i] = sum(lists + i * (n - 1), count);
  }
};

// krum_selection. `left` has the rows that are left, ascending. Their lists lose the distances to
// chosen rows. Scores are summed anew for each choice, because differences of sums would lose small
// distances beside large ones.
struct Select {
  template <int W>
  FASTAGG_INLINE static void run(const double* gram, const double* squares, double* lists,
                                 int64_t* left, int64_t n, int64_t f, int64_t count,
                                 int64_t* chosen) {
    for (int64_t c = 0; c < count; ++c) {
      const int64_t rest = n - c, counted = krum_neighbours(rest, f);
      int64_t best = 0;
      double least = std::numeric_limits<double>::infinity();
      for (int64_t p = 0; p < rest; ++p) {
        const double score = sum(lists + left[p] * (n - 1), counted);
        if (score < least) best = p, least = score;
      }
      const int64_t pick = chosen[c] = left[best];
      std::copy(left + best + 1, left + rest, left + best);
      for (int64_t p = 0; p < rest - 1; ++p) {
        const int64_t i = left[p];
        double *list = lists + i * (n - 1), *end = list + rest - 1;
        double* lost = std::lower_bound(
            list, end, square_distance(squares[i], squares[pick], gram[i * n + pick]));
        if (lost == end) --lost;  // only with a NaN
        std::copy(lost + 1, end, lost);
      }
    }
  }
};

// The shares of n rows in the mean of row i: `row` has the products of row i, and `farthest` is the
// largest squared distance of the `count` rows.
void shares_of(const double* row, const double* squares, int64_t i, int64_t n,
               const double* weights, int64_t count, double farthest, double* shares) {
  const auto distance = [&](int64_t j) { return square_distance(squares[i], squares[j], row[j]); };
  int64_t taken = 0;
  const auto take = [&](int64_t j) {
    shares[j] = weights[j];
    ++taken;
  };
  take(i);
  for (int64_t j = 0; j < n; ++j)
    if (j != i && distance(j) < farthest) take(j);
  for (int64_t j = 0; j < n && taken < count; ++j)
    if (j != i && distance(j) == farthest) take(j);
  const double total = sum(shares, n);
  for (int64_t j = 0; j < n; ++j) shares[j] /= total;
}

// out = mixing @ gram @ mixing^T, all [size, size]; `row` is a row of the first product.
struct Mix {
  template <int W>
  FASTAGG_INLINE static void run(const double* gram, const double* mixing, int64_t size,
                                 double* row, double* out) {
    for (int64_t i = 0; i < size; ++i) {
      std::fill_n(row, size, 0.0);
      for (int64_t k = 0; k < size; ++k) {
        const double share = mixing[i * size + k];
        if (share == 0.0) continue;
        const double* products = gram + k * size;
        FASTAGG_INDEPENDENT
        for (int64_t j = 0; j < size; ++j) row[j] += share * products[j];
      }
      for (int64_t j = 0; j < size; ++j) out[i * size + j] = dot(row, mixing + j * size, size);
    }
  }
};

}  // namespace

void krum_scores(const double* gram, int64_t n, int64_t f, double* scores) {
  if (n == 0) return;
  Neighbours near(gram, n, n);
  dispatch<Scores>(current_isa(), static_cast<const double*>(near.list(0)), n,
                   krum_neighbours(n, f), scores);
}

void krum_selection(const double* gram, int64_t n, int64_t f, int64_t count, int64_t* chosen) {
  if (count == 0) return;
  Neighbours near(gram, n, n);
  std::vector<int64_t> left(n);
  for (int64_t i = 0; i < n; ++i) left[i] = i;
  dispatch<Select>(current_isa(), gram, near.squares(), near.list(0), left.data(), n, f, count,
                   chosen);
}

void nearest_means(const double* gram, int64_t size, int64_t n, const double* weights,
                   int64_t count, double* mixing, double* mixed) {
  std::fill_n(mixing, size * size, 0.0);
  for (int64_t i = n; i < size; ++i) mixing[i * size + i] = 1.0;
  if (n > 0) {
    Neighbours near(gram, size, n);
    for (int64_t i = 0; i < n; ++i)
      shares_of(gram + i * size, near.squares(), i, n, weights, count,
                count > 1 ? near.list(i)[count - 2] : -1.0, mixing + i * size);
  }
  std::vector<double> row(size);
  dispatch<Mix>(current_isa(), gram, static_cast<const double*>(mixing), size, row.data(), mixed);
  for (int64_t i = 0; i < size; ++i)
    for (int64_t j = 0; j < i; ++j) {
      const double mean = (mixed[i * size + j] + mixed[j * size + i]) / 2.0;
      mixed[i * size + j] = mixed[j * size + i] = mean;
    }
}

}  // namespace fastagg::cpu
