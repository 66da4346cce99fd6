// SPDX-License-Identifier: Apache-2.0
#include "gram_memory.h"

#include "../gram.h"

namespace fastagg::cpu {
namespace {

template <int W>
int64_t bytes_of_all_pairs(int64_t S, int64_t d, int workers) {
  const int64_t strips = ceil_div(S, Shape<W>::R);
  const GramColumns cut(d);
  return GramMemory<W>(strips * (strips + 1) / 2, strips, cut.chunks, workers).bytes();
}

}  // namespace

int64_t gram_scratch(int64_t S, int64_t d, int workers) {
  if (S == 0) return 0;
  switch (current_isa()) {
    case Isa::kAvx512:
      return bytes_of_all_pairs<16>(S, d, workers);
    case Isa::kAvx2:
      return bytes_of_all_pairs<8>(S, d, workers);
    case Isa::kPortable:
      return bytes_of_all_pairs<4>(S, d, workers);
  }
  return 0;
}

}  // namespace fastagg::cpu
