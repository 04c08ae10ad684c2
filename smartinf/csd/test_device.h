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
  base::Status run(Message message) {
    Command command{std::move(message)};
    return run(command);
  }
  base::Status prepare(uint64_t step) {
    return run(Prepare{step, "client metadata of step " + std::to_string(step)});
  }

  /// Step 0: the reference's master weights, everything else 0, prepared and committed.
  base::Status make_start(const storage::StoreLayout& layout) {
    SI_RETURN_IF_ERROR(run(BeginStep{0}));
    for (const storage::StoredSubgroup& subgroup : layout.subgroups) {
      std::vector<float> master = ReferenceModel::master_at_start(subgroup);
      SI_RETURN_IF_ERROR(run(WriteState{subgroup.id, subgroup.count, {master.data()}}));
    }
    return finish_step(0);
  }
  base::Status finish_step(uint64_t step) {
    SI_RETURN_IF_ERROR(prepare(step));
    return run(Commit{step});
  }

  /// Elements [first, first + count) of a subgroup's gradient. `gradient` is the whole one.
  base::Status put(const storage::StoredSubgroup& subgroup, const std::vector<std::byte>& gradient,
                   base::DataType type, uint64_t first, uint64_t count) {
    return run(PutGradient{subgroup.id, first, count, type,
                           gradient.data() + first * base::data_type_bytes(type)});
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
    Update update;
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
