// Report of one step: the line on the terminal and in the log.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "smartinf/base/ids.h"
#include "smartinf/engine/updater.h"

namespace smartinf::train {

/// A span of a step on the monotonic clock (base::now_ns), for a trace.
struct Phase {
  const char* name = "";  // a literal
  uint64_t begin_ns = 0;
  uint64_t end_ns = 0;
};

struct StepReport {
  base::StepNumber step = 0;
  double loss = 0;           // mean over the step's targets, nats
  double gradient_norm = 0;  // before clipping
  double lr = 0;
  uint64_t tokens = 0;   // tokens that were read, padding too
  uint64_t targets = 0;  // targets that count in the loss

  double began_s = 0;    // seconds since 1970
  double seconds = 0;    // the whole step
  double forward_s = 0;  // without what it waited for weights; backward_s likewise
  double backward_s = 0;
  double update_s = 0;   // all else: gradients handed over, updates waited for
  double pipeline_wait_s = 0;  // for other stages' messages; in none of the others
  double exposed_s = 0;  // of it, what the step waited for: weights, or the commit before it
  std::string_view overlap = "none";  // the overlap of its update: none, late or early
  bool wrong_guess = false;           // an early update was done again

  engine::UpdaterTraffic traffic;  // since the report before this one

  uint64_t pipeline_sent_bytes = 0;  // to other stages
  bool pipeline = false;             // the two are given

  // Figures of compressed gradients; 0 without.
  uint64_t compressed_bytes = 0;  // that were sent
  double density = 0;             // of compressed gradients (compress::CompressOptions::density)
  double residual_norm = 0;       // of what is added to the next gradient

  // Where what autograd keeps may be offloaded: units and micro batches of which it was; and what
  // was decided after this step for those to come, with the reason: empty but once.
  std::optional<uint64_t> offloaded;
  std::string offload_decision;

  /// Why there was no update (non-finite gradients, parameter named); empty: there was one.
  std::string skipped;
  std::vector<Phase> phases;

  double tokens_per_s() const { return seconds > 0 ? static_cast<double>(tokens) / seconds : 0; }
  /// One line of JSON without a newline; phases are left out.
  std::string to_json() const;
};

}  // namespace smartinf::train
