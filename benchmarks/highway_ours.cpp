// SPDX-License-Identifier: Apache-2.0
// The kernels that highway.cpp has with Google Highway, as fastagg has them, for highway.py.
#include "../csrc/kernels/weighted_sum.h"

#include "../csrc/kernels/cpu/gram_tiles.h"
#include "../csrc/kernels/cpu/row_blocks.h"
#include "../csrc/kernels/cpu/weighted_sum_block.h"

namespace fastagg::cpu {
namespace {

// All products of `rows` packed rows over `columns` columns, in whole tiles. `rows` is a multiple
// of R * C, `columns` of 16.
struct Tiles {
  template <int W>
  FASTAGG_INLINE static void run(const float* packed, int64_t rows, int64_t columns,
                                 int64_t repeats, double* sums) {
    using T = Shape<W>;
    for (int64_t r = 0; r < repeats; ++r) {
      double* out = sums;
      for (int64_t i = 0; i < rows; i += T::R)
        for (int64_t j = 0; j < rows; j += T::C, out += T::kSlots) {
          const float *a = packed + i * kMaxBlock, *b = packed + j * kMaxBlock;
          call<W, PackedTile<T::R, T::C>>(a, b, kMaxBlock, columns / W, out,
                                          Prefetch<1, 2>{{a, b, b + columns}});
        }
    }
  }
};

}  // namespace
}  // namespace fastagg::cpu

namespace cpu = fastagg::cpu;

extern "C" {

int ours_rows_of_strip() {
  return cpu::Shape<8>::R;
}
int ours_others_of_tile() {
  return cpu::Shape<8>::C;
}
int ours_slots() {
  return cpu::Shape<8>::kSlots;
}
int ours_slot(int product) {
  using T = cpu::Shape<8>;
  return T::OffSums<T::R, T::C>::slots()[product];
}
const char* ours_use_avx2() {
  cpu::set_isa(cpu::Isa::kAvx2);
  return cpu::isa_name(cpu::current_isa());
}
void ours_tiles(const float* packed, int64_t rows, int64_t columns, int64_t repeats, double* sums) {
  cpu::dispatch<cpu::Tiles>(cpu::current_isa(), packed, rows, columns, repeats, sums);
}
// Writes weights / factor and returns the factor.
double ours_scale(const double* weights, int64_t S, float* quotients) {
  const cpu::ScaledWeights scaled(weights, S);
  std::copy(scaled.quotients.begin(), scaled.quotients.end(), quotients);
  return scaled.factor;
}
int64_t ours_block() {
  return cpu::kRowColumns;
}
void ours_weighted_sum(float* out, const float* const* rows, int64_t S, int64_t d,
                       const double* weights) {
  cpu::weighted_sum(out, rows, S, d, weights, 0.0, cpu::Parallel{1, nullptr});
}
}
