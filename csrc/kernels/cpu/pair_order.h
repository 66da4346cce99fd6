// SPDX-License-Identifier: Apache-2.0
// Orders rows so that a symmetric set of pairs fills few tiles.
#pragma once

#include <cstdint>
#include <vector>

namespace fastagg {

// Rows connected by pairs, directly or through others.
struct Components {
  std::vector<int64_t> order;  // [S] a permutation of [0, S): the rows of component 0, of 1, ...
  std::vector<int64_t> ends;   // where each component ends in `order`
};

// The components of [0, S) under `pairs`, in the order of their lowest row, each by breadth-first
// search, so that rows with common pairs are neighbours. Deterministic.
//   pairs   // [S, S] symmetric 0/1 flags
inline Components components(const uint8_t* pairs, int64_t S) {
  Components found;
  std::vector<int64_t>& order = found.order;
  order.reserve(S);
  std::vector<uint8_t> seen(S, 0);
  for (int64_t start = 0; start < S; ++start) {
    if (seen[start]) continue;
    seen[start] = 1;
    order.push_back(start);
    const auto complete = static_cast<std::size_t>(S);
    for (std::size_t head = order.size() - 1; head < order.size() && order.size() < complete;
         ++head) {
      const uint8_t* linked = pairs + order[head] * S;
      for (int64_t j = 0; j < S; ++j)
        if (linked[j] && !seen[j]) {
          seen[j] = 1;
          order.push_back(j);
        }
    }
    found.ends.push_back(static_cast<int64_t>(order.size()));
  }
  return found;
}

// components(pairs, S).order
inline std::vector<int64_t> component_order(const uint8_t* pairs, int64_t S) {
  return components(pairs, S).order;
}

}  // namespace fastagg
