// SPDX-License-Identifier: Apache-2.0
#include "cache.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <string>
#include <thread>

namespace fastagg::cpu {
namespace {

// The first word of a file that describes a cache of the first processor; empty if there is none.
std::string described(int index, const char* name) {
  const std::string folder = "/sys/devices/system/cpu/cpu0/cache/index";
  const std::string path = folder + std::to_string(index) + "/" + name;
  char word[32] = "";
  if (FILE* file = std::fopen(path.c_str(), "r")) {
    if (std::fscanf(file, "%31s", word) != 1) word[0] = '\0';
    std::fclose(file);
  }
  return word;
}

// Linux describes one cache at a time, for instance "512K". For some processors sysconf adds up the
// L3 caches of all cores, so it comes second.
int64_t find(const char* level, int parameter, int64_t otherwise) {
  for (int index = 0; index < 8; ++index) {
    if (described(index, "level") != level) continue;
    if (described(index, "type") == "Instruction") continue;
    long long size = 0;
    char unit = ' ';
    if (std::sscanf(described(index, "size").c_str(), "%lld%c", &size, &unit) < 1) continue;
    if (size > 0) return size << (unit == 'K' ? 10 : unit == 'M' ? 20 : 0);
  }
  const long found = parameter < 0 ? 0 : sysconf(parameter);
  return found > 0 ? int64_t{found} : otherwise;
}

#ifdef _SC_LEVEL3_CACHE_SIZE
constexpr int kL1 = _SC_LEVEL1_DCACHE_SIZE;
constexpr int kL2 = _SC_LEVEL2_CACHE_SIZE, kL3 = _SC_LEVEL3_CACHE_SIZE;
#else
constexpr int kL1 = -1, kL2 = -1, kL3 = -1;
#endif

}  // namespace

int64_t l1_bytes() {
  static const int64_t bytes = find("1", kL1, int64_t{32} << 10);
  return bytes;
}

int64_t l2_bytes() {
  static const int64_t bytes = find("2", kL2, int64_t{1} << 20);
  return bytes;
}

int64_t l3_bytes() {
  static const int64_t bytes = find("3", kL3, int64_t{32} << 20);
  return bytes;
}

int64_t own_l3_bytes() {
  constexpr int64_t kOfProcessor = int64_t{32} << 20;
  static const int64_t processors = std::max<int64_t>(1, std::thread::hardware_concurrency());
  return std::min(l3_bytes(), processors * kOfProcessor);
}

namespace {

// Found when the library is loaded: a child of fork() that interrupts the first call would wait for
// the end of that call.
[[maybe_unused]] const int64_t loaded = l1_bytes() + l2_bytes() + own_l3_bytes();

}  // namespace

#if defined(__x86_64__)
const bool kFetchRows = [] {
  __builtin_cpu_init();
  return __builtin_cpu_is("intel") != 0;
}();
#else
const bool kFetchRows = false;
#endif

}  // namespace fastagg::cpu
