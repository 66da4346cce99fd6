// SPDX-License-Identifier: Apache-2.0
// Registers what does not depend on a device, for every op in op_table.h: its schema, and its
// autograd kernel. Kernels are registered in ops_cpu.cpp, ops_cuda.cpp and ops_policy.cpp, fake
// kernels by the wrappers in fastagg/ops.
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/core/stack.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/library.h>

#include <string_view>

namespace fastagg {
namespace {

// Calls check(tensor) for each defined tensor in an argument of an op.
template <class Check>
void for_tensors(const c10::IValue& argument, const Check& check) {
  if (argument.isTensor() && argument.toTensor().defined()) return check(argument.toTensor());
  if (!argument.isList()) return;  // of tensors, or of tensors and None
  for (const c10::IValue& item : argument.toListRef())
    if (item.isTensor() && item.toTensor().defined()) check(item.toTensor());
}

// The autograd kernel of ops that change tensors. They return nothing, so there is no result whose
// backward pass could be an error.
void refuse_gradients(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                      torch::jit::Stack* stack) {
  const bool backward = c10::GradMode::is_enabled();
  for (const c10::IValue& argument : torch::jit::last(*stack, op.schema().arguments().size()))
    for_tensors(argument, [&](const at::Tensor& tensor) {
      const bool needed = (backward && tensor.requires_grad()) || tensor._fw_grad(0).defined();
      TORCH_CHECK(!needed, op.schema().name(),
                  " changes tensors in place and is not differentiable, but one of its tensors "
                  "requires gradients; detach it, or call the op within torch.no_grad()");
    });
  const at::AutoDispatchBelowADInplaceOrView below;
  op.redispatchBoxed(keys & c10::after_autograd_keyset, stack);
}

torch::CppFunction autograd_kernel(std::string_view schema) {
  if (schema.find('!') == std::string_view::npos)
    return torch::autograd::autogradNotImplementedFallback();
  return torch::CppFunction::makeFromBoxedFunction<&refuse_gradients>();
}

}  // namespace
}  // namespace fastagg

TORCH_LIBRARY(fastagg, m) {
#define FASTAGG_OP(name, cpu, cuda, any, schema) m.def(#name schema);
#include "op_table.h"
}

// Aggregation is not differentiable. For ops that return tensors, the fallback makes a backward
// pass through them an error instead of a wrong gradient. Ops that change tensors, such as a
// Parameter, refuse those that require gradients outside torch.no_grad(). The version counters of
// changed tensors are not bumped here: the wrappers do it (mark_changed).
TORCH_LIBRARY_IMPL(fastagg, Autograd, m) {
#define FASTAGG_OP(name, cpu, cuda, any, schema) m.impl(#name, fastagg::autograd_kernel(schema));
#include "op_table.h"
}
