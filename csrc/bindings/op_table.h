// SPDX-License-Identifier: Apache-2.0
// The table of operators. Each op of fastagg is one entry:
//
//   FASTAGG_OP(name, CPU, CUDA, ANY, "(arguments) -> results")
//
// The three columns (yes or no) say which files define a function `name` with the arguments of the
// schema: ops_cpu.cpp, ops_cuda.cpp, and ops_policy.cpp (for tensors on any device, used where the
// device's own column says no).
//
// No include guard: a file defines FASTAGG_OP and includes the table, once for each use. The macro
// is undefined at the end. library.cpp makes the schemas and the autograd kernels from it, the
// other three their registrations. A missing function is a compile error.
//
// Conventions of the schemas:
// - A name that ends in `_` changes the arguments marked `Tensor(a!)` and returns nothing. No other
//   op changes an argument.
// - `Tensor[]` arguments named updates or rows hold S rows of d float32 (in the one-pass updates
//   also bfloat16 or float16): one [S, d] tensor, S tensors [d], or a mixture. They are not copied.
// - memory and corrections are one [K, d] tensor, or one tensor [d] for each of the S updates.

// FASTAGG_IF_yes(code) is code, FASTAGG_IF_no(code) is nothing: for a column of the table.
#define FASTAGG_IF_yes(code) code
#define FASTAGG_IF_no(code)

// clang-format off

//         name             CPU  CUDA ANY

// Reductions over d.
FASTAGG_OP(gram,            yes, yes, no,
           "(Tensor[] updates, Tensor? pairs=None, str precision='highest', int? segment=None) "
           "-> Tensor")
FASTAGG_OP(gram_rows,       yes, yes, yes,
           "(Tensor[] updates, Tensor changed, str precision='highest') -> Tensor")
FASTAGG_OP(abs_max,         yes, yes, no,
           "(Tensor[] rows) -> Tensor")
FASTAGG_OP(sketch_,         yes, yes, no,
           "(Tensor(a!) out, Tensor(b!) squares, Tensor[] rows, int seed, int begin=0) -> ()")

// Scores and friends: policy on [S, S] and [K, K].
FASTAGG_OP(cosine_scores,   yes, yes, no,
           "(Tensor gram) -> Tensor")
FASTAGG_OP(distance_scores, yes, yes, no,
           "(Tensor gram) -> Tensor")
FASTAGG_OP(update_scores_,  yes, yes, no,
           "(Tensor(a!) scores, Tensor(b!) counts, Tensor round_scores, Tensor clients, "
           "Tensor? pairs=None, Tensor? when=None) -> ()")
FASTAGG_OP(select_friends,  yes, yes, no,
           "(Tensor scores, Tensor counts, Tensor active, Tensor? candidates=None) -> Tensor")
FASTAGG_OP(eliminate_,      yes, yes, no,
           "(Tensor(a!) candidates, Tensor scores, Tensor counts, float threshold, "
           "Tensor? when=None) -> ()")
FASTAGG_OP(most_similar,    yes, yes, yes,
           "(Tensor queries, Tensor rows, Tensor factors, Tensor? query_ids=None, "
           "Tensor? row_ids=None, Tensor? splits=None) -> (Tensor, Tensor)")

// Robust rules: policy on Gram matrices.
FASTAGG_OP(replace_rows,    no,  yes, yes,
           "(Tensor gram, Tensor changed, Tensor rows) -> Tensor")
FASTAGG_OP(bucketed_gram,   no,  yes, yes,
           "(Tensor gram, Tensor order, Tensor weights, int bucket_size) "
           "-> (Tensor, Tensor, Tensor, Tensor)")
FASTAGG_OP(krum_scores,     no,  yes, yes,
           "(Tensor gram, int num_byzantine) -> Tensor")
FASTAGG_OP(krum_selection,  no,  yes, yes,
           "(Tensor gram, int num_byzantine, int count) -> Tensor")
FASTAGG_OP(nearest_means,   no,  yes, yes,
           "(Tensor gram, Tensor weights, int count) -> (Tensor, Tensor)")
FASTAGG_OP(weiszfeld,       no,  yes, yes,
           "(Tensor gram, Tensor weights, Tensor start, float nu, int iterations) -> Tensor")
FASTAGG_OP(clip_towards,    no,  yes, yes,
           "(Tensor gram, Tensor weights, float tau, int iterations) -> Tensor")

// One-pass updates of vectors [d] and of memory rows.
FASTAGG_OP(weighted_sum_,   yes, yes, no,
           "(Tensor(a!) out, Tensor[] rows, Tensor weights, float beta=1.0, "
           "Tensor? when=None) -> ()")
FASTAGG_OP(apply_weighted_sum_, yes, yes, yes,
           "(Tensor(a!) params, Tensor(b!) before, Tensor(c!) applied, Tensor[] rows, "
           "Tensor weights, float lr, float largest, float limit) -> ()")
FASTAGG_OP(difference_sum_, yes, yes, yes,
           "(Tensor(a!) out, Tensor(b!) squares, Tensor[] rows, Tensor base, Tensor weights) "
           "-> ()")
FASTAGG_OP(trimmed_mean_,   yes, yes, yes,
           "(Tensor(a!) out, Tensor(b!) peak, Tensor[] rows, int trim, Tensor? scales=None) "
           "-> ()")
FASTAGG_OP(meamed_,         yes, yes, yes,
           "(Tensor(a!) out, Tensor(b!) peak, Tensor[] rows, int keep, Tensor? scales=None) "
           "-> ()")
FASTAGG_OP(gram_and_sum_,   yes, yes, no,
           "(Tensor(a!) out, Tensor(b!) gram, Tensor[] rows, Tensor weights, "
           "str precision='highest') -> ()")
FASTAGG_OP(sketch_and_sum_, yes, yes, no,
           "(Tensor(a!) sum, Tensor(b!) out, Tensor(c!) squares, Tensor[] rows, Tensor weights, "
           "int seed, int begin=0) -> ()")
FASTAGG_OP(difference_gram_and_sum_, yes, yes, yes,
           "(Tensor(a!) out, Tensor(b!) gram, Tensor[] models, Tensor base, Tensor weights, "
           "int begin) -> ()")
FASTAGG_OP(mimic_,          yes, yes, no,
           "(Tensor(a!) params, Tensor[] updates, Tensor(b!)[] corrections, Tensor clients, "
           "float lr) -> ()")
FASTAGG_OP(memory_update_,  yes, yes, no,
           "(Tensor(a!) params, Tensor(b!) total, Tensor(c!)[] memory, Tensor[] updates, "
           "Tensor clients, Tensor weights, float lr, float norm, bool models=False) -> ()")

// The same updates, without a write to anything that is read: new memory rows go to `kept`, unless
// the server keeps the received rows instead. add_total_ applies the result.
FASTAGG_OP(mimic_mean_,     yes, yes, no,
           "(Tensor(a!) out, Tensor(b!) rounded, Tensor(c!) peaks, Tensor[] updates, "
           "Tensor[] corrections, Tensor clients, Tensor?[] references, Tensor(d!)[] kept, "
           "bool copies, Tensor? weights=None, Tensor? scales=None) -> ()")
FASTAGG_OP(memory_total_,   yes, yes, no,
           "(Tensor(a!) out, Tensor(b!) peaks, Tensor total, Tensor[] memory, Tensor[] updates, "
           "Tensor clients, Tensor weights, Tensor?[] references, Tensor? params, "
           "Tensor(c!)[] kept, Tensor? scales=None, Tensor(d!)? faded=None, "
           "Tensor? faded_weights=None, float fading=1.0) -> ()")
FASTAGG_OP(scaffold_mean_,  yes, yes, no,
           "(Tensor(a!) out, Tensor(b!) next, Tensor(c!) peaks, Tensor mean, Tensor[] updates, "
           "Tensor[] controls, Tensor clients, Tensor weights, Tensor steps, float part, "
           "Tensor(d!)[] kept) -> ()")
FASTAGG_OP(lerp_total_,     yes, yes, no,
           "(Tensor(a!) total, Tensor end, float weight) -> ()")
FASTAGG_OP(add_total_,      yes, yes, no,
           "(Tensor(a!) params, Tensor total, float lr, float norm, bool models=False) -> ()")
FASTAGG_OP(apply_aggregate_, yes, yes, no,
           "(Tensor(a!) params, Tensor(b!) applied, Tensor aggregate, float lr, float norm, "
           "float peak, float limit) -> ()")

// Rows of int8 numbers with one scale for each block of 256 columns.
FASTAGG_OP(quantize_,       yes, yes, no,
           "(Tensor(a!)[] numbers, Tensor(b!) scales, Tensor[] rows) -> ()")
FASTAGG_OP(dequantize_,     yes, yes, no,
           "(Tensor(a!)[] out, Tensor[] numbers, Tensor[] scales) -> ()")
FASTAGG_OP(quantized_total_, yes, yes, no,
           "(Tensor(a!) out, Tensor(b!) peaks, Tensor total, Tensor[] memory, "
           "Tensor[] memory_scales, Tensor[] updates, Tensor clients, Tensor weights, "
           "Tensor(c!)[] kept, Tensor(d!) kept_scales, Tensor(e!)? faded=None, "
           "Tensor? faded_weights=None, float fading=1.0) -> ()")

// Server optimizers: other steps along an aggregate, with moments.
FASTAGG_OP(add_momentum_,   yes, yes, no,
           "(Tensor(a!) params, Tensor(b!) m, Tensor aggregate, float lr, float beta_1, "
           "bool nesterov=False, float norm=1.0, bool models=False) -> ()")
FASTAGG_OP(add_adaptive_,   yes, yes, no,
           "(Tensor(a!) params, Tensor(b!) m, Tensor(c!) s, Tensor aggregate, str kind, float lr, "
           "float beta_1, float beta_2, float tau, float norm=1.0, bool models=False) -> ()")

// clang-format on

#undef FASTAGG_OP
