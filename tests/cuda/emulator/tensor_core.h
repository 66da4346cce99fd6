// SPDX-License-Identifier: Apache-2.0
// The arithmetic of a tensor core, bit for bit where it is known. Products are exact. A block of
// products and the accumulator are aligned to the largest exponent among them (the exponent of a
// product is the sum of both exponents), truncated below a last bit and added exactly; the sum is
// truncated to float32. The blocks of one instruction are added one after the other.
//
//           bits below the largest exponent   a block of bf16 / tf32
//   sm_80   24                                8 / 4
//   sm_90   25                                16 / 8
//
// Measured on the hardware by Fasi, Higham, Mikaitis and Pranesh, "Numerical behavior of NVIDIA
// tensor cores" (2021), Khattak and Mikaitis, "Accurate models of NVIDIA tensor cores" (2025), and
// by the authors of MMA-Sim (2025), which agree in this.
#pragma once
#include <cstdint>

enum class TensorCore { kSm80, kSm90 };

// The registers of a lane.
struct MmaLane {
  float c[4];
  uint32_t a[4], b[2];
};

// Computes c = a b + c for a warp, in place: m16n8k16 for bf16, m16n8k8 for tf32. The fragment
// layouts are those of the PTX manual.
void multiply(TensorCore core, bool bf16, MmaLane (&lanes)[32]);
