// SPDX-License-Identifier: Apache-2.0
// S models, each in the parts that a framework has received: one array for each layer, at any
// address; and their differences to a base, as rows.
#pragma once

#include <cstdint>
#include <vector>

#include "common.h"
#include "elements.h"
#include "row_source.h"

namespace fastagg::cpu {

enum class Element { kFloat, kBfloat16, kHalf };

// The same part of all models: columns [begin, begin + size).
struct ModelPart {
  int64_t begin, size;
  Element element;
  std::vector<const void*> rows;  // [S]
};

// Row s is model s minus the base, rounded to float32, in d columns from column `begin` on.
class ModelDifferences final : public RowSource {
 public:
  //   parts   // ascending, without gaps; they must outlive this object
  //   base    // of all columns of the parts
  ModelDifferences(const std::vector<ModelPart>& parts, const float* base, int64_t begin,
                   int64_t d);
  void read(int64_t first, int64_t last, int64_t column, int64_t n, float* to,
            int64_t stride) const override;
  const float* const* ahead(int64_t column, int64_t n) const override;

 private:
  struct Piece {  // what the d columns have of a part
    int64_t begin, end;
    const ModelPart* part;
    int64_t offset;                // column c is element c + offset of the part
    std::vector<const float*> at;  // [S] element `offset`; empty if elements are not floats
  };
  std::vector<Piece> pieces_;
  const float* base_;  // of column 0
};

}  // namespace fastagg::cpu
