// SPDX-License-Identifier: Apache-2.0
// A step of a small model spends more time in Python than in kernels. These functions check and
// sort the rows of a step in one call each.
#include "step_arguments.h"

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <optional>
#include <tuple>
#include <vector>

#include "checks.h"
#include "small_tensors.h"

namespace py = pybind11;

namespace fastagg {
namespace {

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
