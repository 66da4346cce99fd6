// SPDX-License-Identifier: Apache-2.0
// The launchers of all CUDA kernels. The contracts are in the headers of the same names (../gram.h,
// ../mimic.h, ...). Names and arguments are those of fastagg::cpu, with two differences:
//
//   * Pointers, and lists of pointers and numbers, are in device memory (`store_words` copies lists
//     there). Tensors are contiguous. `width` is the number of elements, 8, 4, 2 or 1, that one
//     access may take, given the alignment of all rows and vectors (vector_width in row_layout.h).
//   * Launchers enqueue work on `stream` and return. They do not wait, allocate or copy from host
//     memory, so a CUDA graph can capture them. The caller provides scratch memory.
//
// `when` is a byte on the device, or null. If it is 0 when the kernel runs, nothing is changed.
//
// Results have the same bits from run to run on one model of GPU, and are invariant to the order of
// clients where those of the CPU are. Their last bits differ from the CPU's.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "../elements.h"
#include "../faded_total.h"
#include "../moment_math.h"
#include "../pair_state.h"
#include "../precision.h"

namespace fastagg::cuda {

// out[k] = words[k] for n 64-bit words (pointers, doubles, ids) in host memory, which may change as
// soon as this returns.
cudaError_t store_words(const uint64_t* words, int64_t n, uint64_t* out, cudaStream_t stream);

// --- one pass over d ----------------------------------------------------------------------------

cudaError_t abs_max(const float* const* rows, int64_t S, int64_t d, float* out, int width,
                    cudaStream_t stream);

// At most kMostSorted rows (sort_layout.h). The bits are those of the CPU, except of NaN.
//   scales   // [S], float32 numbers; or nullptr
template <class T>  // float, Bfloat16 or Half
cudaError_t trimmed_mean(float* out, float* peak, const T* const* rows, int64_t S, int64_t d,
                         int64_t trim, const double* scales, cudaStream_t stream);

template <class T>
cudaError_t meamed(float* out, float* peak, const T* const* rows, int64_t S, int64_t d,
                   int64_t keep, const double* scales, cudaStream_t stream);

// The size of the `workspace` of sketch, in bytes.
int64_t sketch_workspace(int64_t S, int64_t d, int64_t k, int64_t begin);

// Sums of parts of 2^15 columns are added in order.
template <class T>  // float, Bfloat16 or Half
cudaError_t sketch(double* out, double* squares, const T* const* rows, int64_t S, int64_t d,
                   int64_t k, uint64_t seed, int64_t begin, void* workspace, cudaStream_t stream);

template <class T>  // float, Bfloat16 or Half
cudaError_t weighted_sum(float* out, const T* const* rows, int64_t S, int64_t d,
                         const double* weights, double beta, const uint8_t* when, int width,
                         cudaStream_t stream);

// weighted_sum, with beta = 0, of the rows minus `base`.
template <class T>  // float, Bfloat16 or Half
cudaError_t weighted_difference(float* out, const T* const* rows, const float* base, int64_t S,
                                int64_t d, const double* weights, int width, cudaStream_t stream);

// The size of `parts` of difference_squares, in bytes.
int64_t squares_workspace(int64_t S, int64_t d);

// squares[s] = sum_k (rows[s][k] - base[k])^2: in float32 within 16 columns, float64 across them.
template <class T>  // float, Bfloat16 or Half
cudaError_t difference_squares(double* squares, const T* const* rows, const float* base, int64_t S,
                               int64_t d, double* parts, int width, cudaStream_t stream);

// out[s][k] = rows[s][k] - base[k], rounded to float32, for n columns.
//   stride   // from one row of `out` to the next
template <class T>  // float, Bfloat16 or Half
cudaError_t differences(float* out, int64_t stride, const T* const* rows, const float* base,
                        int64_t S, int64_t n, cudaStream_t stream);

// before = params, and params += lr * sum with the bits of weighted_sum, if the peaks are within
// the limits of apply_weighted_sum (weighted_sum.h); *applied = whether they are.
//   before   // or nullptr
//   peaks    // [2]: those of params and of sum
cudaError_t apply_sum(float* params, float* before, bool* applied, const float* sum,
                      const float* peaks, int64_t d, double lr, double largest, double limit,
                      cudaStream_t stream);

template <class T>
cudaError_t mimic(float* params, const T* const* updates, float* const* corrections, int64_t S,
                  int64_t d, double lr, int width, cudaStream_t stream);

// `references`, its entries and `kept` may be null. `peaks` is in the order of rows.
template <class T>
cudaError_t mimic_mean(double* v, float* rounded, float* peaks, const T* const* updates,
                       const T* const* corrections, const float* const* references,
                       const double* weights, float* const* kept, bool copies, int64_t S, int64_t d,
                       int width, cudaStream_t stream);

template <class T>
cudaError_t memory_update(float* params, double* total, const T* const* updates,
                          float* const* memory, int64_t S, int64_t d, const double* weights,
                          double lr, double norm, bool models, int width, cudaStream_t stream);

template <class T>
cudaError_t memory_total(double* out, float* peaks, const double* total, const T* const* updates,
                         const T* const* memory, const float* const* references, int64_t S,
                         int64_t d, const double* weights, const float* params, float* const* kept,
                         const FadedTotal& faded, int width, cudaStream_t stream);

// All updates are float. `peaks` is in the order of rows.
cudaError_t scaffold_mean(double* out, float* next, float* peaks, const float* mean,
                          const float* const* updates, const float* const* controls,
                          const double* weights, const double* steps, double part,
                          float* const* kept, int64_t S, int64_t d, int width, cudaStream_t stream);

cudaError_t lerp_total(double* total, const double* end, int64_t d, double weight,
                       cudaStream_t stream);

cudaError_t add_total(float* params, const double* total, int64_t d, double lr, double norm,
                      bool models, cudaStream_t stream);

// add_total without models, if the peak of params is finite and, plus lr times `added`, is at most
// `limit`; *applied = whether it is.
//   peak    // [1]: that of params
//   added   // an upper bound of the magnitudes in norm * total
cudaError_t apply_total(float* params, bool* applied, const double* total, const float* peak,
                        int64_t d, double lr, double norm, double added, double limit,
                        cudaStream_t stream);

// Rows of int8 numbers (int8_rows.h). Numbers and scales have the bits of the CPU. `width` is that
// of `kept` and `memory`. `peaks` is in the order of rows. The updates are read by one kernel, and
// the rounded rows again by another.
cudaError_t quantize(int8_t* const* numbers, float* const* scales, const float* const* rows,
                     int64_t S, int64_t d, cudaStream_t stream);

cudaError_t dequantize(float* const* out, const int8_t* const* numbers, const float* const* scales,
                       int64_t S, int64_t d, cudaStream_t stream);

cudaError_t quantized_total(double* out, float* peaks, const double* total,
                            const float* const* updates, const int8_t* const* memory,
                            const float* const* memory_scales, int64_t S, int64_t d,
                            const double* weights, int8_t* const* kept, float* const* kept_scales,
                            const FadedTotal& faded, int width, cudaStream_t stream);

// The arithmetic is the CPU's (moment_math.h), so unlike other results these should have its bits.
template <class T>
cudaError_t add_momentum(float* params, float* m, const T* aggregate, int64_t d, double lr,
                         double beta, bool nesterov, double norm, bool models, cudaStream_t stream);

template <class T>
cudaError_t add_adaptive(float* params, float* m, float* s, const T* aggregate, int64_t d,
                         SecondMoment kind, double lr, double beta_1, double beta_2, double tau,
                         double norm, bool models, cudaStream_t stream);

// --- Gram ---------------------------------------------------------------------------------------

// *bytes = the size of the `workspace` of gram on the current GPU. It must be aligned to 256.
cudaError_t gram_workspace(int64_t S, int64_t d, int64_t segment, int64_t* bytes);

// The sum of the Gram matrices of segments of `segment` columns, in order. `pairs` must be
// symmetric. Tiles of 128 x 128 entries without any wanted pair are skipped; rows are not
// reordered.
cudaError_t gram(const float* const* rows, int64_t S, int64_t d, int64_t segment,
                 const uint8_t* pairs, double* out, Precision precision, void* workspace, int width,
                 cudaStream_t stream);

// --- policy on [S, S] and [K, K] ----------------------------------------------------------------

cudaError_t cosine_scores(const double* gram, int64_t S, double* out, cudaStream_t stream);

cudaError_t distance_scores(const double* gram, int64_t S, double* out, cudaStream_t stream);

// A task is at most kSimilarTile queries of one group (similar_layout.h):
//   spans   // [tasks, 4]: begin and end of its queries, begin and end of the rows of its group
// The bits are those of the CPU.
cudaError_t most_similar(const int8_t* queries, const int64_t* query_ids, const int8_t* rows,
                         const float* factors, const int64_t* row_ids, const int64_t* spans,
                         int64_t tasks, int64_t k, int64_t* best, float* similarity,
                         cudaStream_t stream);

// `wrong` is nullptr if the caller has checked the ids, else scratch memory for a number: kernels
// check them, and change nothing if an id is outside [0, K) or comes twice.
template <class Count>  // int16_t or int32_t
cudaError_t update_scores(float* scores, Count* counts, int64_t K, const double* round_scores,
                          const int64_t* clients, int64_t S, const uint8_t* pairs,
                          const uint8_t* when, int32_t* wrong, cudaStream_t stream);

cudaError_t select_friends(const float* scores, Counts counts, const uint8_t* active,
                           Flags candidates, int64_t K, int64_t* friends, cudaStream_t stream);

cudaError_t eliminate(uint8_t* candidates, bool packed, const float* scores, Counts counts,
                      int64_t K, double threshold, const uint8_t* when, cudaStream_t stream);

// --- policy of the robust rules on [S, S] --------------------------------------------------------

// Sums are in other orders than the CPU's. Results do not depend on how many thread blocks run.
// With numbers that are not finite, results have no meaning, but positions are valid.

// Krum's scores from `neighbours` nearest others (krum_neighbours in nearest_rows.h).
//   lists   // [n, n], scratch
cudaError_t krum_scores(const double* gram, int64_t n, int64_t neighbours, double* scores,
                        double* lists, cudaStream_t stream);

// Scratch memory:
//   lists    // [n, n]
//   scores   // [n]
//   is_out   // [n]
cudaError_t krum_selection(const double* gram, int64_t n, int64_t num_byzantine, int64_t count,
                           int64_t* chosen, double* lists, double* scores, uint8_t* is_out,
                           cudaStream_t stream);

// The shares of nearest_means.
//   mixing   // [size, size]
//   lists    // [n, n], scratch
cudaError_t nearest_shares(const double* gram, int64_t size, int64_t n, const double* weights,
                           int64_t count, double* mixing, double* lists, cudaStream_t stream);

//   factors    // [n], changed: before the call, those to start from
//   products   // [n], scratch
cudaError_t weiszfeld(const double* gram, int64_t n, const double* weights, double nu,
                      int64_t iterations, double* factors, double* products, cudaStream_t stream);

// n rows and a last one.
//   factors    // [n + 1]
//   products   // [n + 1], scratch
cudaError_t clip_towards(const double* gram, int64_t n, const double* weights, double tau,
                         int64_t iterations, double* factors, double* products,
                         cudaStream_t stream);

//   before   // [m, m]
//   rows     // [any, n]
//   fresh    // [n]: which of `rows` replaces each row, or -1
cudaError_t replace_rows(const double* before, int64_t m, const double* rows, const int64_t* fresh,
                         int64_t n, double* out, cudaStream_t stream);

// The rows of bucket b are members[begins[b]], ..., ascending. The first `count` of m buckets have
// weights, the others have one row each.
//   gram      // [n, n]
//   weights   // [n], of rows in the first `count` buckets
//   out       // [m, m]
//   shares    // [n]
//   sums      // [count]
//   half      // [m, n], scratch
cudaError_t bucketed_gram(const double* gram, int64_t n, const int64_t* begins,
                          const int64_t* members, int64_t count, int64_t m, const double* weights,
                          double* out, double* shares, double* sums, double* half,
                          cudaStream_t stream);

// gram [n, n] = (gram + its transpose) / 2.
cudaError_t make_symmetric(double* gram, int64_t n, cudaStream_t stream);

// For gram_rows, whose changed rows are the first ones: pairs [S, S] = those that have one of the
// first `count` rows; out [count, S] = the first rows of `gram`, with columns places[0], ...
cudaError_t first_pairs(int64_t S, int64_t count, uint8_t* pairs, cudaStream_t stream);
cudaError_t take_columns(const double* gram, int64_t S, int64_t count, const int64_t* places,
                         double* out, cudaStream_t stream);

}  // namespace fastagg::cuda
