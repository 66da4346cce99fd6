// SPDX-License-Identifier: Apache-2.0
// A step of a small model spends more time in Python than in kernels. These functions check and
// sort the rows of a step, and make its small tensors, in one call each.
#include "step_arguments.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <optional>
#include <tuple>
#include <vector>

#include "checks.h"

namespace py = pybind11;

namespace fastagg {
namespace {

at::Tensor new_tensor(at::IntArrayRef shape, at::ScalarType dtype) {
  return at::detail::empty_cpu(shape, dtype);
}

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

// --- sums and bounds over clients ----------------------------------------------------------------

// The sum of the shares of the clients k with friends[k] = i, in the order of k, for each of `ids`;
// and the shares of clients without a friend.
std::tuple<at::Tensor, std::vector<double>> shares_by_friend(const at::Tensor& shares,
                                                             const at::Tensor& friends,
                                                             const std::vector<int64_t>& ids) {
  const int64_t K = shares.numel();
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
  at::Tensor out = new_tensor({static_cast<int64_t>(ids.size())}, at::kDouble);
  auto* sum = out.mutable_data_ptr<double>();
  for (int64_t id : ids) {
    TORCH_CHECK_INDEX(id >= 0 && id < K, "ids: expected ids in [0, ", K, "), got ", id);
    *sum++ = sums[id];
  }
  return {out, without};
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

void mark_changed(const std::vector<at::Tensor>& tensors) {
  for (const at::Tensor& t : tensors)
    if (!t.is_inference()) t.unsafeGetTensorImpl()->bump_version();
}

// --- shared memory ------------------------------------------------------------------------------

// The addresses of a number of vectors of equal size, in ascending order.
class Vectors {
 public:
  explicit Vectors(const std::vector<at::Tensor>& vectors) {
    for (const at::Tensor& v : vectors) {
      begins_.push_back(reinterpret_cast<std::uintptr_t>(v.const_data_ptr()));
      bytes_ = std::max<std::uintptr_t>(bytes_, v.nbytes());
    }
    std::sort(begins_.begin(), begins_.end());
  }

  // Whether one of them overlaps `bytes` bytes from `row` on.
  bool overlap(const void* row, std::uintptr_t bytes) const {
    const auto begin = reinterpret_cast<std::uintptr_t>(row);
    const auto after = std::lower_bound(begins_.begin(), begins_.end(), begin + bytes);
    return after != begins_.begin() && begin < *(after - 1) + bytes_;  // the last that could
  }

 private:
  std::vector<std::uintptr_t> begins_;
  std::uintptr_t bytes_ = 0;
};

int64_t shared_row(py::handle rows, const std::vector<at::Tensor>& vectors) {
  const Vectors others(vectors);
  if (THPVariable_Check(rows.ptr())) {
    const at::Tensor& matrix = THPVariable_Unpack(rows.ptr());
    TORCH_CHECK_VALUE(matrix.dim() == 2, "rows: expected a matrix, got shape ", matrix.sizes());
    const auto* first = static_cast<const char*>(matrix.const_data_ptr());
    const auto size = static_cast<int64_t>(matrix.element_size());
    for (int64_t s = 0; s < matrix.size(0); ++s)
      if (others.overlap(first + s * matrix.stride(0) * size, matrix.size(1) * size)) return s;
    return -1;
  }
  int64_t s = 0;
  for (py::handle item : rows) {
    if (THPVariable_Check(item.ptr())) {
      const at::Tensor& row = THPVariable_Unpack(item.ptr());
      if (others.overlap(row.const_data_ptr(), row.nbytes())) return s;
    }
    ++s;
  }
  return -1;
}

// --- the usual cohort ---------------------------------------------------------------------------

// The tensor of a Python object, if it is one of exactly this type, with plain numbers in CPU
// memory: dense, without a lazy negation, not fake, not wrapped by a transform.
const at::Tensor* plain_tensor(PyObject* object, at::ScalarType dtype) {
  static const c10::DispatchKeySet plain({c10::DispatchKey::CPU, c10::DispatchKey::AutogradCPU,
                                          c10::DispatchKey::AutocastCPU,
                                          c10::DispatchKey::ADInplaceOrView});
  if (!THPVariable_CheckExact(object)) return nullptr;
  const at::Tensor& t = THPVariable_Unpack(object);
  const bool usual = t.defined() && (t.key_set() | plain) == plain && t.scalar_type() == dtype &&
                     t.layout() == at::kStrided && within_storage(t);
  return usual ? &t : nullptr;
}

// The address of a vector [d] float32, or null.
const float* plain_vector(PyObject* object, int64_t d) {
  const at::Tensor* t = plain_tensor(object, at::kFloat);
  const bool usual = t && t->dim() == 1 && t->size(0) == d && t->is_contiguous();
  return usual ? t->const_data_ptr<float>() : nullptr;
}

bool is_list(PyObject* object) {
  return PyList_CheckExact(object) || PyTuple_CheckExact(object);
}

// Ids from a tensor or a list of ints; nothing if they are unusual. More than K are: at least one
// is wrong, and a view may repeat an id any number of times.
std::optional<std::vector<int64_t>> read_ids(PyObject* clients, int64_t K) {
  std::vector<int64_t> ids;
  if (is_list(clients)) {
    const Py_ssize_t count = PySequence_Fast_GET_SIZE(clients);
    if (count > K) return std::nullopt;
    ids.reserve(count);
    for (Py_ssize_t i = 0; i < count; ++i) {
      PyObject* item = PySequence_Fast_GET_ITEM(clients, i);
      if (!PyLong_CheckExact(item)) return std::nullopt;
      int overflow = 0;
      ids.push_back(PyLong_AsLongLongAndOverflow(item, &overflow));
      if (overflow) return std::nullopt;
    }
    return ids;
  }
  const at::Tensor* t = plain_tensor(clients, at::kLong);
  if (t && t->dim() == 1 && t->size(0) <= K) {
    const auto* data = t->const_data_ptr<int64_t>();
    const int64_t step = t->stride(0);
    ids.resize(t->size(0));
    for (std::size_t i = 0; i < ids.size(); ++i) ids[i] = data[static_cast<int64_t>(i) * step];
    return ids;
  }
  return std::nullopt;
}

// The positions of distinct ids in [0, K) in ascending order of the ids; nothing for others.
std::optional<std::vector<int64_t>> order_of(const std::vector<int64_t>& ids, int64_t K) {
  std::vector<int64_t> order(ids.size());
  std::iota(order.begin(), order.end(), 0);
  const auto less = [&](int64_t a, int64_t b) { return ids[a] < ids[b]; };
  if (!std::is_sorted(order.begin(), order.end(), less))
    std::sort(order.begin(), order.end(), less);
  const auto equal = [&](int64_t a, int64_t b) { return ids[a] == ids[b]; };
  const bool usual = !order.empty() && ids[order.front()] >= 0 && ids[order.back()] < K &&
                     std::adjacent_find(order.begin(), order.end(), equal) == order.end();
  return usual ? std::optional(order) : std::nullopt;
}

// The rows in memory that a step is given, in ascending order of their ids.
class UsualRows {
 public:
  UsualRows(PyObject* updates, const std::vector<int64_t>& ids, const std::vector<int64_t>& order,
            bool by_client, int64_t d)
      : updates_(updates), order_(order), d_(d) {
    const auto S = static_cast<int64_t>(ids.size());
    matrix_ = plain_tensor(updates, at::kFloat);
    if (matrix_) {
      usual_ = !by_client && matrix_->dim() == 2 && matrix_->size(0) == S &&
               matrix_->size(1) == d && matrix_->stride(1) == 1;
      if (!usual_) return;
      const auto* first = matrix_->const_data_ptr<float>();
      for (int64_t s = 0; s < S; ++s) addresses_.push_back(first + s * matrix_->stride(0));
      return;
    }
    if (!is_list(updates)) return;
    const int64_t given = PySequence_Fast_GET_SIZE(updates);
    usual_ = by_client ? ids[order.back()] < given : given == S;
    for (int64_t s = 0; s < S && usual_; ++s) {
      const int64_t place = by_client ? ids[order[s]] : order[s];
      PyObject* item = PySequence_Fast_GET_ITEM(updates, place);
      items_.push_back(py::reinterpret_borrow<py::object>(item));
      addresses_.push_back(plain_vector(item, d));
      usual_ = addresses_.back() != nullptr;
    }
  }

  // Whether they are S plain rows of d numbers that share no memory with the parameters.
  bool usual(const float* params) const {
    const auto own = reinterpret_cast<std::uintptr_t>(params);
    const auto bytes = static_cast<std::uintptr_t>(d_) * sizeof(float);
    return usual_ && std::none_of(addresses_.begin(), addresses_.end(), [&](const float* row) {
             const auto begin = reinterpret_cast<std::uintptr_t>(row);
             return begin < own + bytes && own < begin + bytes;
           });
  }

  // A matrix that is in order already, or a copy of one that takes at most `most_copied` bytes;
  // otherwise a list of the rows.
  py::object in_order(int64_t most_copied) const {
    if (!matrix_) return listed(items_);
    if (std::is_sorted(order_.begin(), order_.end()))
      return py::reinterpret_borrow<py::object>(updates_);
    if (static_cast<int64_t>(matrix_->nbytes()) <= most_copied)
      return py::cast(take_rows(*matrix_, order_));
    // Without autograd's records of views, which nobody needs: the rows are only read.
    const at::AutoDispatchBelowADInplaceOrView guard;
    const std::vector<at::Tensor> views = matrix_->unbind(0);
    py::list rows(order_.size());
    for (std::size_t s = 0; s < order_.size(); ++s) rows[s] = py::cast(views[order_[s]]);
    return rows;
  }

 private:
  static py::list listed(const std::vector<py::object>& items) {
    py::list rows(items.size());
    for (std::size_t s = 0; s < items.size(); ++s) rows[s] = items[s];
    return rows;
  }

  PyObject* updates_;
  const std::vector<int64_t>& order_;
  int64_t d_;
  bool usual_ = false;
  const at::Tensor* matrix_ = nullptr;
  // Without a matrix, in order. They own their objects, because making a Python object can run the
  // garbage collector, and so code that empties the caller's list.
  std::vector<py::object> items_;
  std::vector<const float*> addresses_;
};

py::object usual_cohort(py::handle params, py::handle updates, py::handle clients, int64_t K,
                        int64_t d, bool by_client, int64_t most_copied) {
  const float* own = plain_vector(params.ptr(), d);
  if (!own || THPVariable_Unpack(params.ptr()).requires_grad()) return py::none();
  const auto ids = read_ids(clients.ptr(), K);
  if (!ids) return py::none();
  const auto order = order_of(*ids, K);
  if (!order) return py::none();
  const UsualRows rows(updates.ptr(), *ids, *order, by_client, d);
  if (!rows.usual(own)) return py::none();
  const auto S = static_cast<int64_t>(ids->size());
  at::Tensor tensor = new_tensor({S}, at::kLong);
  auto* sorted = tensor.mutable_data_ptr<int64_t>();
  py::list listed(S);
  for (int64_t s = 0; s < S; ++s) {
    sorted[s] = (*ids)[(*order)[s]];
    listed[s] = py::int_(sorted[s]);
  }
  return py::make_tuple(listed, tensor, rows.in_order(most_copied));
}

}  // namespace

void define_step_arguments(py::module_& m) {
  m.def("int_tensor", &int_tensor, py::arg("items"), "A sequence of ints as a tensor [n] int64.");
  m.def("float_tensor", &float_tensor, py::arg("items"),
        "A sequence of numbers as a tensor [n] float64.");
  m.def("rounded", &rounded, py::arg("values"), "A float64 tensor [n] rounded to float32.");
  m.def("flags", &flags, py::arg("positions"), py::arg("count"),
        "A tensor [count] bool that is True at some positions.");
  m.def("take_rows", &take_rows, py::arg("matrix"), py::arg("order"),
        "A copy of some rows of a float32 matrix.");
  m.def("shares_by_friend", &shares_by_friend, py::arg("shares"), py::arg("friends"),
        py::arg("ids"),
        "For each of `ids`, the sum of the shares of the clients whose friend it is, [n] float64; "
        "and a list of the shares of clients without a friend.");
  m.def("replaced", &replaced, py::arg("values"), py::arg("ids"), py::arg("items"),
        "A copy of a float64 tensor with new items at `ids`, and a list of the old ones.");
  m.def("shared_row", &shared_row, py::arg("rows"), py::arg("vectors"),
        "The position of the first row, of a matrix or a list, that shares memory with one of some "
        "contiguous vectors of equal size, or -1. Items that are no tensors are passed over.");
  m.def("mark_changed", &mark_changed, py::arg("tensors"),
        "Bump the version counters of tensors that have one.");
  m.def("usual_cohort", &usual_cohort, py::arg("params"), py::arg("updates"), py::arg("clients"),
        py::arg("num_clients"), py::arg("num_params"), py::arg("by_client"), py::arg("most_copied"),
        "The ids of a step in ascending order, as a list and as a tensor, and the rows in this "
        "order: a matrix, a copy of a matrix of at most `most_copied` bytes, or a list. With "
        "`by_client`, row k of `updates` is that of client k. None if an argument is wrong or "
        "unusual, for which this function has no message.");
}

}  // namespace fastagg
