// SPDX-License-Identifier: Apache-2.0
// The ceilings of the machine: the fastest plain read, update (in place, or into other rows) and
// multiply-add that we can write with the instruction set of the kernels. Each function returns the
// seconds from the moment when all of its threads are ready until the last one has finished;
// creating the threads does not count. Built and called by ceilings.py.
#ifdef __linux__
#include <sched.h>
#endif

#include <atomic>
#include <chrono>
#include <cstdint>
#include <thread>
#include <vector>

#include "../csrc/kernels/cpu/simd.h"
#include "../csrc/kernels/cpu/streaming.h"

using namespace fastagg::cpu;

namespace {

constexpr int kUnroll = 8;
// Volatile, so that the compiler can neither drop unused results nor precompute with constants.
volatile float sink, factor = 0.999f, term = 0.001f;

#ifdef __linux__
// The processors that the loading thread may use. The harness later restricts it to one of them.
const cpu_set_t allowed = [] {
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) != 0) CPU_ZERO(&set);
  return set;
}();
#endif

// Keeps the calling thread on the n-th allowed processor until the object is destroyed. Otherwise
// two new threads often share a processor for the few milliseconds of a measurement.
class Pinned {
 public:
#ifdef __linux__
  explicit Pinned(int n) {
    if (sched_getaffinity(0, sizeof before_, &before_) != 0) return;
    for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu)
      if (CPU_ISSET(cpu, &allowed) && n-- == 0) {
        cpu_set_t one;
        CPU_ZERO(&one);
        CPU_SET(cpu, &one);
        pinned_ = sched_setaffinity(0, sizeof one, &one) == 0;
      }
  }
  ~Pinned() {
    if (pinned_) sched_setaffinity(0, sizeof before_, &before_);
  }

 private:
  cpu_set_t before_;
  bool pinned_ = false;
#else
  explicit Pinned(int) {}
#endif
};

template <class Body>
double timed(int threads, const Body& body) {
  using Clock = std::chrono::steady_clock;
  std::atomic<int> ready{0};
  std::vector<Clock::time_point> begin(threads), end(threads);
  auto work = [&](int thread) {
    const Pinned pinned(thread);
    ++ready;
    while (ready.load(std::memory_order_acquire) < threads) {
    }
    begin[thread] = Clock::now();
    body(thread);
    end[thread] = Clock::now();
  };
  std::vector<std::thread> others;
  for (int thread = 1; thread < threads; ++thread) others.emplace_back(work, thread);
  work(0);
  for (auto& other : others) other.join();
  Clock::time_point first = begin[0], last = end[0];
  for (int thread = 1; thread < threads; ++thread) {
    first = begin[thread] < first ? begin[thread] : first;
    last = end[thread] > last ? end[thread] : last;
  }
  return std::chrono::duration<double>(last - first).count();
}

// `ahead`: prefetch distance in floats; 0 leaves prefetching to the hardware.
struct Read {
  template <int W>
  FASTAGG_INLINE static void run(const float* x, int64_t n, int64_t ahead, float* out) {
    using V = Vec<int32_t, W>;
    V seen[kUnroll] = {};
    for (int64_t k = 0; k + kUnroll * W <= n; k += kUnroll * W) {
      if (ahead)
        for (int64_t line = 0; line < kUnroll * W; line += 16) prefetch(x + k + ahead + line);
      for (int u = 0; u < kUnroll; ++u) {
        V v;
        std::memcpy(&v, x + k + u * W, sizeof v);
        seen[u] |= v;
      }
    }
    for (int u = 1; u < kUnroll; ++u) seen[0] |= seen[u];
    *out = static_cast<float>(seen[0][0]);
  }
};

template <bool kStreamed>
struct Update {  // to = u - c, which stays bounded if it is repeated with to = c
  template <int W>
  FASTAGG_INLINE static void run(float* to, const float* c, const float* u, int64_t n,
                                 int64_t ahead) {
    for (int64_t k = 0; k + kUnroll * W <= n; k += kUnroll * W) {
      if (ahead)
        for (int64_t line = 0; line < kUnroll * W; line += 16) {
          prefetch(c + k + ahead + line);
          prefetch(u + k + ahead + line);
        }
      for (int i = 0; i < kUnroll; ++i) {
        const int64_t at = k + i * W;
        const Vec<float, W> difference = load<W>(u + at) - load<W>(c + at);
        if constexpr (kStreamed)
          stream<W>(to + at, difference);
        else
          store<W>(to + at, difference);
      }
    }
    if constexpr (kStreamed) finish_streams();
  }
};

constexpr int kChains = 12;  // independent sums: more than latency * units, fewer than registers

struct Fma {
  template <int W>
  FASTAGG_INLINE static void run(int64_t iterations, float factor, float term, float* out) {
    Vec<float, W> sums[kChains];
    for (int c = 0; c < kChains; ++c) sums[c] = Vec<float, W>{} + static_cast<float>(c);
    const Vec<float, W> a = Vec<float, W>{} + factor, b = Vec<float, W>{} + term;
    for (int64_t i = 0; i < iterations; ++i)
      for (int c = 0; c < kChains; ++c) sums[c] = sums[c] * a + b;
    for (int c = 1; c < kChains; ++c) sums[0] += sums[c];
    *out = sums[0][0];
  }
};

// The part of [0, n) that a thread processes, in whole cache lines.
struct Part {
  int64_t begin, size;
  Part(int64_t n, int threads, int thread) {
    const int64_t each = (n / threads) / 16 * 16;
    begin = each * thread;
    size = thread + 1 == threads ? n - begin : each;
  }
};

int lanes(int isa) {
  return isa == 2 ? 16 : isa == 1 ? 8 : 4;
}

}  // namespace

extern "C" {

// Reads n floats, `passes` times. isa: 0 portable, 1 AVX2, 2 AVX-512; the machine must support it.
double ceiling_read(const float* x, int64_t n, int64_t ahead, int passes, int isa, int threads) {
  return timed(threads, [&](int thread) {
    const Part part(n, threads, thread);
    float out = 0;
    for (int pass = 0; pass < passes; ++pass) {
      dispatch<Read>(static_cast<Isa>(isa), x + part.begin, part.size, ahead, &out);
      sink = out;
    }
  });
}

// Writes n floats to = u - c, `passes` times. `to` may be c. With `streamed`, it is written past
// the caches, and must begin at a cache line.
double ceiling_update(float* to, const float* c, const float* u, int64_t n, int64_t ahead,
                      int streamed, int passes, int isa, int threads) {
  return timed(threads, [&](int thread) {
    const Part part(n, threads, thread);
    const auto run = [&](auto update) {
      for (int pass = 0; pass < passes; ++pass)
        dispatch<decltype(update)>(static_cast<Isa>(isa), to + part.begin, c + part.begin,
                                   u + part.begin, part.size, ahead);
    };
    if (streamed)
      run(Update<true>());
    else
      run(Update<false>());
  });
}

// Runs about `flops` flops on each thread (a multiply-add counts as two); *done is the exact number
// on all threads.
double ceiling_fma(int64_t flops, int isa, int threads, int64_t* done) {
  const int64_t each = 2 * kChains * lanes(isa);
  const int64_t iterations = flops / each;
  *done = iterations * each * threads;
  return timed(threads, [&](int) {
    float out = 0;
    dispatch<Fma>(static_cast<Isa>(isa), iterations, float{factor}, float{term}, &out);
    sink = out;
  });
}

// Runs `additions` integer additions, each of which needs the result of the one before: one cycle
// each. Returns the seconds; with ceiling_fma, this gives multiply-adds per cycle.
double ceiling_cycles(int64_t additions) {
  return timed(1, [&](int) {
    uint64_t sum = 0, term = 1;
    asm volatile("" : "+r"(term));  // not a constant: some processors add constants for free
    for (int64_t i = 0; i < additions; i += 16)
      for (int k = 0; k < 16; ++k) {
        sum += term;
        asm volatile("" : "+r"(sum));
      }
  });
}

}  // extern "C"
