// SPDX-License-Identifier: Apache-2.0
// The Python module fastagg._C. Importing it registers the ops. Its functions describe this build,
// choose the instruction set, report temporary memory, and make tensors of Python's memory.
#include <pybind11/pybind11.h>

#include <stdexcept>
#include <string>

#include "../kernels/cpu/cache.h"
#include "../kernels/cpu/scratch.h"
#include "../kernels/cpu/simd.h"
#include "../kernels/gram.h"
#include "python_memory.h"
#include "small_tensors.h"
#include "step_arguments.h"

namespace py = pybind11;
using fastagg::cpu::Isa;

namespace {

py::dict build_info() {
  py::dict info;
#if defined(__clang__)
  info["compiler"] = "clang " __clang_version__;
#elif defined(__GNUC__)
  info["compiler"] = "gcc " __VERSION__;
#else
  info["compiler"] = "unknown";
#endif
  info["cxx"] = static_cast<long>(__cplusplus);
  info["torch"] = FASTAGG_TORCH_VERSION;
  info["cuda_archs"] = FASTAGG_CUDA_ARCHS;
  info["isa_detected"] = isa_name(fastagg::cpu::detected_isa());
  return info;
}

void set_isa(const std::string& name) {
  for (Isa isa : fastagg::cpu::kEveryIsa) {
    if (name != isa_name(isa)) continue;
    if (!fastagg::cpu::set_isa(isa))
      throw std::invalid_argument("isa: this processor has no " + name + ", its best is " +
                                  isa_name(fastagg::cpu::detected_isa()));
    return;
  }
  throw std::invalid_argument("isa: expected portable, avx2, avx512 or neon, got " + name);
}

py::dict scratch(bool reset_peak) {
  const fastagg::cpu::ScratchUse use = fastagg::cpu::scratch_use();
  if (reset_peak) fastagg::cpu::reset_scratch_peak();
  py::dict bytes;
  bytes["limit"] = fastagg::cpu::kScratchLimit;
  bytes["kept"] = use.kept;
  bytes["used"] = use.used;
  bytes["peak"] = use.peak;
  return bytes;
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() = "Compiled kernels of fastagg (use fastagg.ops).";
  m.def("build_info", &build_info, "How this extension was built, as a dict.");
  m.def(
      "isa", [] { return isa_name(fastagg::cpu::current_isa()); },
      "The instruction set in use: portable, avx2, avx512 or neon.");
  m.def("set_isa", &set_isa, py::arg("name"), "Use another instruction set (for tests).");
  m.def(
      "scratch", &scratch, py::arg("reset_peak") = false,
      "Bytes of temporary memory of the CPU kernels: the limit on what is kept between calls, what "
      "is kept now, what is in use now, and its peak.");
  m.def("gram_scratch", &fastagg::cpu::gram_scratch, py::arg("S"), py::arg("d"), py::arg("threads"),
        "Bytes of temporary memory that gram and gram_and_sum_ of S rows use on the CPU.");
  m.def("own_l3_bytes", &fastagg::cpu::own_l3_bytes,
        "Bytes of the last cache that CPU kernels expect to have for themselves.");
  fastagg::define_python_memory(m);
  fastagg::define_small_tensors(m);
  fastagg::define_step_arguments(m);
}
