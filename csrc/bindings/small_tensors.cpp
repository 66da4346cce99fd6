// SPDX-License-Identifier: Apache-2.0
// A step of a small model spends more time in Python than in kernels, and an operator of PyTorch
// takes several microseconds there. These functions make the small tensors of a step, and compute
// with them, in one call each.
#include "small_tensors.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "checks.h"

namespace py = pybind11;

namespace fastagg {

at::Tensor new_tensor(at::IntArrayRef shape, at::ScalarType dtype) {
  return at::detail::empty_cpu(shape, dtype);
}

at::Tensor take_rows(const at::Tensor& matrix, const std::vector<int64_t>& order) {
  check_dense(matrix, "matrix");
  TORCH_CHECK_TYPE(matrix.scalar_type() == at::kFloat, "matrix: expected float32");
  TORCH_CHECK_VALUE(matrix.dim() == 2 && (matrix.stride(1) == 1 || matrix.size(1) <= 1),
                    "matrix: expected a contiguous last dimension");
  check_same_device(matrix, "matrix", at::kCPU);
  check_memory(matrix, "matrix");
  const int64_t d = matrix.size(1);
  at::Tensor out = new_tensor({static_cast<int64_t>(order.size()), d}, at::kFloat);
  const auto* from = matrix.const_data_ptr<float>();
  auto* to = out.mutable_data_ptr<float>();
  for (int64_t row : order) {
    TORCH_CHECK_INDEX(row >= 0 && row < matrix.size(0), "order: expected rows of the matrix");
    std::memcpy(to, from + row * matrix.stride(0), d * sizeof(float));
    to += d;
  }
  return out;
}

namespace {

// --- small tensors ------------------------------------------------------------------------------

// A tensor [n] that each(tensor, i, item i) fills from a Python sequence of n items. It reads a
// tuple of its own, because a conversion can run Python code, which may change the caller's list.
template <class Each>
at::Tensor tensor_of_items(py::handle items, at::ScalarType dtype, const Each& each) {
  if (!PySequence_Check(items.ptr())) throw py::type_error("expected a sequence of numbers");
  const auto own = py::reinterpret_steal<py::object>(PySequence_Tuple(items.ptr()));
  if (!own) throw py::error_already_set();
  const int64_t count = PyTuple_GET_SIZE(own.ptr());
  at::Tensor out = new_tensor({count}, dtype);
  for (int64_t i = 0; i < count; ++i) {
    each(out, i, PyTuple_GET_ITEM(own.ptr(), i));
    if (PyErr_Occurred()) throw py::error_already_set();
  }
  return out;
}

at::Tensor int_tensor(py::handle items) {
  return tensor_of_items(items, at::kLong, [](const at::Tensor& out, int64_t i, PyObject* item) {
    out.mutable_data_ptr<int64_t>()[i] = PyLong_AsLongLong(item);
  });
}

at::Tensor float_tensor(py::handle items) {
  return tensor_of_items(items, at::kDouble, [](const at::Tensor& out, int64_t i, PyObject* item) {
    out.mutable_data_ptr<double>()[i] = PyFloat_AsDouble(item);
  });
}

at::Tensor uninitialized(const std::vector<int64_t>& shape, at::ScalarType dtype) {
  for (int64_t size : shape) TORCH_CHECK_VALUE(size >= 0, "shape: expected sizes >= 0, got ", size);
  return new_tensor(shape, dtype);
}

at::Tensor picked(const at::Tensor& values, const at::Tensor& positions) {
  const int64_t count = values.numel(), n = positions.numel();
  check_tensor(values, "values", at::kDouble, {count});
  check_tensor(positions, "positions", at::kLong, {n});
  check_same_device(values, "values", at::kCPU);
  check_same_device(positions, "positions", at::kCPU);
  at::Tensor out = new_tensor({n}, at::kDouble);
  const auto* from = values.const_data_ptr<double>();
  const auto* position = positions.const_data_ptr<int64_t>();
  auto* to = out.mutable_data_ptr<double>();
  for (int64_t i = 0; i < n; ++i) {
    TORCH_CHECK_INDEX(position[i] >= 0 && position[i] < count, "positions: expected less than ",
                      count, ", got ", position[i]);
    to[i] = from[position[i]];
  }
  return out;
}

at::Tensor diagonal(const at::Tensor& matrix) {
  const int64_t n = matrix.dim() == 2 ? matrix.size(0) : 0;
  check_tensor(matrix, "matrix", at::kDouble, {n, n});
  check_same_device(matrix, "matrix", at::kCPU);
  at::Tensor out = new_tensor({n}, at::kDouble);
  const auto* from = matrix.const_data_ptr<double>();
  auto* to = out.mutable_data_ptr<double>();
  for (int64_t i = 0; i < n; ++i) to[i] = from[i * (n + 1)];
  return out;
}

// The counter, which must be one int64 in CPU memory.
int64_t* counter_of(const at::Tensor& counter) {
  check_tensor(counter, "counter", at::kLong, {});
  check_same_device(counter, "counter", at::kCPU);
  return counter.mutable_data_ptr<int64_t>();
}

int64_t count_of(const at::Tensor& counter) {
  return *counter_of(counter);
}

void count_up_(const at::Tensor& counter) {
  ++*counter_of(counter);
}

at::Tensor rounded(const at::Tensor& values) {
  check_tensor(values, "values", at::kDouble, {kAny});
  check_same_device(values, "values", at::kCPU);
  at::Tensor out = new_tensor(values.sizes(), at::kFloat);
  const auto* from = values.const_data_ptr<double>();
  std::transform(from, from + values.numel(), out.mutable_data_ptr<float>(),
                 [](double value) { return static_cast<float>(value); });
  return out;
}

at::Tensor flags(const std::vector<int64_t>& positions, int64_t count) {
  at::Tensor out = new_tensor({count}, at::kBool);
  auto* data = out.mutable_data_ptr<bool>();
  std::fill_n(data, count, false);
  for (int64_t position : positions) {
    TORCH_CHECK_INDEX(position >= 0 && position < count, "positions: expected less than ", count);
    data[position] = true;
  }
  return out;
}

// --- sums and bounds over clients ----------------------------------------------------------------

// The correctly rounded sum of finite numbers: the sum so far is kept as numbers whose bits do not
// overlap (Shewchuk 1997), the largest one last. Not finite if a partial sum overflows.
double exact_sum(const double* values, int64_t count) {
  std::vector<double> parts;
  for (int64_t i = 0; i < count; ++i) {
    double x = values[i];
    std::size_t kept = 0;
    for (double y : parts) {
      if (std::abs(x) < std::abs(y)) std::swap(x, y);
      const double high = x + y, low = y - (high - x);
      if (low != 0.0) parts[kept++] = low;
      x = high;
    }
    parts.resize(kept);
    parts.push_back(x);
  }
  double sum = 0.0, rest = 0.0;
  while (!parts.empty() && rest == 0.0) {
    const double y = parts.back(), before = sum;
    parts.pop_back();
    sum = before + y;
    rest = y - (sum - before);
  }
  // The sum was rounded to even if it was halfway; the parts that are left say where it was.
  if (!parts.empty() && (rest < 0.0) == (parts.back() < 0.0)) {
    const double further = sum + 2.0 * rest;
    if (further - sum == 2.0 * rest) sum = further;
  }
  return sum;
}

// The sum of the shares of the clients k with friends[k] = i, in the order of k, for each of `ids`.
// Each of them gets an equal part of the shares of clients without a friend as well.
at::Tensor shares_by_friend(const at::Tensor& shares, const at::Tensor& friends,
                            const std::vector<int64_t>& ids) {
  const int64_t K = shares.numel(), S = static_cast<int64_t>(ids.size());
  check_tensor(shares, "shares", at::kDouble, {K});
  check_tensor(friends, "friends", at::kLong, {K});
  check_same_device(shares, "shares", at::kCPU);
  check_same_device(friends, "friends", at::kCPU);
  const auto* share = shares.const_data_ptr<double>();
  const auto* chosen = friends.const_data_ptr<int64_t>();
  std::vector<double> sums(K, 0.0), without;
  for (int64_t k = 0; k < K; ++k) {
    TORCH_CHECK_INDEX(chosen[k] < K, "friends: expected ids below ", K, ", got ", chosen[k]);
    if (chosen[k] < 0)
      without.push_back(share[k]);
    else
      sums[chosen[k]] += share[k];
  }
  const double rest = exact_sum(without.data(), static_cast<int64_t>(without.size()));
  const double part = rest / static_cast<double>(S);
  at::Tensor out = new_tensor({S}, at::kDouble);
  auto* sum = out.mutable_data_ptr<double>();
  for (int64_t id : ids) {
    TORCH_CHECK_INDEX(id >= 0 && id < K, "ids: expected ids in [0, ", K, "), got ", id);
    *sum++ = rest == 0.0 ? sums[id] : sums[id] + part;
  }
  return out;
}

// The weights of `clients`, divided by their correctly rounded sum; nothing if it is 0 or infinite.
std::optional<at::Tensor> shares_of(const at::Tensor& weights, const at::Tensor& clients) {
  at::Tensor out = picked(weights, clients);
  auto* share = out.mutable_data_ptr<double>();
  const double sum = exact_sum(share, out.numel());
  if (sum == 0.0 || !std::isfinite(sum)) return std::nullopt;
  for (int64_t s = 0; s < out.numel(); ++s) share[s] /= sum;
  return out;
}

// A copy of values [K] float64 with new values of `ids`, and the old ones.
std::tuple<at::Tensor, std::vector<double>> replaced(const at::Tensor& values,
                                                     const std::vector<int64_t>& ids,
                                                     const std::vector<double>& items) {
  const int64_t K = values.numel();
  check_tensor(values, "values", at::kDouble, {K});
  check_same_device(values, "values", at::kCPU);
  TORCH_CHECK_VALUE(ids.size() == items.size(), "items: expected one for each of ", ids.size(),
                    " ids, got ", items.size());
  const auto* before = values.const_data_ptr<double>();
  at::Tensor out = new_tensor({K}, at::kDouble);
  auto* after = out.mutable_data_ptr<double>();
  std::copy_n(before, K, after);
  std::vector<double> old;
  old.reserve(ids.size());
  for (std::size_t s = 0; s < ids.size(); ++s) {
    TORCH_CHECK_INDEX(ids[s] >= 0 && ids[s] < K, "ids: expected ids in [0, ", K, "), got ", ids[s]);
    old.push_back(before[ids[s]]);
    after[ids[s]] = items[s];
  }
  return {out, old};
}

// The sum of the products of two vectors [n] float64, from left to right.
double dot(const at::Tensor& a, const at::Tensor& b) {
  const int64_t n = a.numel();
  check_tensor(a, "a", at::kDouble, {n});
  check_tensor(b, "b", at::kDouble, {n});
  check_same_device(a, "a", at::kCPU);
  check_same_device(b, "b", at::kCPU);
  const auto* x = a.const_data_ptr<double>();
  return std::inner_product(x, x + n, b.const_data_ptr<double>(), 0.0);
}

}  // namespace

void define_small_tensors(py::module_& m) {
  m.def("int_tensor", &int_tensor, py::arg("items"), "A sequence of ints as a tensor [n] int64.");
  m.def("float_tensor", &float_tensor, py::arg("items"),
        "A sequence of numbers as a tensor [n] float64.");
  m.def("uninitialized", &uninitialized, py::arg("shape"), py::arg("dtype"),
        "A tensor with undefined content.");
  m.def("picked", &picked, py::arg("values"), py::arg("positions"),
        "The items of a float64 tensor [K] at some positions, as a tensor [n].");
  m.def("diagonal", &diagonal, py::arg("matrix"), "A copy of the diagonal of a float64 [n, n].");
  m.def("count_of", &count_of, py::arg("counter"), "The value of an int64 tensor [].");
  m.def("count_up_", &count_up_, py::arg("counter"), "Add 1 to an int64 tensor [].");
  m.def("rounded", &rounded, py::arg("values"), "A float64 tensor [n] rounded to float32.");
  m.def("flags", &flags, py::arg("positions"), py::arg("count"),
        "A tensor [count] bool that is True at some positions.");
  m.def("take_rows", &take_rows, py::arg("matrix"), py::arg("order"),
        "A copy of some rows of a float32 matrix.");
  m.def("shares_by_friend", &shares_by_friend, py::arg("shares"), py::arg("friends"),
        py::arg("ids"),
        "For each of `ids`, the sum of the shares of the clients whose friend it is, and an equal "
        "part of the shares of clients without a friend, [n] float64.");
  m.def(
      "shares_of", &shares_of, py::arg("weights"), py::arg("clients"),
      "The float64 weights of clients, divided by their correctly rounded sum; None if it is 0 or "
      "infinite.");
  m.def("replaced", &replaced, py::arg("values"), py::arg("ids"), py::arg("items"),
        "A copy of a float64 tensor with new items at `ids`, and a list of the old ones.");
  m.def("dot", &dot, py::arg("a"), py::arg("b"), "The dot product of two float64 tensors [n].");
}

}  // namespace fastagg
