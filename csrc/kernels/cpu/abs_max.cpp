// SPDX-License-Identifier: Apache-2.0
#include "../abs_max.h"

#include <cstring>

#include "magnitude.h"
#include "scratch.h"

namespace fastagg::cpu {
namespace {

constexpr int64_t kChunk = 1 << 16;  // columns of a task: 256 KB, long enough to hide its start

// Prefetch 4 KB ahead, because hardware prefetchers stop at the end of a page.
constexpr int64_t kAhead = 1024;

struct AbsMax {
  template <int W>
  FASTAGG_INLINE static void run(const float* x, int64_t n, int32_t* result) {
    // Four independent maxima hide the latency of each other's instructions.
    constexpr int64_t kUnroll = 4;
    Magnitude<W> largest[kUnroll];
    int64_t k = 0;
    for (; k + kUnroll * W <= n; k += kUnroll * W) {
      for (int64_t line = 0; line < kUnroll * W; line += 16) prefetch(x, k + kAhead + line);
      for (int u = 0; u < kUnroll; ++u) largest[u].add(x + k + u * W, W);
    }
    largest[0].add(x + k, n - k);
    *result = 0;
    for (const auto& one : largest) *result = std::max(*result, one.bits());
  }
};

}  // namespace

void abs_max(const float* const* rows, int64_t S, int64_t d, float* out, const Parallel& parallel) {
  const int64_t chunks = std::max<int64_t>(1, ceil_div(d, kChunk));
  const Scratch scratch(S * chunks * int64_t{sizeof(int32_t)});
  auto* partial = scratch.as<int32_t>();  // [S, chunks]
  const Isa isa = current_isa();
  parallel.for_work(S * d * 4).for_each(S * chunks, [&](int64_t task, int) {
    const int64_t begin = (task % chunks) * kChunk;
    dispatch<AbsMax>(isa, rows[task / chunks] + begin, std::min(kChunk, d - begin), partial + task);
  });
  for (int64_t s = 0; s < S; ++s) {
    const int32_t largest = *std::max_element(partial + s * chunks, partial + (s + 1) * chunks);
    std::memcpy(out + s, &largest, sizeof largest);
  }
}

}  // namespace fastagg::cpu
