// Speaks to a device as an engine does, a command at a time. For tests.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "smartinf/csd/device.h"
#include "smartinf/csd/test_model.h"
#include "smartinf/plan/state_cache.h"

namespace smartinf::csd {

class DeviceDriver {
 public:
  /// The device outlives its use here; another one may follow it.
  void drive(Device& device) { device_ = &device; }

  /// Submits and waits for the end.
  base::Status run(Command& command) {
    start(command);
    return wait_for(command);
  }
  void start(Command& command) {
    command.replies = &queue;
    device_->submit(command);
  }
  base::Status wait_for(Command& command) {
    Completion completion;
    while (queue.pop(completion, std::chrono::seconds(100))) {
      if (completion.event == Completion::Event::kWeightsReady) {
        ready.push_back(completion.subgroup);
        continue;
      }
      if (completion.command == &command) return completion.status;
      return base::Status(base::ErrorCode::kFailedPrecondition, "completion of another command");
    }
    return base::Status(base::ErrorCode::kTimeout, "no completion");
  }
  base::Status run(CommandKind kind, uint64_t step) {
    Command command;
    command.kind = kind;
    command.step = step;
    command.blob = "blob of step " + std::to_string(step);
    return run(command);
  }

  /// Step 0: the reference's master weights, everything else 0, prepared and committed.
  base::Status make_start(const storage::StoreLayout& layout) {
    SI_RETURN_IF_ERROR(run(CommandKind::kBeginStep, 0));
    for (const storage::StoredSubgroup& subgroup : layout.subgroups) {
      std::vector<float> master = ReferenceModel::master_at_start(subgroup);
      Command write;
      write.kind = CommandKind::kWriteState;
      write.subgroup = subgroup.id;
      write.count = subgroup.count;
      write.planes[0] = master.data();
      SI_RETURN_IF_ERROR(run(write));
    }
    return finish_step(0);
  }
  base::Status finish_step(uint64_t step) {
    SI_RETURN_IF_ERROR(run(CommandKind::kPrepare, step));
    return run(CommandKind::kCommit, step);
  }

  /// Elements [first, first + count) of a subgroup's gradient. `gradient` is the whole one.
  base::Status put(const storage::StoredSubgroup& subgroup, const std::vector<std::byte>& gradient,
                   base::DataType type, uint64_t first, uint64_t count) {
    Command put;
    put.kind = CommandKind::kPutGradient;
    put.subgroup = subgroup.id;
    put.first = first;
    put.count = count;
    put.type = type;
    put.gradient = gradient.data() + first * base::data_type_bytes(type);
    return run(put);
  }
  /// test_gradient() of every subgroup, bf16.
  base::Status put_all(const storage::StoreLayout& layout, uint64_t step) {
    for (const storage::StoredSubgroup& subgroup : layout.subgroups) {
      const auto gradient = test_gradient(subgroup, step, base::DataType::kBf16);
      SI_RETURN_IF_ERROR(put(subgroup, gradient, base::DataType::kBf16, 0, subgroup.count));
    }
    return base::Status();
  }
  /// Updates every subgroup; new weights are not wanted.
  base::Status update(const storage::StoreLayout& layout, uint64_t step) {
    Command update;
    update.kind = CommandKind::kUpdate;
    update.step = step;
    update.scalars = test_scalars(step);
    for (const storage::StoredSubgroup& subgroup : layout.subgroups) {
      update.updates.push_back({subgroup.id, nullptr});
    }
    return run(update);
  }

  /// So many subgroups of the device, spread evenly.
  base::Status cache_state(const storage::StoreLayout& layout, uint64_t cached) {
    std::vector<base::SubgroupId> ids;
    for (size_t i = 0; i < layout.subgroups.size(); ++i) {
      if (plan::stays_in_memory(i, cached, layout.subgroups.size())) {
        ids.push_back(layout.subgroups[i].id);
      }
    }
    return device_->cache_state(ids);
  }

  std::vector<base::SubgroupId> ready;  // whose weights came, in order
  CompletionQueue queue;

 private:
  Device* device_ = nullptr;
};

}  // namespace smartinf::csd
