// SPDX-License-Identifier: Apache-2.0
#include "cuda_on_cpu.h"
dim3 gridDim, blockDim;
Index threadIdx, blockIdx;
Fiber* current;
ucontext_t scheduler;
std::vector<std::unique_ptr<Fiber>> fibers;
std::vector<char> dynamic_shared;
std::vector<MmaArgs> mma_args;
size_t dynamic_limit;
static const std::function<void()>* body_;
static void entry() {
  (*body_)();
  current->done = true;
  swapcontext(&current->context, &scheduler);
}
void run_block(const std::function<void()>& body, unsigned threads) {
  body_ = &body;
  mma_args.resize(threads);
  while (fibers.size() < threads) {
    fibers.push_back(std::make_unique<Fiber>());
    fibers.back()->stack.resize(64 << 10);
  }
  for (unsigned t = 0; t < threads; ++t) {
    Fiber& f = *fibers[t];
    f.done = false;
    f.waiting = 0;
    f.x = t % blockDim.x;
    f.y = t / blockDim.x;
    f.lane = t % 32;
    f.warp = t / 32;
    getcontext(&f.context);
    f.context.uc_stack.ss_sp = f.stack.data();
    f.context.uc_stack.ss_size = f.stack.size();
    f.context.uc_link = nullptr;
    makecontext(&f.context, entry, 0);
  }
  for (;;) {
    bool any = false, progress = false;
    for (unsigned t = 0; t < threads; ++t) {
      Fiber& f = *fibers[t];
      if (f.done) continue;
      any = true;
      if (f.waiting) continue;
      progress = true;
      current = &f;
      threadIdx = {f.x, f.y, 0};
      swapcontext(&scheduler, &f.context);
    }
    if (!any) return;
    // warps
    for (unsigned w = 0; w < threads / 32; ++w) {
      int kind = fibers[w * 32]->waiting;
      bool all = kind >= 3 && !fibers[w * 32]->done;
      for (int l = 0; l < 32 && all; ++l)
        all = !fibers[w * 32 + l]->done && fibers[w * 32 + l]->waiting == kind;
      if (!all) continue;
      progress = true;
      for (int l = 0; l < 32; ++l) {
        Fiber& f = *fibers[w * 32 + l];
        if (kind == 3) f.out = fibers[w * 32 + f.in_or]->in;
      }
      for (int l = 0; l < 32; ++l) fibers[w * 32 + l]->waiting = 0;
    }
    // block: all that are not done wait at the same barrier
    int kind = 0;
    bool all = true, some = false;
    for (unsigned t = 0; t < threads; ++t) {
      Fiber& f = *fibers[t];
      if (f.done) continue;
      some = true;
      if (!kind) kind = f.waiting;
      all = all && f.waiting == kind && kind > 0 && kind < 3;
    }
    if (some && all) {
      progress = true;
      int o = 0;
      for (unsigned t = 0; t < threads; ++t)
        if (!fibers[t]->done) o |= fibers[t]->in_or;
      for (unsigned t = 0; t < threads; ++t)
        if (!fibers[t]->done) {
          if (kind == 2) fibers[t]->in_or = o;
          fibers[t]->waiting = 0;
        }
    }
    if (!progress) {
      fprintf(stderr, "deadlock\n");
      abort();
    }
  }
}
