// SPDX-License-Identifier: Apache-2.0
#include "../moments.h"

#include <type_traits>

#include "row_blocks.h"

namespace fastagg::cpu {
namespace {

// Calls body(k, v) for n columns with their aggregate v. Most rules have it as it is, in float32.
// Each kind of aggregate has its own loop, because GCC vectorizes none with a choice in it.
template <int W, class T, class Body>
FASTAGG_INLINE void for_columns(const float* params, const T* aggregate, int64_t n, double norm,
                                bool models, const Body& body) {
  const auto loop = [&](const auto& aggregate_of) FASTAGG_INLINE_LAMBDA {
    FASTAGG_INDEPENDENT
    FASTAGG_WHOLE_VECTORS
    for (int64_t k = 0; k < n; ++k) body(k, aggregate_of(k));
  };
  if (models)
    loop([&](int64_t k)
             FASTAGG_INLINE_LAMBDA { return aggregate_at(aggregate[k], norm, params[k], true); });
  else if (!std::is_same_v<T, float> || norm != 1.0)
    loop([&](int64_t k)
             FASTAGG_INLINE_LAMBDA { return aggregate_at(aggregate[k], norm, 0.0f, false); });
  else
    loop([&](int64_t k) FASTAGG_INLINE_LAMBDA { return static_cast<float>(aggregate[k]); });
}

struct AddMomentum {
  template <int W, class T>
  FASTAGG_INLINE static void run(float* params, float* m, const T* aggregate, int64_t n, float lr,
                                 float beta, bool nesterov, double norm, bool models) {
    const auto step = [&](int64_t k, float v) FASTAGG_INLINE_LAMBDA {
      const float next = next_momentum(m[k], v, beta), ahead = nesterov_step(next, v, beta);
      m[k] = next;
      params[k] = moved(params[k], lr, nesterov ? ahead : next);
    };
    for_columns<W>(params, aggregate, n, norm, models, step);
  }
};

template <SecondMoment kKind>
struct AddAdaptive {
  template <int W, class T>
  FASTAGG_INLINE static void run(float* params, float* m, float* s, const T* aggregate, int64_t n,
                                 float lr, Decay beta_1, Decay beta_2, float tau, double norm,
                                 bool models) {
    const auto step = [&](int64_t k, float v) FASTAGG_INLINE_LAMBDA {
      const float first = next_first(m[k], v, beta_1);
      const float second = next_second<kKind>(s[k], v, beta_2);
      m[k] = first;
      s[k] = second;
      params[k] = moved(params[k], lr, adaptive_step(first, second, tau));
    };
    for_columns<W>(params, aggregate, n, norm, models, step);
  }
};

template <SecondMoment kKind, class T>
void add_adaptive_of(float* params, float* m, float* s, const T* aggregate, int64_t d, double lr,
                     double beta_1, double beta_2, double tau, double norm, bool models,
                     const Parallel& parallel) {
  const Isa isa = current_isa();
  const Parallel team = parallel.for_work((6 * sizeof(float) + sizeof(T)) * d);
  const Decay first(beta_1), second(beta_2);
  const float rate = static_cast<float>(lr), least = static_cast<float>(tau);
  for_blocks(d, block_columns(d, team.workers), team, [&](int64_t column, int64_t n, int) {
    dispatch<AddAdaptive<kKind>>(isa, params + column, m + column, s + column, aggregate + column,
                                 n, rate, first, second, least, norm, models);
  });
}

}  // namespace

template <class T>
void add_momentum(float* params, float* m, const T* aggregate, int64_t d, double lr, double beta,
                  bool nesterov, double norm, bool models, const Parallel& parallel) {
  const Isa isa = current_isa();
  const Parallel team = parallel.for_work((4 * sizeof(float) + sizeof(T)) * d);
  const float rate = static_cast<float>(lr), kept = static_cast<float>(beta);
  for_blocks(d, block_columns(d, team.workers), team, [&](int64_t column, int64_t n, int) {
    dispatch<AddMomentum>(isa, params + column, m + column, aggregate + column, n, rate, kept,
                          nesterov, norm, models);
  });
}

template <class T>
void add_adaptive(float* params, float* m, float* s, const T* aggregate, int64_t d,
                  SecondMoment kind, double lr, double beta_1, double beta_2, double tau,
                  double norm, bool models, const Parallel& parallel) {
  const auto add = kind == SecondMoment::kAdagrad ? add_adaptive_of<SecondMoment::kAdagrad, T>
                   : kind == SecondMoment::kAdam  ? add_adaptive_of<SecondMoment::kAdam, T>
                                                  : add_adaptive_of<SecondMoment::kYogi, T>;
  add(params, m, s, aggregate, d, lr, beta_1, beta_2, tau, norm, models, parallel);
}

template void add_momentum(float*, float*, const float*, int64_t, double, double, bool, double,
                           bool, const Parallel&);
template void add_momentum(float*, float*, const double*, int64_t, double, double, bool, double,
                           bool, const Parallel&);
template void add_adaptive(float*, float*, float*, const float*, int64_t, SecondMoment, double,
                           double, double, double, double, bool, const Parallel&);
template void add_adaptive(float*, float*, float*, const double*, int64_t, SecondMoment, double,
                           double, double, double, double, bool, const Parallel&);

}  // namespace fastagg::cpu
