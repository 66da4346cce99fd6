// SPDX-License-Identifier: Apache-2.0
// The tiles of a Gram matrix: S rows are cut into strips of R. A strip has one tile for every C
// rows before it, and the diagonal tile of its own rows.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "../common.h"

namespace fastagg::cpu {

// The number of tiles if all pairs are wanted.
inline int64_t all_tiles(int64_t S, int R, int C) {
  int64_t tiles = 0;
  for (int64_t first = 0; first < S; first += R) tiles += ceil_div(first, C) + 1;
  return tiles;
}

// The numbers of the tiles that are computed, strip by strip.
class TileMap {
 public:
  //   pairs   // [S, S], or nullptr for all; only the lower triangle is read. A diagonal tile is
  //           // computed in any case.
  TileMap(int64_t S, int R, int C, const uint8_t* pairs) : R_(R), C_(C) {
    number_.reserve(all_tiles(S, R, C));
    start_.reserve(ceil_div(S, R));
    before_.reserve(ceil_div(S, R) + 1);
    for (int64_t I = 0; I * R < S; ++I) {
      start_.push_back(static_cast<int64_t>(number_.size()));
      before_.push_back(count());
      for (int64_t J = 0; J * C < I * R; ++J)
        number_.push_back(!pairs || any_wanted(pairs, S, I, J) ? count_++ : -1);
      number_.push_back(count_++);
    }
    before_.push_back(count());
  }

  int64_t strips() const { return static_cast<int64_t>(start_.size()); }
  int64_t count() const { return count_; }
  // Tiles of strips before I.
  int64_t before(int64_t I) const { return before_[I]; }
  // The tile of strip I with rows [J * C, J * C + C), as far as they precede the strip, or -1.
  int64_t at(int64_t I, int64_t J) const { return number_[start_[I] + J]; }
  int64_t diagonal(int64_t I) const { return before_[I + 1] - 1; }

 private:
  bool any_wanted(const uint8_t* pairs, int64_t S, int64_t I, int64_t J) const {
    for (int64_t i = I * R_; i < std::min(S, (I + 1) * R_); ++i)
      for (int64_t j = J * C_; j < std::min((J + 1) * C_, I * R_); ++j)
        if (pairs[i * S + j]) return true;
    return false;
  }

  int64_t R_, C_, count_ = 0;
  std::vector<int64_t> number_, start_, before_;
};

}  // namespace fastagg::cpu
