// SPDX-License-Identifier: Apache-2.0
// All bindings but CUDA's, as one translation unit: each of these files includes torch's headers,
// and the compiler would spend three quarters of its time on them.
#include "library.cpp"
#include "module.cpp"
#include "ops_cpu.cpp"
#include "ops_policy.cpp"
#include "python_memory.cpp"
#include "refused.cpp"
#include "small_tensors.cpp"
#include "step_arguments.cpp"
