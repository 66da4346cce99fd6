// SPDX-License-Identifier: Apache-2.0
// The CUDA side of every kernel. What is computed stands in the header of the same name (gram.h,
// mimic.h, ...); names and arguments are those of fastagg::cpu, with two differences:
//
//   * Pointers point into device memory, and so do lists of pointers and numbers (`store_words`
//     puts them there). Tensors are contiguous; `width` is how many elements, 8, 4, 2 or 1, all the
//     addresses of rows and vectors allow to be had at a time (vector_width in row_layout.h).
//   * Launchers enqueue work on `stream` and return: they do not wait, allocate or copy from host
//     memory, so that they can be captured in a CUDA graph. Scratch memory comes from the caller.
//
// `when`, a byte on the device or null: 0 calls the work off; nothing is changed then.
//
// Results are the same to the bit from run to run on one kind of GPU, and for any order of clients
// where the CPU's are; the last bits differ from the CPU's.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "../elements.h"
#include "../pair_state.h"
#include "../precision.h"

namespace fastagg::cuda {

// out[n] = words[n]: 64-bit words (pointers, doubles, ids), from host memory that may change as
// soon as this returns.
cudaError_t store_words(const uint64_t* words, int64_t n, uint64_t* out, cudaStream_t stream);

// --- one pass over d ----------------------------------------------------------------------------

cudaError_t abs_max(const float* const* rows, int64_t S, int64_t d, float* out, int width,
                    cudaStream_t stream);

template <class T>  // float, Bfloat16 or Half
cudaError_t weighted_sum(float* out, const T* const* rows, int64_t S, int64_t d,
                         const double* weights, double beta, const uint8_t* when, int width,
                         cudaStream_t stream);

template <class T>
cudaError_t mimic(float* params, const T* const* updates, float* const* corrections, int64_t S,
                  int64_t d, double lr, int width, cudaStream_t stream);

// `references` may be null, and so may its entries; `kept` may be null. `peaks` is in the order of
// rows.
template <class T>
cudaError_t mimic_mean(double* v, float* rounded, float* peaks, const T* const* updates,
                       const T* const* corrections, const float* const* references,
                       float* const* kept, int64_t S, int64_t d, int width, cudaStream_t stream);

template <class T>
cudaError_t memory_update(float* params, double* total, const T* const* updates,
                          float* const* memory, int64_t S, int64_t d, const double* weights,
                          double lr, double norm, bool models, int width, cudaStream_t stream);

template <class T>
cudaError_t memory_total(double* out, float* peaks, const double* total, const T* const* updates,
                         const T* const* memory, const float* const* references, int64_t S,
                         int64_t d, const double* weights, const float* params, float* const* kept,
                         int width, cudaStream_t stream);

cudaError_t add_total(float* params, const double* total, int64_t d, double lr, double norm,
                      bool models, cudaStream_t stream);

// --- Gram ---------------------------------------------------------------------------------------

// Bytes of `workspace` that gram needs; it is aligned to 256.
int64_t gram_workspace(int64_t S, int64_t d);

// `pairs` is symmetric; tiles of 128 rows that nobody wants are skipped, in the order of rows
// given.
cudaError_t gram(const float* const* rows, int64_t S, int64_t d, const uint8_t* pairs, double* out,
                 Precision precision, void* workspace, int width, cudaStream_t stream);

// --- policy on [S, S] and [K, K] ----------------------------------------------------------------

cudaError_t cosine_scores(const double* gram, int64_t S, double* out, cudaStream_t stream);

cudaError_t distance_scores(const double* gram, int64_t S, double* out, cudaStream_t stream);

// An id outside [0, K) stops the kernel by an assertion.
template <class Count>  // int16_t or int32_t
cudaError_t update_scores(float* scores, Count* counts, int64_t K, const double* round_scores,
                          const int64_t* clients, int64_t S, const uint8_t* pairs,
                          const uint8_t* when, cudaStream_t stream);

cudaError_t select_friends(const float* scores, Counts counts, const uint8_t* active,
                           Flags candidates, int64_t K, double threshold, int64_t* friends,
                           cudaStream_t stream);

cudaError_t eliminate(uint8_t* candidates, bool packed, const float* scores, Counts counts,
                      int64_t K, double threshold, const uint8_t* when, cudaStream_t stream);

}  // namespace fastagg::cuda
