// SPDX-License-Identifier: Apache-2.0
// What a tensor core computes, bit for bit where that is known. Products are exact. A block of them
// and the accumulator are shifted to the largest exponent among them (of products: the sum of both
// exponents), cut off below a last bit, added exactly, and the sum is cut off to float32. Blocks of
// one instruction are added one after the other.
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

// Registers of a lane.
struct MmaLane {
  float c[4];
  uint32_t a[4], b[2];
};

// d = a b + c for a warp, in place of c: m16n8k16 of bf16 or m16n8k8 of tf32, fragments as in the
// PTX manual.
void multiply(TensorCore core, bool bf16, MmaLane (&lanes)[32]);
