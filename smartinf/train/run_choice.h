// Whether a run's folder and its devices are of one run, before anything is written: a folder never
// goes on with a state that it does not know, unless the user says so.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "smartinf/base/status.h"
#include "smartinf/engine/found_run.h"

namespace smartinf::train {

/// Choice of the user for a state that is on the devices: the first eight digits, or more, of its
/// run's id. At most one is given.
struct RunChoice {
  std::string take_over;   // it becomes this folder's
  std::string start_over;  // it is deleted, and a new run begins
};

/// The start that a folder and its devices allow.
struct RunStart {
  std::optional<engine::FoundRun> found;  // on the devices; nothing: a new run
  bool discard = false;                   // `found` is to be deleted first
  bool taken_over = false;                // the folder did not know it before
  bool own_log = true;                    // the folder's log is of `found`
  std::string from;                       // the folder that `found` was of; empty: not known
};

/// found: what is on the devices. Looks only. Errors: kMismatch with both ways out for a state that
/// is not this folder's; kNotFound when the choice names a run that is not there; kCorrupt.
base::Result<RunStart> choose_run(const std::string& folder,
                                  const std::vector<std::string>& devices,
                                  std::optional<engine::FoundRun> found, const RunChoice& choice);

}  // namespace smartinf::train
