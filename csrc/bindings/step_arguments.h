// SPDX-License-Identifier: Apache-2.0
// What a step does once for all of its rows, in one call from Python instead of one for each row.
#pragma once

#include <pybind11/pybind11.h>

namespace fastagg {

// Adds the functions of step_arguments.cpp to the module.
void define_step_arguments(pybind11::module_& m);

}  // namespace fastagg
