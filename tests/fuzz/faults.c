// SPDX-License-Identifier: Apache-2.0
// Preloaded into a process: makes one allocation fail, or memory run out, or calls that change
// files fail.
//
// The process counts its calls from the moment at which it calls fault_arm, and the n-th fails.
// Without fault_arm everything works as usual.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <malloc.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

enum { kOff, kOneAllocation, kMemoryFull, kOneCall, kDiskFull, kReadOnly };

static atomic_int mode = kOff;
static atomic_long calls, failed, nth, live, peak;

void fault_arm(int what, long n) {
  calls = failed = live = peak = 0;
  nth = n;
  mode = what;
}
void fault_disarm(void) {
  mode = kOff;
}
long fault_calls(void) {
  return calls;
}  // since the last fault_arm
long fault_failed(void) {
  return failed;
}  // of these

// --- memory -----------------------------------------------------------------------------------

extern void* __libc_malloc(size_t);
extern void* __libc_calloc(size_t, size_t);
extern void* __libc_realloc(void*, size_t);
extern void* __libc_memalign(size_t, size_t);
extern void __libc_free(void*);

static int no_memory(size_t bytes) {
  const int what = mode;
  if (what != kOneAllocation && what != kMemoryFull) return 0;
  const long call = ++calls;
  // Full from the n-th call on: what was in use before, and has been freed, can be used again.
  const int full = what == kOneAllocation ? call == nth : call >= nth && live + (long)bytes > peak;
  if (!full) return 0;
  ++failed;
  errno = ENOMEM;
  return 1;
}

static void* took(void* memory, size_t bytes) {
  if (memory && mode == kMemoryFull) {
    const long now = live += (long)bytes;
    if (calls < nth && now > peak) peak = now;
  }
  return memory;
}

static void gave(size_t bytes) {
  if (mode == kMemoryFull) live -= (long)bytes;
}

static void* sized(void* memory) {
  return memory ? took(memory, malloc_usable_size(memory)) : NULL;
}

void* malloc(size_t bytes) {
  return no_memory(bytes) ? NULL : sized(__libc_malloc(bytes));
}
void* calloc(size_t count, size_t bytes) {
  return no_memory(count * bytes) ? NULL : sized(__libc_calloc(count, bytes));
}
void* realloc(void* old, size_t bytes) {
  const size_t before = old ? malloc_usable_size(old) : 0;
  if (bytes > before && no_memory(bytes - before)) return NULL;
  void* result = __libc_realloc(old, bytes);
  if (result || !bytes) gave(before);
  return result ? sized(result) : NULL;
}
void* memalign(size_t alignment, size_t bytes) {
  return no_memory(bytes) ? NULL : sized(__libc_memalign(alignment, bytes));
}
void* aligned_alloc(size_t alignment, size_t bytes) {
  return memalign(alignment, bytes);
}
int posix_memalign(void** result, size_t alignment, size_t bytes) {
  void* memory = memalign(alignment, bytes);
  if (!memory) return ENOMEM;
  *result = memory;
  return 0;
}
void free(void* memory) {
  if (memory) gave(malloc_usable_size(memory));
  __libc_free(memory);
}

void* mmap(void* at, size_t bytes, int protection, int flags, int file, off_t offset) {
  static void* (*real)(void*, size_t, int, int, int, off_t);
  if (!real) real = (void* (*)(void*, size_t, int, int, int, off_t))dlsym(RTLD_NEXT, "mmap");
  if (no_memory(bytes)) return MAP_FAILED;
  void* result = real(at, bytes, protection, flags, file, offset);
  if (result != MAP_FAILED) took(result, bytes);
  return result;
}
void* mmap64(void* at, size_t bytes, int protection, int flags, int file, off_t offset) {
  return mmap(at, bytes, protection, flags, file, offset);
}
int munmap(void* at, size_t bytes) {
  static int (*real)(void*, size_t);
  if (!real) real = (int (*)(void*, size_t))dlsym(RTLD_NEXT, "munmap");
  gave(bytes);
  return real(at, bytes);
}

// --- files ------------------------------------------------------------------------------------

// Returns the error of a call that changes files; `grows` if it needs room on the disk.
static int disk_error(int grows) {
  const int what = mode;
  if (what < kOneCall || (what == kDiskFull && !grows)) return 0;
  const long call = ++calls;
  if (what == kOneCall ? call != nth : call < nth) return 0;
  ++failed;
  return what == kOneCall ? EIO : what == kDiskFull ? ENOSPC : EROFS;
}

#define REFUSE(grows)                    \
  do {                                   \
    const int error = disk_error(grows); \
    if (error) return errno = error, -1; \
  } while (0)
#define NEXT(type, name, ...)       \
  static type (*real)(__VA_ARGS__); \
  if (!real) real = (type (*)(__VA_ARGS__))dlsym(RTLD_NEXT, #name)

static int is_file(int file) {
  struct stat status;
  return file > 2 && mode >= kOneCall && fstat(file, &status) == 0 && S_ISREG(status.st_mode);
}

ssize_t write(int file, const void* data, size_t bytes) {
  NEXT(ssize_t, write, int, const void*, size_t);
  if (is_file(file)) {
    const int error = disk_error(1);
    if (error == ENOSPC && bytes > 1 && failed == 1) return real(file, data, bytes / 2);  // some
    if (error) return errno = error, -1;
  }
  return real(file, data, bytes);
}
ssize_t writev(int file, const struct iovec* parts, int count) {
  NEXT(ssize_t, writev, int, const struct iovec*, int);
  if (is_file(file)) REFUSE(1);
  return real(file, parts, count);
}
ssize_t pwrite64(int file, const void* data, size_t bytes, off_t offset) {
  NEXT(ssize_t, pwrite64, int, const void*, size_t, off_t);
  if (is_file(file)) REFUSE(1);
  return real(file, data, bytes, offset);
}
int fsync(int file) {
  NEXT(int, fsync, int);
  REFUSE(1);
  return real(file);
}
static int changes(int flags) {
  return (flags & (O_CREAT | O_WRONLY | O_RDWR | O_TRUNC)) != 0;
}
#define OPEN(name, next, before_types, before_names, path, flags)                    \
  int name {                                                                         \
    mode_t access = 0;                                                               \
    if (flags & (O_CREAT | O_TMPFILE)) {                                                           \
      va_list rest;                                                                  \
      va_start(rest, flags);                                                         \
      access = va_arg(rest, mode_t);                                                 \
      va_end(rest);                                                                  \
    }                                                                                \
    if (changes(flags) && strncmp(path, "/dev/", 5)) REFUSE((flags & O_CREAT) != 0); \
    NEXT(int, next, before_types int, ...);                                          \
    return real(before_names flags, access);                                         \
  }
#define COMMA ,
OPEN(open(const char* path, int flags, ...), open, const char* COMMA, path COMMA, path, flags)
OPEN(open64(const char* path, int flags, ...), open64, const char* COMMA, path COMMA, path, flags)
OPEN(openat(int at, const char* path, int flags, ...), openat, int COMMA const char* COMMA,
     at COMMA path COMMA, path, flags)
OPEN(openat64(int at, const char* path, int flags, ...), openat64, int COMMA const char* COMMA,
     at COMMA path COMMA, path, flags)
int rename(const char* from, const char* to) {
  NEXT(int, rename, const char*, const char*);
  REFUSE(0);
  return real(from, to);
}
int link(const char* from, const char* to) {
  NEXT(int, link, const char*, const char*);
  REFUSE(1);
  return real(from, to);
}
int unlink(const char* path) {
  NEXT(int, unlink, const char*);
  REFUSE(0);
  return real(path);
}
int unlinkat(int at, const char* path, int flags) {
  NEXT(int, unlinkat, int, const char*, int);
  REFUSE(0);
  return real(at, path, flags);
}
int mkdir(const char* path, mode_t access) {
  NEXT(int, mkdir, const char*, mode_t);
  REFUSE(1);
  return real(path, access);
}
int rmdir(const char* path) {
  NEXT(int, rmdir, const char*);
  REFUSE(0);
  return real(path);
}
int posix_fallocate64(int file, off_t offset, off_t bytes) {
  NEXT(int, posix_fallocate64, int, off_t, off_t);
  const int error = disk_error(1);
  return error ? error : real(file, offset, bytes);
}
int posix_fallocate(int file, off_t offset, off_t bytes) {
  return posix_fallocate64(file, offset, bytes);
}
