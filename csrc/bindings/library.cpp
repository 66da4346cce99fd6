// SPDX-License-Identifier: Apache-2.0
// The schema of every op. The bindings in ops_cpu.cpp, ops_cuda.cpp and ops_policy.cpp register the
// implementations; Python wraps each op, with its documentation, and registers its fake kernel.
//
// `Tensor[]` arguments named updates or rows are S rows of d float32 (in the one-pass updates also
// bfloat16 or float16): one tensor [S, d], S tensors [d], or a mixture. They are read in place.
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/library.h>

TORCH_LIBRARY(fastagg, m) {
  // Reductions over d.
  m.def("gram(Tensor[] updates, Tensor? pairs=None, str precision='highest') -> Tensor");
  m.def("gram_rows(Tensor[] updates, Tensor changed, str precision='highest') -> Tensor");
  m.def("abs_max(Tensor[] rows) -> Tensor");

  // Policy on [S, S] and [K, K].
  m.def("cosine_scores(Tensor gram) -> Tensor");
  m.def("distance_scores(Tensor gram) -> Tensor");
  m.def(
      "update_scores_(Tensor(a!) scores, Tensor(b!) counts, Tensor round_scores, Tensor clients, "
      "Tensor? pairs=None, Tensor? when=None) -> ()");
  m.def(
      "select_friends(Tensor scores, Tensor counts, Tensor active, Tensor? candidates=None, "
      "float? threshold=None) -> Tensor");
  m.def(
      "eliminate_(Tensor(a!) candidates, Tensor scores, Tensor counts, float threshold, "
      "Tensor? when=None) -> ()");

  m.def("replace_rows(Tensor gram, Tensor changed, Tensor rows) -> Tensor");
  m.def(
      "bucketed_gram(Tensor gram, Tensor order, Tensor weights, int bucket_size) "
      "-> (Tensor, Tensor, Tensor, Tensor)");
  m.def("weiszfeld(Tensor gram, Tensor weights, Tensor start, float nu, int iterations) -> Tensor");
  m.def("clip_towards(Tensor gram, Tensor weights, float tau, int iterations) -> Tensor");

  // One-pass updates of vectors [d] and of memory rows. `memory` and `corrections` are one tensor
  // [K, d], or a tensor [d] for each of the S updates.
  m.def(
      "weighted_sum_(Tensor(a!) out, Tensor[] rows, Tensor weights, float beta=1.0, "
      "Tensor? when=None) -> ()");
  m.def(
      "gram_and_sum_(Tensor(a!) out, Tensor(b!) gram, Tensor[] rows, Tensor weights, "
      "str precision='highest') -> ()");
  m.def(
      "mimic_(Tensor(a!) params, Tensor[] updates, Tensor(b!)[] corrections, Tensor clients, "
      "float lr) -> ()");
  m.def(
      "memory_update_(Tensor(a!) params, Tensor(b!) total, Tensor(c!)[] memory, Tensor[] updates, "
      "Tensor clients, Tensor weights, float lr, float norm, bool models=False) -> ()");

  // The same rounds for rules that take ownership of the received rows: these ops write only new
  // vectors, which add_total_ then applies.
  m.def(
      "mimic_mean_(Tensor(a!) out, Tensor(b!) rounded, Tensor(c!) peaks, Tensor[] updates, "
      "Tensor[] corrections, Tensor clients, Tensor?[] references) -> ()");
  m.def(
      "memory_total_(Tensor(a!) out, Tensor(b!) peaks, Tensor total, Tensor[] memory, "
      "Tensor[] updates, Tensor clients, Tensor weights, Tensor?[] references, "
      "Tensor? params=None) -> ()");
  m.def(
      "add_total_(Tensor(a!) params, Tensor total, float lr, float norm, bool models=False) -> ()");
}

// The ops are not differentiable. The fallback raises an error where autograd would otherwise
// compute a wrong gradient, and refuses to change a Parameter in place outside torch.no_grad().
TORCH_LIBRARY_IMPL(fastagg, Autograd, m) {
  for (const char* op :
       {"gram", "gram_rows", "abs_max", "cosine_scores", "distance_scores", "update_scores_",
        "select_friends", "eliminate_", "replace_rows", "bucketed_gram", "weiszfeld",
        "clip_towards", "weighted_sum_", "gram_and_sum_", "mimic_", "memory_update_", "mimic_mean_",
        "memory_total_", "add_total_"})
    m.impl(op, torch::autograd::autogradNotImplementedFallback());
}
