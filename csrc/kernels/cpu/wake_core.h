// SPDX-License-Identifier: Apache-2.0
// On which cores a sleeping thread may wake.
#pragma once

#ifdef __linux__
#include <sched.h>
#endif

namespace fastagg::cpu {

// A helper, which must not wake on the core of the thread that wakes it and goes on there.
//
// Linux wakes a thread on an idle core if it knows one, and otherwise often on the core of the
// thread that wakes it. In a virtual machine it knows none when the host has lent the idle cores to
// others, as it often is after a pause. Then the two threads shared a core until the next
// balancing, some milliseconds later, while another one was idle.
//
// Helpers are a list. One mutex guards it and all fields; a helper that is awake may use its own
// without the mutex.
struct Sleeper {
  Sleeper* next = nullptr;
  bool asleep = false;
#ifdef __linux__
  int thread = 0;          // its id
  int avoided = -1;        // the core where it may not wake; -1: none
  cpu_set_t allowed = {};  // its cores without that restriction
  cpu_set_t given = {};    // its cores with it
#endif
};

// The core of the calling thread, -1 if it is not known.
int this_core();

// The calling thread is about to sleep. It will probably be woken from `core`.
void falls_asleep(Sleeper& sleeper, int core);

// The calling thread has woken, and may use all its cores again. It stays on the one where it is.
// Another restriction that someone has set in the meantime remains.
void come_back(Sleeper& sleeper);

// Before a thread that runs on `core` wakes sleepers: none of the list will wake there, if it has
// another core. Costs system calls for those that expected another `core`.
void wake_apart(Sleeper* first, int core);

}  // namespace fastagg::cpu
