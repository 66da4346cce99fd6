// SPDX-License-Identifier: Apache-2.0
// What speed depends on: sizes of caches, and prefetchers. Results have the same bits with any.
#pragma once

#include <cstdint>

namespace fastagg::cpu {

int64_t l1_bytes();  // of data, of a core
int64_t l2_bytes();  // of a core
int64_t l3_bytes();  // of the cores that share one

// How much of the last cache this process can expect to have. A virtual machine sees the whole
// cache of a socket, which it shares with other machines. So it is no more than 32 MB for each
// processor that the process sees.
int64_t own_l3_bytes();

// Whether loops over rows fetch rows ahead. They do on Intel's processors: on a Xeon it made passes
// over eight streams faster. On AMD's processors, the additional instructions made them slower.
extern const bool kFetchRows;

}  // namespace fastagg::cpu
