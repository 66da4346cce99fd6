// SPDX-License-Identifier: Apache-2.0
#include "wake_core.h"

#ifdef __linux__

#include <sys/syscall.h>
#include <unistd.h>

namespace fastagg::cpu {
namespace {

// Nothing happens if the system forbids it, or if the machine has more cores than a cpu_set_t.
void avoid(Sleeper& sleeper, int core) {
  cpu_set_t now;
  if (core < 0 || sched_getaffinity(sleeper.thread, sizeof now, &now)) return;
  if (sleeper.avoided < 0 || !CPU_EQUAL(&now, &sleeper.given)) sleeper.allowed = now;
  cpu_set_t others = sleeper.allowed;
  CPU_CLR(core, &others);
  if (CPU_COUNT(&others) == 0 || sched_setaffinity(sleeper.thread, sizeof others, &others)) return;
  sleeper.given = others;
  sleeper.avoided = core;
}

}  // namespace

int this_core() {
  const int core = sched_getcpu();
  return core < CPU_SETSIZE ? core : -1;
}

void falls_asleep(Sleeper& sleeper, int core) {
  if (!sleeper.thread) sleeper.thread = static_cast<int>(syscall(SYS_gettid));
  avoid(sleeper, core);
  sleeper.asleep = true;
}

void come_back(Sleeper& sleeper) {
  if (sleeper.avoided < 0) return;
  cpu_set_t now;
  if (!sched_getaffinity(0, sizeof now, &now) && CPU_EQUAL(&now, &sleeper.given))
    static_cast<void>(sched_setaffinity(0, sizeof now, &sleeper.allowed));
  sleeper.avoided = -1;
}

void wake_apart(Sleeper* first, int core) {
  for (Sleeper* sleeper = first; sleeper; sleeper = sleeper->next)
    if (sleeper->asleep && sleeper->avoided != core) avoid(*sleeper, core);
}

}  // namespace fastagg::cpu

#else

namespace fastagg::cpu {

int this_core() {
  return -1;
}
void falls_asleep(Sleeper& sleeper, int) {
  sleeper.asleep = true;
}
void come_back(Sleeper&) {}
void wake_apart(Sleeper*, int) {}

}  // namespace fastagg::cpu

#endif
