// SPDX-License-Identifier: Apache-2.0
// nearest_rows: rows and their nearest ones, from a Gram matrix: Krum's scores and choices, and
// means of neighbours. One thread computes them. The squared distance of rows i and j is
// max(0, G[i][i] + G[j][j] - 2 G[i][j]): exactly 0 for identical rows. With numbers that are not
// finite, results have no meaning, but positions are valid.
#pragma once

#include <algorithm>
#include <cstdint>

namespace fastagg::cpu {

// How many nearest others count in the Krum score among n rows, of which f >= 0 may be faulty.
inline int64_t krum_neighbours(int64_t n, int64_t f) {
  return std::min(std::max<int64_t>(1, n - std::min(f, n) - 2), n - 1);
}

// scores[i]: the sum of the squared distances of row i to its nearest others (Krum). It does not
// depend on the order of the rows.
//   gram     // [n, n]
//   scores   // [n]
void krum_scores(const double* gram, int64_t n, int64_t f, double* scores);

// Chooses rows one after the other: each has the lowest Krum score among those that are left, the
// first one on ties.
//   gram     // [n, n]
//   chosen   // [count], count <= n
void krum_selection(const double* gram, int64_t n, int64_t f, int64_t count, int64_t* chosen);

// The means of each of the first n rows with its nearest ones, the first ones on ties. The rows
// from the n-th on are in no mean, and follow unchanged.
//   gram      // [size, size], n <= size
//   weights   // [n], of the rows in a mean
//   count     // of rows in a mean, the row itself included: 1 to n
//   mixing    // [size, size]: the share of each row (a column) in each mean (a row)
//   mixed     // [size, size]: the Gram matrix of the means, exactly symmetric
void nearest_means(const double* gram, int64_t size, int64_t n, const double* weights,
                   int64_t count, double* mixing, double* mixed);

}  // namespace fastagg::cpu
