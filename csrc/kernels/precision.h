// SPDX-License-Identifier: Apache-2.0
// How exactly a Gram matrix multiplies.
#pragma once

namespace fastagg {

// An element x is off by at most 2^-17 |x| (kHighest) or 2^-11 |x| (kTf32) before it is multiplied.
// Products and sums are treated alike. The CPU multiplies float32, which is as exact as either.
enum class Precision { kHighest, kTf32 };

}  // namespace fastagg
