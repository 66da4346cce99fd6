// SPDX-License-Identifier: Apache-2.0
// Threads that help with the tasks of kernels.
#pragma once

#include "../common.h"

namespace fastagg::cpu {

// Runs kernels with up to `workers` threads: the calling one, and helpers that all callers share.
//
// A helper takes part once the system has scheduled it. The caller works too. When the tasks run
// out, the caller waits for the helpers that have begun, and only for these. So on a busy machine
// no call waits for a thread that the system does not run.
//
// Helpers are started when a call first needs them. After a call they look for another one for some
// microseconds, because waking takes longer, and then sleep (wake_core.h). They compute in the
// floating-point environment of the caller (rounding, flushing of denormal numbers), and block all
// signals but those of their own faults, so that the threads of the application receive them. A
// helper keeps the CPU affinity of the thread whose call started it, whichever call it helps later.
// A process made by fork() starts its own helpers. If the system refuses a thread, calls run with
// fewer.
Parallel pool_threads(int workers);

}  // namespace fastagg::cpu
