// `smartinf train` after it has lost a device of another machine: it goes on from the committed
// step, in a new process in place of this one, which gives back all memory that this one and its
// libraries have taken.
#pragma once

#include <cstdint>
#include <string>

#include "smartinf/base/ids.h"
#include "smartinf/base/status.h"

#include "apps/smartinf/interrupt.h"

namespace smartinf::apps {

/// The last loss of a device, until a further step is committed.
struct Restart {
  uint64_t lost_ns = 0;       // when; 0: nothing is lost
  base::StepNumber step = 0;  // committed by then, at least
  uint64_t tries = 0;         // tries that were made since
};

/// A device of another machine is lost: it cannot be reached, or has forgotten what it was to keep.
bool is_lost(const base::Status& why);
/// Whether a failed try to open the devices may be followed by a better one.
bool may_come_again(const base::Status& why);

/// Waits until the next try is due, which the first is at once. Ctrl-C ends the process meanwhile.
/// Errors: `why`, with what to do, when there were tries for `seconds`; kCancelled where the user
/// has asked to stop. Without an error nobody waits for signals any more: the next process does.
base::Status wait_for_try(const Restart& restart, double seconds, const base::Status& why,
                          Interrupt& interrupt);

/// Becomes `smartinf train` with the recipe in the folder of the run, and does not come back.
/// Errors: why not.
base::Status begin_again(const std::string& run, bool json, bool verbose, const Restart& restart);

}  // namespace smartinf::apps
