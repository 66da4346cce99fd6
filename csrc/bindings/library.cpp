// SPDX-License-Identifier: Apache-2.0
// Registers what does not depend on a device, for every op in op_table.h: its schema, and its
// autograd kernel. Kernels are registered in ops_cpu.cpp, ops_cuda.cpp and ops_policy.cpp, fake
// kernels by the wrappers in fastagg/ops.
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/library.h>

TORCH_LIBRARY(fastagg, m) {
#define FASTAGG_OP(name, cpu, cuda, any, schema) m.def(#name schema);
#include "op_table.h"
}

// Aggregation is not differentiable. The fallback makes a backward pass through an op an error
// instead of a wrong gradient, and refuses to change a Parameter in place outside torch.no_grad().
// For ops that return nothing it does not bump the version counters of changed arguments: the
// wrappers do (mark_changed).
TORCH_LIBRARY_IMPL(fastagg, Autograd, m) {
#define FASTAGG_OP(name, cpu, cuda, any, schema) \
  m.impl(#name, torch::autograd::autogradNotImplementedFallback());
#include "op_table.h"
}
