// SPDX-License-Identifier: Apache-2.0
#include "memory_check.h"

#include <link.h>

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

namespace memory_check {
namespace {

constexpr int kNone = -1, kSeveral = -2, kWarp = 32;

// The time and the thread of an access. Times keep counting over all launches.
struct When {
  uint32_t block = 0;       // counted from 1
  uint32_t epoch = 0;       // between two barriers of the block
  uint16_t warp_epoch = 0;  // between two of the warp
  int16_t thread = kNone;   // kSeveral: several of one block
  int16_t warp = kNone;     // or kSeveral
};

// The accesses to a word or a byte.
struct Cell {
  When write, read;         // the last write; all reads since the last barrier
  bool atomic = false;      // the last write was atomic
  bool far = false;         // several blocks have read
  bool on_its_way = false;  // an asynchronous copy has been issued
};

// Cells are words until a thread accesses part of a word; then the page is split into bytes.
constexpr uintptr_t kPage = 4096, kWord = 4;
struct Page {
  uintptr_t unit = kWord;
  std::vector<Cell> cells = std::vector<Cell>(kPage / kWord);

  void split() {
    std::vector<Cell> bytes;
    for (const Cell& cell : cells) bytes.insert(bytes.end(), kWord, cell);
    cells = std::move(bytes);
    unit = 1;
  }
};

struct Range {
  uintptr_t begin = 0, end = 0;

  bool has(uintptr_t from, size_t bytes) const { return from >= begin && from + bytes <= end; }
};
Range range(const void* data, size_t bytes) {
  const auto begin = reinterpret_cast<uintptr_t>(data);
  return {begin, begin + bytes};
}

std::mutex memory_mutex;  // tensors may be freed by any thread
std::map<uintptr_t, uintptr_t> memory;
Range recent;  // one of them

std::unordered_map<uintptr_t, std::unique_ptr<Page>> pages;
std::vector<Range> shared;
Range stacks, constants, arguments;
size_t stack_bytes = 1;

const char* kernel = "";
unsigned block_x = 0, block_y = 0;
uint32_t first_block = 1;  // of this launch
When now;
std::vector<uint16_t> warp_epochs;
// Accesses of a warp in epochs below this came before what another warp does now: [warp, other].
std::vector<std::vector<uint16_t>> seen;

int find_constants(dl_phdr_info* info, size_t, void*) {
  const auto here = reinterpret_cast<uintptr_t>(&find_constants);
  Range all;
  bool ours = false;
  for (int k = 0; k < info->dlpi_phnum; ++k) {
    const auto& part = info->dlpi_phdr[k];
    if (part.p_type != PT_LOAD) continue;
    const uintptr_t begin = info->dlpi_addr + part.p_vaddr, end = begin + part.p_memsz;
    if (!all.end) all.begin = begin;
    all.end = end;
    ours = ours || (here >= begin && here < end);
  }
  if (ours) constants = all;
  return ours;
}

bool is_shared(uintptr_t from, size_t bytes) {
  for (const Range& r : shared)
    if (r.has(from, bytes)) return true;
  return false;
}

bool is_memory(uintptr_t from, size_t bytes) {
  if (recent.has(from, bytes)) return true;
  const std::lock_guard<std::mutex> lock(memory_mutex);
  auto next = memory.upper_bound(from);
  if (next == memory.begin()) return false;
  --next;
  const Range found{next->first, next->second};
  if (!found.has(from, bytes)) return false;
  recent = found;
  return true;
}

Page& page_of(uintptr_t address) {
  static uintptr_t last = 0;
  static Page* page = nullptr;
  if (address / kPage != last || !page) {
    auto& place = pages[last = address / kPage];
    if (!place) place = std::make_unique<Page>();
    page = place.get();
  }
  return *page;
}

// Calls call(cell, address) for all cells of a range.
template <class Call>
void for_cells(const void* data, size_t bytes, const Call& call) {
  uintptr_t at = reinterpret_cast<uintptr_t>(data);
  const uintptr_t end = at + bytes;
  const bool words = at % kWord == 0 && bytes % kWord == 0;
  while (at < end) {
    Page& page = page_of(at);
    if (!words && page.unit == kWord) page.split();
    call(page.cells[at % kPage / page.unit], at);
    at += page.unit;
  }
}

const char* name_of(Access access) {
  switch (access) {
    case Access::kRead:
      return "reads";
    case Access::kWrite:
      return "writes";
    case Access::kAtomic:
      return "changes atomically";
    default:
      return "copies to";
  }
}

// Whether nothing orders `then` before the current access, `now`.
bool unordered(const When& then) {
  if (then.block < first_block) return false;
  if (then.block != now.block) return true;
  if (then.epoch != now.epoch || then.thread == now.thread) return false;
  if (then.warp == now.warp) return then.warp_epoch == now.warp_epoch;
  return then.warp < 0 || then.warp_epoch >= seen[now.warp][then.warp];
}

[[noreturn]] void race(uintptr_t address, Access access, const char* did, const When& then) {
  const bool far = then.block != now.block;
  fail("%s %p, which %s%s %s%s (race)", name_of(access), reinterpret_cast<void*>(address),
       then.thread < 0 ? "other threads" : "another thread", far ? " of another block" : "", did,
       far ? "" : " since the last barrier");
}

void check_cell(Cell& cell, uintptr_t address, Access access, bool in_shared) {
  // Accesses before the launch, or to shared memory before the block, no longer matter.
  const uint32_t since = in_shared ? now.block : first_block;
  if (std::max(cell.write.block, cell.read.block) < since) cell = Cell();
  if (cell.on_its_way)
    fail("%s %p before the copy to it has been waited for", name_of(access),
         reinterpret_cast<void*>(address));
  const bool atomic = access == Access::kAtomic;
  if (unordered(cell.write) && !(atomic && cell.atomic)) race(address, access, "wrote", cell.write);
  if (access == Access::kRead) {
    if (in_shared && cell.write.block != now.block)
      fail("reads shared memory at %p that no thread wrote", reinterpret_cast<void*>(address));
    const bool other = cell.read.block >= first_block && cell.read.block != now.block;
    cell.far = cell.far || other;
    if (other || !unordered(cell.read)) {
      cell.read = now;
    } else {
      cell.read.thread = kSeveral;
      if (cell.read.warp != now.warp) cell.read.warp = kSeveral;
    }
    return;
  }
  if (cell.far) race(address, access, "read", When{0, 0, 0, kSeveral, kSeveral});
  if (unordered(cell.read)) race(address, access, "read", cell.read);
  cell.write = now;
  cell.atomic = atomic;
  cell.on_its_way = access == Access::kCopy;
}

}  // namespace

void fail(const char* format, ...) {
  char text[300];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  if (now.thread == kNone)
    fprintf(stderr, "emulator: %s: %s\n", kernel, text);
  else
    fprintf(stderr, "emulator: %s: thread %d of block (%u, %u) %s\n", kernel, now.thread, block_x,
            block_y, text);
  abort();
}

void add_memory(const void* data, size_t bytes) {
  const std::lock_guard<std::mutex> lock(memory_mutex);
  const Range r = range(data, bytes);
  memory[r.begin] = r.end;
}
void remove_memory(const void* data) {
  const std::lock_guard<std::mutex> lock(memory_mutex);
  memory.erase(reinterpret_cast<uintptr_t>(data));
  recent = Range();
}
void set_stacks(const void* data, size_t bytes_of_one, int count) {
  stacks = range(data, bytes_of_one * count);
  stack_bytes = bytes_of_one;
}

void begin_launch(const char* name, const void* data, size_t bytes) {
  if (!constants.end) dl_iterate_phdr(find_constants, nullptr);
  first_block = now.block + 1;
  kernel = name;
  arguments = range(data, bytes);
}
void begin_block(unsigned x, unsigned y, const void* dynamic_shared, size_t bytes) {
  block_x = x;
  block_y = y;
  ++now.block;
  ++now.epoch;
  warp_epochs.assign(1024 / kWarp, 0);
  seen.assign(1024 / kWarp, warp_epochs);
  shared.assign(1, range(dynamic_shared, bytes));
}
void add_shared(const void* data, size_t bytes) {
  const Range r = range(data, bytes);
  if (!is_shared(r.begin, bytes)) shared.push_back(r);
}
void begin_thread(int thread) {
  now.thread = static_cast<int16_t>(thread);
  now.warp = static_cast<int16_t>(thread / kWarp);
  now.warp_epoch = warp_epochs[now.warp];
}
void end_thread() {
  now.thread = kNone;
}
void barrier() {
  ++now.epoch;
}
void barrier_of_warp(int warp) {
  ++warp_epochs[warp];
}
void announced(int warp) {
  ++warp_epochs[warp];
}
void other_seen(int warp, int other) {
  seen[warp][other] = warp_epochs[other];
}
void end_launch() {
  shared.clear();
}

void check(const void* data, size_t bytes, Access access) {
  if (now.thread == kNone) return;
  const auto from = reinterpret_cast<uintptr_t>(data);
  if (stacks.has(from, bytes)) {
    if ((from - stacks.begin) / stack_bytes != static_cast<uintptr_t>(now.thread))
      fail("%s %p, on the stack of another thread", name_of(access), data);
    return;
  }
  const bool in_shared = is_shared(from, bytes);
  if (!in_shared && !is_memory(from, bytes)) {
    if (access == Access::kRead && (arguments.has(from, bytes) || constants.has(from, bytes)))
      return;
    fail("%s %zu bytes at %p, which belong to no allocation", name_of(access), bytes, data);
  }
  for_cells(data, bytes,
            [&](Cell& cell, uintptr_t at) { check_cell(cell, at, access, in_shared); });
}

void copy_landed(const void* data, size_t bytes) {
  for_cells(data, bytes, [](Cell& cell, uintptr_t) { cell.on_its_way = false; });
}

}  // namespace memory_check

// ---- functions that the compiler calls ---------------------------------------------------------

using memory_check::Access;
using memory_check::check;

#define FUNCTIONS(n)                        \
  void __tsan_read##n(void* p) {            \
    check(p, n, Access::kRead);             \
  }                                         \
  void __tsan_write##n(void* p) {           \
    check(p, n, Access::kWrite);            \
  }                                         \
  void __tsan_unaligned_read##n(void* p) {  \
    check(p, n, Access::kRead);             \
  }                                         \
  void __tsan_unaligned_write##n(void* p) { \
    check(p, n, Access::kWrite);            \
  }

extern "C" {
FUNCTIONS(1)
FUNCTIONS(2)
FUNCTIONS(4)
FUNCTIONS(8)
FUNCTIONS(16)
void __tsan_read_range(void* p, unsigned long n) {
  check(p, n, Access::kRead);
}
void __tsan_write_range(void* p, unsigned long n) {
  check(p, n, Access::kWrite);
}
void __tsan_vptr_update(void**, void*) {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_init() {}
}
