// SPDX-License-Identifier: Apache-2.0
// What the dispatcher does with tensors that no kernel reads: an error that names the argument.
// Without these registrations, torch's fallback for lazily negated and conjugated views would run,
// which reads beyond the stack for ops that return nothing.
#include <ATen/core/Tensor.h>
#include <ATen/core/stack.h>
#include <torch/library.h>

namespace fastagg {
namespace {

bool is_dense(const at::Tensor& t) {
  return !t.defined() ||
         (t.layout() == c10::kStrided && !t.is_nested() && !t.is_quantized() && !t.is_mkldnn());
}

bool all_dense(const c10::IValue& value) {
  if (value.isTensor()) return is_dense(value.toTensor());
  if (!value.isList()) return true;
  for (const c10::IValue& item : value.toListRef())
    if (item.isTensor() && !is_dense(item.toTensor())) return false;
  return true;
}

void refuse(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& arguments = op.schema().arguments();
  for (std::size_t k = 0; k < arguments.size(); ++k)
    TORCH_CHECK_TYPE(all_dense(torch::jit::peek(*stack, k, arguments.size())), arguments[k].name(),
                     ": expected dense tensors (layout torch.strided), got a sparse, nested, "
                     "quantized or MKL-DNN tensor; convert it, for example with to_dense()");
  TORCH_CHECK_TYPE(false, op.schema().name(), ": expected dense tensors");
}

constexpr const char* kNames[] = {
#define FASTAGG_OP(name, cpu, cuda, any, schema) #name,
#include "op_table.h"
};

void fall_through(torch::Library& m) {
  for (const char* name : kNames) m.impl(name, torch::CppFunction::makeFallthrough());
}

void refuse_all(torch::Library& m) {
  for (const char* name : kNames)
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&refuse>());
}

}  // namespace

// The kernels check for these bits and refuse them (check_memory).
TORCH_LIBRARY_IMPL(fastagg, Negative, m) {
  fall_through(m);
}
TORCH_LIBRARY_IMPL(fastagg, Conjugate, m) {
  fall_through(m);
}
TORCH_LIBRARY_IMPL(fastagg, ZeroTensor, m) {
  fall_through(m);
}

TORCH_LIBRARY_IMPL(fastagg, SparseCPU, m) {
  refuse_all(m);
}
TORCH_LIBRARY_IMPL(fastagg, SparseCUDA, m) {
  refuse_all(m);
}
TORCH_LIBRARY_IMPL(fastagg, SparseCsrCPU, m) {
  refuse_all(m);
}
TORCH_LIBRARY_IMPL(fastagg, SparseCsrCUDA, m) {
  refuse_all(m);
}
TORCH_LIBRARY_IMPL(fastagg, MkldnnCPU, m) {
  refuse_all(m);
}
TORCH_LIBRARY_IMPL(fastagg, QuantizedCPU, m) {
  refuse_all(m);
}
TORCH_LIBRARY_IMPL(fastagg, QuantizedCUDA, m) {
  refuse_all(m);
}
TORCH_LIBRARY_IMPL(fastagg, NestedTensorCPU, m) {
  refuse_all(m);
}
TORCH_LIBRARY_IMPL(fastagg, NestedTensorCUDA, m) {
  refuse_all(m);
}

}  // namespace fastagg
