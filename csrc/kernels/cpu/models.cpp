// SPDX-License-Identifier: Apache-2.0
#include "../models.h"

#include <algorithm>

#include "simd.h"

namespace fastagg::cpu {
namespace {

struct Subtract {
  template <int W, class T>
  FASTAGG_INLINE static void run(const T* x, const float* base, float* __restrict to, int64_t n) {
    FASTAGG_WHOLE_VECTORS
    for (int64_t k = 0; k < n; ++k) to[k] = widened(x[k]) - base[k];
  }
};

template <class T>
void subtract(Isa isa, const void* row, int64_t skip, const float* base, float* to, int64_t n) {
  dispatch<Subtract>(isa, static_cast<const T*>(row) + skip, base, to, n);
}

}  // namespace

ModelDifferences::ModelDifferences(const std::vector<ModelPart>& parts, const float* base,
                                   int64_t begin, int64_t d)
    : base_(base + begin) {
  for (const ModelPart& part : parts) {
    const int64_t first = std::max(part.begin, begin),
                  last = std::min(part.begin + part.size, begin + d);
    if (first >= last) continue;
    Piece piece{first - begin, last - begin, &part, begin - part.begin, {}};
    if (part.element == Element::kFloat)
      for (const void* row : part.rows)
        piece.at.push_back(static_cast<const float*>(row) + piece.offset);
    pieces_.push_back(std::move(piece));
  }
}

void ModelDifferences::read(int64_t first, int64_t last, int64_t column, int64_t n, float* to,
                            int64_t stride) const {
  const Isa isa = current_isa();
  auto piece = std::upper_bound(pieces_.begin(), pieces_.end(), column,
                                [](int64_t c, const Piece& p) { return c < p.end; });
  for (int64_t at = column; at < column + n; ++piece) {
    const ModelPart& part = *piece->part;
    const int64_t count = std::min(piece->end, column + n) - at;
    const int64_t skip = at + piece->offset;
    for (int64_t s = first; s < last; ++s) {
      float* out = to + (s - first) * stride + (at - column);
      if (part.element == Element::kFloat)
        subtract<float>(isa, part.rows[s], skip, base_ + at, out, count);
      else if (part.element == Element::kBfloat16)
        subtract<Bfloat16>(isa, part.rows[s], skip, base_ + at, out, count);
      else
        subtract<Half>(isa, part.rows[s], skip, base_ + at, out, count);
    }
    at += count;
  }
}

const float* const* ModelDifferences::ahead(int64_t column, int64_t n) const {
  for (const Piece& piece : pieces_)
    if (piece.begin <= column && column + n <= piece.end)
      return piece.at.empty() ? nullptr : piece.at.data();
  return nullptr;
}

}  // namespace fastagg::cpu
