// SPDX-License-Identifier: Apache-2.0
// Inner products of int8 vectors with what each instruction set does fastest. A word of 32 bits
// holds some neighbouring numbers of a vector. For vectors of at most kMostSketchColumns numbers
// all sums are exact, so they have the same bits in each of these forms.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "../common.h"
#include "../elements.h"
#include "simd.h"

namespace fastagg::cpu {

// Numbers of a word: four int8 with AVX-512, where VNNI (vector neural network instructions) adds
// their products to a sum; two int16 with AVX2, where one instruction adds up two products; else
// one float32. Compilers make neither instruction of generic vectors. They are assembly, which
// Clang refuses in functions that are not compiled for the instruction set themselves.
#if defined(FASTAGG_X86) && !defined(__clang__)
template <int W>
constexpr int kWordNumbers = W >= 8 ? W / 4 : 1;
#else
template <int W>
constexpr int kWordNumbers = 1;
#endif

// The best instruction set for these products that is not above `isa`. Processors with AVX-512 but
// without VNNI are few, and take AVX2.
inline Isa isa_of_products(Isa isa) {
#ifdef FASTAGG_X86
  if (isa == Isa::kAvx512 && kWordNumbers<16> == 4 && !__builtin_cpu_supports("avx512vnni"))
    return Isa::kAvx2;
#endif
  return isa;
}

template <int W>
constexpr int64_t words_of(int64_t k) {
  return ceil_div(k, kWordNumbers<W>);
}

// VNNI multiplies unsigned numbers by signed ones. So 128 is added to the numbers of rows, and 128
// times the numbers of the query is subtracted from the sum before it begins.
enum class Side { kRow, kQuery };

// The word of numbers `first` and following of four int8 numbers.
template <int W, Side kSide>
FASTAGG_INLINE uint32_t word_of(uint32_t four, int first) {
  const auto high = [&](int i) FASTAGG_INLINE_LAMBDA {  // number i, in the upper bits
    return static_cast<int32_t>(four << (24 - 8 * i));
  };
  if constexpr (kWordNumbers<W> == 4) {
    return kSide == Side::kRow ? four ^ 0x80808080u : four;
  } else if constexpr (kWordNumbers<W> == 2) {
    const uint32_t low = static_cast<uint32_t>(high(first) >> 24) & 0xFFFFu;
    return (static_cast<uint32_t>(high(first + 1) >> 8) & 0xFFFF0000u) | low;
  } else {
    const auto number = static_cast<float>(high(first) >> 24);
    uint32_t bits;
    std::memcpy(&bits, &number, sizeof bits);
    return bits;
  }
}

// What the sums of a query's products begin with.
template <int W>
FASTAGG_INLINE int32_t first_sum(const int8_t* query, int64_t k) {
  int32_t sum = 0;
  if constexpr (kWordNumbers<W> == 4)
    for (int64_t p = 0; p < k; ++p) sum += query[p];
  return -128 * sum;
}

// A vector of sums, one for each row.
template <int W>
using ProductSums = std::conditional_t<kWordNumbers<W> == 1, Vec<float, W>, Vec<int32_t, W>>;

template <int W>
FASTAGG_INLINE ProductSums<W> sums_from(int32_t first) {
  return ProductSums<W>{} +
         static_cast<std::conditional_t<kWordNumbers<W> == 1, float, int32_t>>(first);
}

// sums += the products of the numbers of a word of each row and of one of the query.
template <int W>
FASTAGG_INLINE void add_products(ProductSums<W>& sums, const Vec<uint32_t, W>& rows,
                                 uint32_t query) {
  if constexpr (kWordNumbers<W> == 1) {
    Vec<float, W> numbers;
    std::memcpy(&numbers, &rows, sizeof numbers);
    sums += float_of_bits(query) * numbers;
  } else {
    const Vec<uint32_t, W> queries = Vec<uint32_t, W>{} + query;
#ifdef FASTAGG_X86
    if constexpr (kWordNumbers<W> == 4) {
      asm("vpdpbusd %2, %1, %0" : "+v"(sums) : "v"(rows), "v"(queries));
    } else {
      Vec<int32_t, W> products;
      asm("vpmaddwd %2, %1, %0" : "=v"(products) : "v"(rows), "v"(queries));
      sums += products;
    }
#endif
  }
}

}  // namespace fastagg::cpu
