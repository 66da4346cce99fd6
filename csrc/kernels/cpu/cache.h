// SPDX-License-Identifier: Apache-2.0
// Sizes of caches. Only speed depends on them: results have the same bits with any.
#pragma once

#include <cstdint>

namespace fastagg::cpu {

int64_t l1_bytes();  // of data, of a core
int64_t l2_bytes();  // of a core
int64_t l3_bytes();  // of the cores that share one

}  // namespace fastagg::cpu
