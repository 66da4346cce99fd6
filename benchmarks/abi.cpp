// SPDX-License-Identifier: Apache-2.0
// One op with a list of rows behind three interfaces, for abi.py: PyTorch's C++ interface, its
// stable one (with STABLE), and a C function.
#include <cstdint>
#include <stdexcept>
#include <vector>

#ifdef STABLE
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>
#else
#include <ATen/core/Tensor.h>
#include <torch/library.h>
#endif

namespace {

// out[k] += sum_s rows[s][k]
void add_rows(float* out, const float* const* rows, int64_t S, int64_t d) {
  for (int64_t s = 0; s < S; ++s)
    for (int64_t k = 0; k < d; ++k) out[k] += rows[s][k];
}

template <class Tensor, class Rows>
void checked(const Tensor& out, const Rows& rows) {
  const int64_t d = out.size(0);
  std::vector<const float*> data;
  data.reserve(rows.size());
  for (const Tensor& row : rows) {
    if (row.dim() != 1 || row.size(0) != d || row.stride(0) != 1)
      throw std::runtime_error("rows: expected [d], contiguous");
    data.push_back(static_cast<const float*>(row.const_data_ptr()));
  }
  add_rows(static_cast<float*>(out.mutable_data_ptr()), data.data(),
           static_cast<int64_t>(rows.size()), d);
}

#ifdef STABLE
void op(torch::stable::Tensor out, std::vector<torch::stable::Tensor> rows) {
  checked(out, rows);
}
#else
void op(const at::Tensor& out, at::TensorList rows) {
  checked(out, rows);
}
#endif

}  // namespace

#ifdef STABLE
STABLE_TORCH_LIBRARY(abi_stable, m) {
  m.def("add_rows_(Tensor(a!) out, Tensor[] rows) -> ()");
}
STABLE_TORCH_LIBRARY_IMPL(abi_stable, CPU, m) {
  m.impl("add_rows_", TORCH_BOX(&op));
}
#else
TORCH_LIBRARY(abi_cxx, m) {
  m.def("add_rows_(Tensor(a!) out, Tensor[] rows) -> ()");
}
TORCH_LIBRARY_IMPL(abi_cxx, CPU, m) {
  m.impl("add_rows_", &op);
}
extern "C" void abi_add_rows(float* out, const float* const* rows, int64_t S, int64_t d) {
  add_rows(out, rows, S, d);
}
#endif
