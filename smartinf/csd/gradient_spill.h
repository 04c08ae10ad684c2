// Writes complete gradients that do not stay in memory to the store's spill area, from the slots'
// gradient buffers.
#pragma once

#include <vector>

#include "smartinf/base/status.h"
#include "smartinf/csd/device_parts.h"
#include "smartinf/csd/gradient_memory.h"
#include "smartinf/csd/transfer_handler.h"

namespace smartinf::csd {

/// Threads: the device's I/O thread.
class GradientSpill {
 public:
  GradientSpill(DeviceParts& parts, TransferHandler& handler) : parts_(parts), handler_(handler) {}

  void start(const GradientMemory::Spill& spill) {
    spills_.resize(parts_.slots.size());
    spills_[spill.buffer] = spill;
    parts_.start(parts_.slots[spill.buffer].gradient_out, storage::SubgroupIo::Op::kWriteGradient,
                 spill.subgroup, spill.bytes, ~0u);
  }
  void on_transfer(const Transfer& transfer) {
    const auto& spill = spills_[static_cast<size_t>(transfer.slot - parts_.slots.data())];
    if (transfer.io.status.ok()) {
      handler_.gradient_completed(spill.subgroup);
    } else {
      if (failure_.ok()) failure_ = transfer.io.status;
      handler_.stop();  // an update would wait for this gradient for ever
    }
    parts_.gradients->written(spill);
  }
  /// A gradient of the step is lost: it cannot be prepared. Ok again after forget_failure().
  const base::Status& failure() const { return failure_; }
  void forget_failure() { failure_ = base::Status(); }

 private:
  DeviceParts& parts_;
  TransferHandler& handler_;
  std::vector<GradientMemory::Spill> spills_;  // by slot
  base::Status failure_;
};

}  // namespace smartinf::csd
