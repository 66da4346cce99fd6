// SPDX-License-Identifier: Apache-2.0
// The arguments of ops that move vectors along vectors, for all devices: lerp_total_, add_total_,
// apply_aggregate_, add_momentum_ and add_adaptive_.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/string_view.h>

#include <optional>

#include "../kernels/moment_math.h"
#include "changed_memory.h"
#include "checks.h"

namespace fastagg {

inline void check_lerp_total(const at::Tensor& total, const at::Tensor& end) {
  const int64_t d = total.numel();
  check_tensor(total, "total", at::kDouble, {d});
  check_vector(end, "end", at::kDouble, d, total.device());
  ChangedMemory changed;
  changed.add(total, "total");
  changed.check(end, "end");
}

inline void check_add_total(const at::Tensor& params, const at::Tensor& total) {
  const int64_t d = params.numel();
  check_tensor(params, "params", at::kFloat, {d});
  check_vector(total, "total", at::kDouble, d, params.device());
  ChangedMemory changed;
  changed.add(params, "params");
  changed.check(total, "total");
}

// Checks those of apply_aggregate_. Returns whether the aggregate is float64.
inline bool check_apply_aggregate(const at::Tensor& params, const at::Tensor& applied,
                                  const at::Tensor& aggregate, double norm) {
  const int64_t d = params.numel();
  check_tensor(params, "params", at::kFloat, {d});
  check_tensor(applied, "applied", at::kBool, {});
  check_same_device(applied, "applied", params.device());
  const bool wide = aggregate.scalar_type() == at::kDouble;
  check_vector(aggregate, "aggregate", wide ? at::kDouble : at::kFloat, d, params.device());
  TORCH_CHECK_VALUE(wide || norm == 1.0, "norm: expected 1 with a float32 aggregate, got ", norm);
  ChangedMemory changed;
  changed.add(params, "params");
  changed.add(applied, "applied");
  changed.check(aggregate, "aggregate");
  return wide;
}

// Checks those of add_momentum_, and with `s` those of add_adaptive_. Returns whether the aggregate
// is float64.
inline bool check_moments(const at::Tensor& params, const at::Tensor& m,
                          const std::optional<at::Tensor>& s, const at::Tensor& aggregate) {
  const int64_t d = params.numel();
  check_tensor(params, "params", at::kFloat, {d});
  check_vector(m, "m", at::kFloat, d, params.device());
  if (s) check_vector(*s, "s", at::kFloat, d, params.device());
  const bool wide = aggregate.scalar_type() == at::kDouble;
  check_vector(aggregate, "aggregate", wide ? at::kDouble : at::kFloat, d, params.device());
  ChangedMemory changed;
  changed.add(params, "params");
  changed.add(m, "m");
  if (s) changed.add(*s, "s");
  changed.check(aggregate, "aggregate");
  return wide;
}

inline SecondMoment check_second_moment(c10::string_view kind) {
  if (kind == "adagrad") return SecondMoment::kAdagrad;
  if (kind == "adam") return SecondMoment::kAdam;
  TORCH_CHECK_VALUE(kind == "yogi", "kind: expected \"adagrad\", \"adam\" or \"yogi\", got \"",
                    kind, "\"");
  return SecondMoment::kYogi;
}

}  // namespace fastagg
