// SPDX-License-Identifier: Apache-2.0
// torch.from_numpy and torch.frombuffer end the process if a small allocation fails in them: they
// throw std::bad_alloc out of a function that is noexcept. These functions raise instead.
#include "python_memory.h"

#include <ATen/core/Tensor.h>
#include <torch/csrc/utils/pybind.h>

#include <cstdlib>
#include <memory>
#include <new>
#include <string>
#include <vector>

namespace py = pybind11;

namespace fastagg {
namespace {

// Keeps the memory of a Python object, with its buffer protocol.
class Buffer {
 public:
  explicit Buffer(py::handle object, bool writable = true) {
    const int flags = PyBUF_C_CONTIGUOUS | PyBUF_FORMAT | (writable ? PyBUF_WRITABLE : 0);
    if (PyObject_GetBuffer(object.ptr(), &view_, flags)) throw py::error_already_set();
  }
  ~Buffer() {
    if (!Py_IsInitialized()) return;  // the process ends: nothing can be released
    const py::gil_scoped_acquire gil;
    PyBuffer_Release(&view_);
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  const Py_buffer& view() const { return view_; }

 private:
  Py_buffer view_;
};

using Shared = std::shared_ptr<Buffer>;

at::ScalarType dtype_of(const Py_buffer& view) {
  const char code = view.format && !view.format[1] ? view.format[0] : 0;
  switch (code) {
    case 'f':
      return at::kFloat;
    case 'd':
      return at::kDouble;
    case 'e':
      return at::kHalf;
    case '?':
      return at::kBool;
    case 'b':
      return at::kChar;
    case 'B':
      return at::kByte;
    case 'l':
    case 'q':
      if (view.itemsize == 8) return at::kLong;
  }
  throw py::type_error(
      std::string("buffer: expected float16, float32, float64, int64, bool or bytes, got ") +
      (view.format ? view.format : "bytes"));
}

void release(void* context) {
  delete static_cast<Shared*>(context);
}

// A tensor of `bytes` bytes from `data` on, which keeps `owner`.
at::Tensor make(const Shared& owner, void* data, int64_t bytes, at::IntArrayRef shape,
                at::ScalarType dtype) {
  auto context = std::make_unique<Shared>(owner);
  at::DataPtr pointer(data, context.get(), &release, at::kCPU);
  static_cast<void>(context.release());
  at::Storage storage(at::Storage::use_byte_size_t(), bytes, std::move(pointer));
  at::Tensor tensor = at::detail::make_tensor<at::TensorImpl>(
      std::move(storage), at::DispatchKeySet(at::DispatchKey::CPU),
      at::scalarTypeToTypeMeta(dtype));
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous(shape);
  return tensor;
}

at::Tensor tensor(py::handle object, bool writable) {
  const auto owner = std::make_shared<Buffer>(object, writable);
  const Py_buffer& view = owner->view();
  // Py_ssize_t and int64_t have the same size, but are different types on macOS.
  const std::vector<int64_t> shape(view.shape, view.shape + view.ndim);
  return make(owner, view.buf, view.len, shape, dtype_of(view));
}

std::vector<at::Tensor> rows(py::handle object, int64_t count, int64_t size, int64_t step) {
  const auto owner = std::make_shared<Buffer>(object);
  constexpr int64_t kBytes = sizeof(float);
  if (count < 1 || size < 0 || step < size || step < 1 || owner->view().len / kBytes / step < count)
    throw py::value_error("rows: they do not fit into the memory");
  std::vector<at::Tensor> found;
  found.reserve(count);
  for (int64_t row = 0; row < count; ++row)
    found.push_back(make(owner, static_cast<char*>(owner->view().buf) + row * step * kBytes,
                         size * kBytes, {size}, at::kFloat));
  return found;
}

// Blocks that malloc serves from its heap; it would map larger ones, and unmap them when freed.
constexpr std::size_t kBlock = std::size_t{1} << 15;

void reserve(int64_t bytes) {
  // Linked through their first words: a vector of them could fail.
  void* first = nullptr;
  bool enough = true;
  for (int64_t got = 0; got < bytes && enough; got += kBlock) {
    void* block = std::malloc(kBlock);
    enough = block != nullptr;
    if (!block) break;
    *static_cast<void**>(block) = first;
    first = block;
  }
  while (first) {
    void* next = *static_cast<void**>(first);
    std::free(first);
    first = next;
  }
  if (!enough) throw std::bad_alloc();
}

}  // namespace

void define_python_memory(py::module_& m) {
  m.def("tensor", &tensor, py::arg("buffer"), py::arg("writable") = true,
        "A tensor with the memory, shape and dtype of a contiguous array. Copies nothing. If not "
        "`writable`, the memory need not be, and nobody may write to the tensor.");
  m.def("rows", &rows, py::arg("buffer"), py::arg("count"), py::arg("size"), py::arg("step"),
        "`count` float32 tensors [size], `step` numbers apart, each with a storage of its own.");
  m.def("reserve", &reserve, py::arg("bytes"),
        "Allocate and free this many bytes in small blocks, so that small allocations which follow "
        "in this thread find room. Raises MemoryError.");
}

}  // namespace fastagg
