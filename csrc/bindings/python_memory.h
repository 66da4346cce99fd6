// SPDX-License-Identifier: Apache-2.0
// Tensors made of the memory of Python objects, without a copy.
#pragma once

#include <pybind11/pybind11.h>

namespace fastagg {

// Adds the functions of python_memory.cpp to the module.
void define_python_memory(pybind11::module_& m);

}  // namespace fastagg
