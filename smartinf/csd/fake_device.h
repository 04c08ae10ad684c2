// A device in a few lines of memory, for tests: what the Device contract asks for and nothing more
// (no compressed gradients, no residual), with failures on request. State is f32 whatever the
// layout says. It carries commands out inside submit(), so every test over it is deterministic.
#pragma once

#include <algorithm>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "smartinf/base/aligned_buffer.h"
#include "smartinf/csd/device.h"
#include "smartinf/csd/element_ranges.h"
#include "smartinf/csd/fake_spool.h"
#include "smartinf/csd/messages/cache/fake_cache.h"
#include "smartinf/csd/snapshot.h"
#include "smartinf/kernels/update.h"
#include "smartinf/plan/parameter_space.h"

namespace smartinf::csd {

/// Contents that outlive the device: a drive that can be looked at and opened again.
struct FakeDrive {
  struct Planes {
    std::array<std::vector<float>, 3> values;
  };
  std::optional<storage::StoreLayout> layout;
  storage::StoreState state;
  std::vector<Planes> committed;  // by position in layout->subgroups
  std::vector<Planes> shadow;
  std::string client_metadata;
  std::string prepared_client_metadata;
  bool open = false;
  uint64_t capacity_bytes = ~uint64_t{0};
  double bandwidth = 1;
  bool refuse_to_create = false;
  uint64_t spool_bytes = 0;
  /// The next message of this type fails.
  std::optional<Message> fail_next;
  /// From the next message of this type on nothing is carried out or answered.
  std::optional<Message> silent_from;
  bool silent = false;
};

/// Contents of the drive when the snapshot was asked for. Its blocks are f32, so the layout's
/// format has to be.
class FakeSnapshot final : public Snapshot {
 public:
  FakeSnapshot(FakeDrive drive, std::string name)
      : drive_(std::move(drive)), name_(std::move(name)) {}

  const std::string& name() const override { return name_; }
  const storage::StoreState& state() const override { return drive_.state; }
  const storage::StoreLayout& layout() const override { return *drive_.layout; }
  base::Status choose_step(base::StepNumber step) override {
    if (step == drive_.state.committed_step) return base::Status();
    if (step != drive_.state.prepared_step) {
      return base::Status(base::ErrorCode::kInvalidArgument,
                          "a step that the device does not hold");
    }
    drive_.committed = drive_.shadow;
    drive_.client_metadata = drive_.prepared_client_metadata;
    return base::Status();
  }
  std::string client_metadata() const override { return drive_.client_metadata; }
  base::Status read_blocks(size_t subgroup, size_t plane, uint64_t first, uint64_t,
                           std::span<std::byte> out) override {
    const auto bytes = std::as_bytes(std::span(drive_.committed[subgroup].values[plane]));
    const auto blocks = bytes.subspan(first * base::kBlockElements * sizeof(float), out.size());
    std::copy(blocks.begin(), blocks.end(), out.begin());
    return base::Status();
  }
  uint64_t blocks_without_checksum() const override { return 0; }

 private:
  FakeDrive drive_;
  std::string name_;
};

class FakeDevice final : public Device {
 public:
  FakeDevice(std::shared_ptr<FakeDrive> drive, std::string name,
             std::vector<plan::GroupSpan> groups)
      : drive_(std::move(drive)), groups_(std::move(groups)) {
    info_.name = std::move(name);
    info_.kind = "fake";
    info_.spool_bytes = drive_->spool_bytes;
    beside_.push_back(std::make_unique<FakeSpool>(info_.spool_bytes));
    beside_.push_back(std::make_unique<FakeCache>());
    for (const auto& access : beside_) {
      access->host = &host_;
      access->store = &store_;
    }
    info_.weight_read_slots = 1;
    drive_->open = true;
    drive_->shadow.resize(drive_->committed.size());
    gradients_.resize(drive_->layout->subgroups.size());
    received_.resize(gradients_.size());
    if (!drive_->state.initialized) phase_ = Phase::kBegun;  // a new one stands in step 0
  }
  ~FakeDevice() override { drive_->open = false; }

  const DeviceInfo& info() const override { return info_; }
  const storage::StoreLayout& layout() const override { return *drive_->layout; }
  storage::StoreState state() const override { return drive_->state; }
  std::string client_metadata() const override { return drive_->client_metadata; }
  base::Status recover_to(base::StepNumber step) override {
    if (step == drive_->state.prepared_step && step != drive_->state.committed_step) commit();
    drive_->state.prepared_step = drive_->state.committed_step = step;
    return base::Status();
  }

  void submit(Command& command) override {
    const std::lock_guard lock(mutex_);  // gradients come from several threads
    drive_->silent = drive_->silent || is_of(drive_->silent_from, command);
    if (drive_->silent) return;
    const bool out_of_order = command.as<ReadWeights>() != nullptr ||
                              command.as<PutGradient>() != nullptr ||
                              command.as<Prefetch>() != nullptr;
    if (on_demand_ == nullptr || out_of_order) return serve(command);
    behind_.push_back(&command);
    if (command.as<Abort>() != nullptr) {
      end_on_demand(base::Status(base::ErrorCode::kCancelled, "the update was stopped"));
    } else if (command.as<FinishUpdate>() != nullptr) {
      update_demanded(true);
    }
  }

  base::TrafficReading host_traffic() const override { return host_.read(); }
  base::TrafficReading store_traffic() const override { return store_.read(); }
  uint64_t bytes_written_ever() const override { return 0; }
  base::Result<std::unique_ptr<Snapshot>> snapshot() override {
    return std::unique_ptr<Snapshot>(std::make_unique<FakeSnapshot>(*drive_, info_.name));
  }

 private:
  enum class Phase : uint8_t { kIdle, kBegun, kPrepared };

  base::Result<size_t> position(base::SubgroupId id) const {
    for (size_t i = 0; i < drive_->layout->subgroups.size(); ++i) {
      if (drive_->layout->subgroups[i].id == id) return i;
    }
    return base::Status(base::ErrorCode::kInvalidArgument, "a subgroup of another device");
  }
  static base::Status wrong_order(std::string what) {
    return base::Status(base::ErrorCode::kFailedPrecondition, std::move(what));
  }
  bool is_committed(base::StepNumber step) const {
    return drive_->state.complete && step == drive_->state.committed_step;
  }

  void commit() {
    drive_->committed = drive_->shadow;
    drive_->state.committed_step = drive_->state.prepared_step;
    drive_->state.initialized = drive_->state.complete = true;
    drive_->client_metadata = drive_->prepared_client_metadata;
  }

  static bool is_of(const std::optional<Message>& type, const Command& command) {
    return type && type->index() == command.message.index();
  }
  void serve(Command& command) {
    if (command.as<StopUpdate>() != nullptr || command.as<Update>() != nullptr ||
        command.as<Abort>() != nullptr) {
      end_update_as_completed();
    }
    base::Status status;
    if (is_of(drive_->fail_next, command)) {
      drive_->fail_next.reset();
      status = base::Status(base::ErrorCode::kIo, "asked to fail", "It is a test.");
    } else {
      status = carry_out(command);
    }
    if (&command == as_completed_) return;
    if (command.as<Update>() != nullptr && !status.ok()) end_waiting(status);
    if (command.as<ReadWeights>() != nullptr && status.ok()) return take_read(command);
    if (&command == on_demand_) return update_demanded(false);
    answer(command, std::move(status));
    if (as_completed_ != nullptr && command.as<PutGradient>() != nullptr) update_completed();
    if (phase_ == Phase::kIdle && !waiting_.empty()) {
      for (Command* read : std::exchange(waiting_, {})) take_read(*read);
    }
  }
  void answer(Command& command, base::Status status) {
    command.replies->push(
        {&command, Completion::Event::kDone, {}, std::move(status).with_context(info_.name)});
  }

  base::Status carry_out(Command& command) {
    if (const auto* begin = command.as<BeginStep>()) return begin_step(begin->step);
    if (const auto* put = command.as<PutGradient>()) return put_gradient(*put);
    if (const auto* update = command.as<Update>()) return update_all(command, *update);
    if (const auto* read = command.as<ReadState>()) return read_state(*read);
    if (const auto* read = command.as<ReadWeights>()) return check_read(*read);
    if (const auto* write = command.as<WriteState>()) return write_state(*write);
    for (const auto& access : beside_) {
      if (access->serves(command)) return access->carry_out(command);
    }
    if (const auto* prepare = command.as<Prepare>()) {
      if (phase_ != Phase::kBegun || prepare->step != step_) return wrong_order("it has not begun");
      drive_->state.prepared_step = prepare->step;
      drive_->prepared_client_metadata = prepare->client_metadata;
      phase_ = Phase::kPrepared;
    } else if (const auto* decided = command.as<Commit>()) {
      if (phase_ == Phase::kPrepared && decided->step == step_) {
        commit();
        phase_ = Phase::kIdle;
      } else if (!is_committed(decided->step)) {
        return wrong_order("it is not prepared");
      }
    } else if (const auto* abort = command.as<Abort>()) {
      if (is_committed(abort->step)) return wrong_order("it is committed");
      if (phase_ == Phase::kIdle) return base::Status();
      if (abort->step != step_) return wrong_order("another one is in progress");
      drive_->state.prepared_step = drive_->state.committed_step;
      phase_ = Phase::kIdle;
      end_waiting(base::Status(base::ErrorCode::kCancelled, "the step was aborted"));
    } else if (command.as<Flush>() == nullptr && command.as<StopUpdate>() == nullptr &&
               command.as<Prefetch>() == nullptr && command.as<FinishUpdate>() == nullptr) {
      return base::Status(base::ErrorCode::kUnsupported, "a fake device takes whole gradients");
    }
    return base::Status();
  }

  base::Status begin_step(base::StepNumber step) {
    if (phase_ == Phase::kBegun && step == 0 && step_ == 0) return base::Status();
    if (phase_ != Phase::kIdle || step != drive_->state.committed_step + 1) {
      return wrong_order("another step is in progress, or was before it");
    }
    step_ = step;
    phase_ = Phase::kBegun;
    drive_->shadow = drive_->committed;
    updated_.assign(received_.size(), false);
    for (ElementRanges& received : received_) received.clear();
    return base::Status();
  }

  base::Status put_gradient(const PutGradient& put) {
    SI_ASSIGN_OR_RETURN(const size_t at, position(put.subgroup));
    const uint64_t all = drive_->layout->subgroups[at].count;
    if (put.first > all || put.count > all - put.first ||
        !received_[at].add(put.first, put.count)) {
      return base::Status(base::ErrorCode::kInvalidArgument,
                          "elements that the gradient has not, or that were put before");
    }
    const size_t bytes = base::data_type_bytes(put.type);
    gradients_[at].resize(all * bytes);
    std::copy_n(static_cast<const std::byte*>(put.gradient), put.count * bytes,
                gradients_[at].begin() + static_cast<ptrdiff_t>(put.first * bytes));
    type_ = put.type;
    host_.add_down(base::TrafficKind::kGradient, put.count * bytes);
    return base::Status();
  }

  base::Status update_all(Command& command, const Update& update) {
    if (phase_ != Phase::kBegun) return wrong_order("state can be written only in a step");
    updated_.resize(received_.size());
    if (update.mode == plan::UpdateMode::kAsCompleted) {
      as_completed_ = &command;
      return base::Status();
    }
    for (const SubgroupUpdate& entry : update.updates) {
      SI_ASSIGN_OR_RETURN(const size_t at, position(entry.subgroup));
      if (!received_[at].covers(drive_->layout->subgroups[at].count)) {
        return wrong_order("the gradient is not complete");
      }
    }
    for (const SubgroupUpdate& entry : update.updates) {
      if (update.mode != plan::UpdateMode::kRest) updated_[*position(entry.subgroup)] = false;
    }
    if (update.mode == plan::UpdateMode::kOnDemand) {
      on_demand_ = &command;
    } else {
      for (const SubgroupUpdate& entry : update.updates) update_and_send(command, entry);
    }
    return base::Status();
  }

  /// Unless the update keeps what was updated.
  void update_and_send(Command& command, SubgroupUpdate entry) {
    const auto& update = *command.as<Update>();
    const size_t at = *position(entry.subgroup);
    if (updated_[at]) return;
    Command* served = nullptr;
    for (Command* read : waiting_) {
      const auto& wanted = *read->as<ReadWeights>();
      const bool same = wanted.subgroup == entry.subgroup && wanted.type == update.weights_type;
      if (same && entry.weights_out == nullptr) served = read;
    }
    if (served != nullptr) {
      std::erase(waiting_, served);
      entry.weights_out = served->as<ReadWeights>()->weights_out;
    }
    update_subgroup(update, entry, at);
    command.replies->push({&command, Completion::Event::kWeightsReady, entry.subgroup, {}});
    if (served != nullptr) answer(*served, {});
  }
  void update_demanded(bool all) {
    const auto& update = *on_demand_->as<Update>();
    for (const SubgroupUpdate& entry : update.updates) {
      if (all || entry.weights_out != nullptr) update_and_send(*on_demand_, entry);
    }
    for (const Command* read : std::vector<Command*>(waiting_)) {
      for (const SubgroupUpdate& entry : update.updates) {
        const auto& wanted = *read->as<ReadWeights>();
        if (entry.subgroup == wanted.subgroup && wanted.type == update.weights_type) {
          update_and_send(*on_demand_, entry);
          break;
        }
      }
    }
    const bool done = std::ranges::all_of(update.updates, [&](const SubgroupUpdate& entry) {
      return updated_[*position(entry.subgroup)];
    });
    if (done) end_on_demand({});
  }
  void end_on_demand(base::Status status) {
    Command& done = *std::exchange(on_demand_, nullptr);
    if (!status.ok()) end_waiting(status);
    answer(done, std::move(status));
    while (on_demand_ == nullptr && !behind_.empty()) {
      Command& next = *behind_.front();
      behind_.pop_front();
      serve(next);
    }
  }

  base::Status check_read(const ReadWeights& read) const {
    SI_RETURN_IF_ERROR(position(read.subgroup).status());
    if (!drive_->state.complete) return wrong_order("there are no committed weights to read");
    if (read.step == drive_->state.committed_step) return base::Status();
    if (phase_ == Phase::kIdle || read.step != step_) return wrong_order("weights of another step");
    for (const Command* other : waiting_) {
      if (other->as<ReadWeights>()->subgroup == read.subgroup) {
        return wrong_order("these weights are waited for already");
      }
    }
    return base::Status();
  }
  void take_read(Command& command) {
    const auto& read = *command.as<ReadWeights>();
    if (read.step != drive_->state.committed_step) {
      waiting_.push_back(&command);
      if (on_demand_ != nullptr) update_demanded(false);
      return;
    }
    const std::vector<float>& master = drive_->committed[*position(read.subgroup)].values[0];
    kernels::kernels().cast_from_f32(master.data(), read.weights_out, read.type, master.size());
    store_.add_up(base::TrafficKind::kState, master.size() * sizeof(float));
    host_.add_up(base::TrafficKind::kWeight, master.size() * base::data_type_bytes(read.type));
    answer(command, {});
  }
  void end_waiting(const base::Status& status) {
    for (Command* read : std::exchange(waiting_, {})) answer(*read, status);
  }

  void update_completed() {
    const auto& update = *as_completed_->as<Update>();
    for (const SubgroupUpdate& entry : update.updates) {
      const size_t at = *position(entry.subgroup);
      if (updated_[at] || !received_[at].covers(drive_->layout->subgroups[at].count)) continue;
      update_subgroup(update, entry, at);
      as_completed_->replies->push(
          {as_completed_, Completion::Event::kWeightsReady, entry.subgroup, {}});
    }
  }
  void end_update_as_completed() {
    if (as_completed_ == nullptr) return;
    Command& done = *std::exchange(as_completed_, nullptr);
    done.replies->push({&done, Completion::Event::kDone, {}, {}});
  }

  base::Status read_state(const ReadState& read) {
    if (!drive_->state.initialized) return wrong_order("there is no committed state to read");
    SI_ASSIGN_OR_RETURN(const size_t at, position(read.subgroup));
    for (size_t p = 0; p < 3; ++p) {
      if (read.planes[p] == nullptr) continue;
      const std::vector<float>& plane = drive_->committed[at].values[p];
      std::copy_n(plane.begin() + static_cast<ptrdiff_t>(read.first), read.count, read.planes[p]);
    }
    return base::Status();
  }

  base::Status write_state(const WriteState& write) {
    if (phase_ != Phase::kBegun) return wrong_order("state can be written only in a step");
    SI_ASSIGN_OR_RETURN(const size_t at, position(write.subgroup));
    for (size_t p = 0; p < 3; ++p) {
      if ((write.plane_mask >> p & 1u) == 0) continue;
      std::vector<float>& plane = drive_->shadow[at].values[p];
      plane.assign(write.count, 0.0f);
      if (write.planes[p] != nullptr) std::copy_n(write.planes[p], write.count, plane.begin());
    }
    return base::Status();
  }

  void update_subgroup(const Update& step, const SubgroupUpdate& update, size_t at) {
    const storage::StoredSubgroup& subgroup = drive_->layout->subgroups[at];
    drive_->shadow[at] = drive_->committed[at];
    updated_[at] = true;
    const uint64_t state_bytes = subgroup.count * drive_->layout->planes.size() * sizeof(float);
    store_.add_up(base::TrafficKind::kState, state_bytes);
    store_.add_down(base::TrafficKind::kState, state_bytes);
    for (uint64_t first = 0; first < subgroup.count; first += base::kBlockElements) {
      kernels::UpdateBlock block;
      block.count = std::min(base::kBlockElements, subgroup.count - first);
      block.element = subgroup.first_element + first;
      for (size_t p = 0; p < drive_->layout->planes.size(); ++p) {
        block.planes[p] = reinterpret_cast<std::byte*>(drive_->shadow[at].values[p].data() + first);
      }
      block.gradient_type = type_;
      block.gradient = gradients_[at].data() + first * base::data_type_bytes(type_);
      block.weights_type = step.weights_type;
      const uint64_t weight_bytes = base::data_type_bytes(step.weights_type);
      if (update.weights_out != nullptr) {
        block.weights_out = static_cast<std::byte*>(update.weights_out) + first * weight_bytes;
        host_.add_up(base::TrafficKind::kWeight, block.count * weight_bytes);
      }
      std::vector<kernels::ScalarsSpan> runs;
      for (const plan::GroupSpan& span : groups_) {
        const uint64_t from = std::max(span.first, block.element);
        const uint64_t to = std::min(span.first + span.count, block.element + block.count);
        if (from < to) runs.push_back({to - from, &step.scalars[span.group]});
      }
      kernels::kernels().update_block(base::StateFormat::kF32, block, runs);
    }
  }

  std::shared_ptr<FakeDrive> drive_;
  std::vector<plan::GroupSpan> groups_;
  DeviceInfo info_;
  std::vector<std::vector<std::byte>> gradients_;
  base::DataType type_ = base::DataType::kBf16;
  std::vector<ElementRanges> received_;  // of each gradient
  std::vector<bool> updated_;            // in this step
  std::vector<Command*> waiting_;        // ReadWeights of the step in progress
  Command* on_demand_ = nullptr;         // an update that waits for them
  std::deque<Command*> behind_;          // ... and what waits for it
  Command* as_completed_ = nullptr;  // an update of subgroups as their gradients become complete
  Phase phase_ = Phase::kIdle;
  base::StepNumber step_ = 0;  // in progress, unless idle
  std::vector<std::unique_ptr<FakeAccess>> beside_;
  base::TrafficCounter host_;
  base::TrafficCounter store_;
  std::mutex mutex_;
};

}  // namespace smartinf::csd
