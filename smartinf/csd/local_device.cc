#include <algorithm>
#include <deque>
#include <string>
#include <thread>
#include <utility>

#include <pthread.h>

#include "smartinf/base/clock.h"
#include "smartinf/base/log.h"
#include "smartinf/csd/beside_access.h"
#include "smartinf/csd/cpu_processor.h"
#include "smartinf/csd/device_over_store.h"
#include "smartinf/csd/device_parts.h"
#include "smartinf/csd/device_step.h"
#include "smartinf/csd/event_queue.h"
#include "smartinf/csd/gradient_spill.h"
#include "smartinf/csd/state_access.h"
#include "smartinf/csd/state_prefetch.h"
#include "smartinf/csd/store_snapshot.h"
#include "smartinf/csd/transfer_handler.h"
#include "smartinf/csd/weights_reader.h"
#include "smartinf/storage/leak_in_flight.h"
#include "smartinf/storage/row_commit.h"

namespace smartinf::csd {
namespace {

using base::ErrorCode;
using base::Result;
using base::Status;
using Op = storage::SubgroupIo::Op;

// How long the I/O thread sleeps in the store before it looks at its event queue again. A finished
// block of work waits for half of it on average; there are more slots than it takes to bridge that.
constexpr auto kPollWaitMax = std::chrono::microseconds(1000);
// Without anything in flight it is woken by its event queue; this is only an upper bound.
constexpr auto kIdleWait = std::chrono::hours(1);
constexpr size_t kPollBatch = 64;

Status device_closes() { return Status(ErrorCode::kCancelled, "the device is closing"); }

class LocalDevice final : public Device {
 public:
  LocalDevice(LocalDeviceOptions options, std::string kind) {
    info_.kind = std::move(kind);
    info_.name = parts_.name = options.device_name();
    parts_.options = std::move(options);
  }
  Status open(std::unique_ptr<storage::Store> store, StoreOrigin origin);
  ~LocalDevice() override;

  const DeviceInfo& info() const override { return info_; }
  const storage::StoreLayout& layout() const override { return store_->layout(); }
  storage::StoreState state() const override {
    const std::lock_guard lock(state_mutex_);
    return state_;
  }
  std::string client_metadata() const override {
    const std::lock_guard lock(state_mutex_);
    return client_metadata_;
  }
  Status recover_to(base::StepNumber step) override;
  Status cache_state(std::span<const base::SubgroupId> subgroups) override;
  void submit(Command& command) override;
  base::TrafficReading host_traffic() const override {
    return parts_.options.host_link_place == HostLinkPlace::kAtStore ? store_traffic()
                                                                     : parts_.host_traffic.read();
  }
  base::TrafficReading store_traffic() const override {
    base::TrafficReading all = store_->traffic();
    for (const auto& access : beside_) all += access->traffic();
    return all;
  }
  uint64_t bytes_written_ever() const override { return store_->bytes_written_ever(); }
  uint64_t state_bytes_cached() const override { return parts_.cache.hit_bytes(); }
  Result<std::unique_ptr<Snapshot>> snapshot() override {
    auto reader = store_->read_committed();
    if (!reader.ok()) return std::move(reader).status();
    return make_snapshot(std::move(*reader), info_.name,
                         [this](const storage::RunId& run,
                                const std::string& record) -> Result<std::unique_ptr<RowSnapshot>> {
                           for (const auto& access : beside_) {
                             if (auto rows = access->rows_snapshot()) return rows;
                           }
                           return open_stored_tables(parts_.options.path, run, record);
                         });
  }
  std::span<std::byte> scratch_memory() override { return slots_.scratch; }

 private:
  void remember_state();
  template <typename Put>
  void put_gradient(Command& command, const Put& put);

  // On the I/O thread: one loop, in which everything that happens is an event.
  void run();
  void read_events(std::chrono::nanoseconds wait);
  void poll_store(std::chrono::nanoseconds wait);
  void on_event(Command* command);
  void on_event(const GradientTaken& taken);
  void on_event(Job* job);
  void on_transfer(Transfer& transfer);
  void on_time();
  Status refusal() const;
  void serve_commands();
  bool try_serve(Command& command);
  void apply_hint(const Command& behind);
  void read_weights(Command& command);
  void serve_step(Command& command);
  const Status& step_failure() const;
  Status prepare(const Prepare& message);
  Status commit(base::StepNumber step);
  Status abort(base::StepNumber step);
  bool flush_before_closing();
  void give_up(Status status);
  bool nothing_in_flight() const;
  std::chrono::nanoseconds until_due() const;

  DeviceInfo info_;
  DeviceParts parts_;
  // In the order of construction: a store goes before the memory that its transfers use, the
  // processor before what its work touches.
  DeviceSlots slots_;
  std::unique_ptr<GradientMemory> gradients_;
  std::unique_ptr<storage::Store> store_;
  DeviceStep step_{parts_};
  WeightsReader weights_{parts_, step_};
  TransferHandler handler_{parts_, weights_};
  GradientSpill spill_{parts_, handler_};
  StateAccess state_access_{parts_};
  StateFlush flush_{parts_};
  StatePrefetch prefetch_{parts_};
  std::vector<std::unique_ptr<BesideAccess>> beside_ = make_beside_accesses(parts_);
  EventQueue event_queue_;

  mutable std::mutex state_mutex_;
  storage::StoreState state_;
  std::string client_metadata_;

  bool recovered_ = false;  // before the first command, so no lock

  // The I/O thread's own.
  bool closing_ = false;
  bool closing_flush_ = false;     // started
  Status broken_;                  // the store cannot go on
  std::deque<Command*> commands_;  // not yet begun
  // Gradients on the host link; one direction: due in order.
  std::deque<GradientTaken> in_transit_;
  std::vector<Event> events_;
  std::vector<storage::SubgroupIo*> polled_ = std::vector<storage::SubgroupIo*>(kPollBatch);

  std::unique_ptr<Processor> processor_;
  std::jthread thread_;
};

Status LocalDevice::open(std::unique_ptr<storage::Store> store, StoreOrigin origin) {
  store_ = std::move(store);
  if (origin == StoreOrigin::kCreated) {  // a new store stands in step 0
    step_.begin_new_store();
    recovered_ = true;
  }
  parts_.store = store_.get();
  const LocalDeviceOptions& options = parts_.options;
  const storage::StoreLayout& layout = store_->layout();
  for (uint32_t i = 0; i < layout.subgroups.size(); ++i) {
    parts_.index_of[layout.subgroups[i].id] = i;
  }
  SI_ASSIGN_OR_RETURN(gradients_,
                      GradientMemory::create(layout, options.gradient_type,
                                             options.gradient_budget_bytes, options.store.checksums,
                                             options.compressed_block_bytes, options.matrices));
  parts_.gradients = gradients_.get();
  const auto on_finished = [this](Job& job) { event_queue_.post(&job); };
  if (options.make_processor) {
    SI_ASSIGN_OR_RETURN(processor_, options.make_processor(on_finished));
  } else {
    const CpuProcessorOptions cpu{parts_.name, options.threads, options.cores, options.trace};
    processor_ = std::make_unique<CpuProcessor>(cpu, on_finished);
  }
  parts_.processor = processor_.get();
  SI_RETURN_IF_ERROR(allocate_slots(parts_, slots_));
  weights_.set_slots(slots_.weights);
  parts_.add_tracks();
  const bool linked = !options.links.store.empty() || options.links.host != nullptr;
  if (linked && info_.kind == "local") info_.kind = "emulated local";
  if (options.make_processor) info_.kind += " OpenCL";
  info_.ring = std::string(store_->ring_name());
  info_.slots = static_cast<uint32_t>(slots_.slots.size());
  info_.weight_read_slots = options.weight_read_slots;
  info_.memory_bytes = slots_.memory->bytes().size();
  info_.gradient_memory_bytes = gradients_->memory_bytes();
  info_.gradients_spilled = gradients_->buffer_bytes() > 0;
  info_.updates_as_completed = parts_.updates_as_completed();
  info_.threads = processor_->threads();
  info_.spool_bytes = store_->spool_bytes();
  info_.cache_memory_bytes = options.cache_memory_bytes;
  info_.row_memory_bytes = options.row_memory_bytes;
  remember_state();
  thread_ = std::jthread([this] { run(); });
  pthread_setname_np(thread_.native_handle(), "si-device");
  return Status();
}

LocalDevice::~LocalDevice() {
  event_queue_.close();
  if (thread_.joinable()) thread_.join();
  // Ends its threads, which post to the event queue.
  processor_.reset();
  if (store_ == nullptr) return;
  if (const Status closed = store_->close(); !closed.ok()) {
    base::log(
        base::LogLevel::kWarning,
        Status(closed).with_context(parts_.name + " is closed without an answer").to_string());
    storage::leak_in_flight(std::move(store_));
    storage::leak_in_flight(std::move(slots_.memory));
    storage::leak_in_flight(parts_.cache.take_memory());
  }
}

void LocalDevice::remember_state() {
  const std::lock_guard lock(state_mutex_);
  state_ = store_->state();
  client_metadata_ = storage::split_row_commit(store_->client_metadata()).client_metadata;
}

Status LocalDevice::recover_to(base::StepNumber step) {
  Status status = store_->recover_to(step);
  recovered_ = status.ok();
  remember_state();
  return std::move(status).with_context(parts_.name);
}

Status LocalDevice::cache_state(std::span<const base::SubgroupId> subgroups) {
  std::vector<uint32_t> indices;
  for (const base::SubgroupId id : subgroups) indices.push_back(parts_.index_of.at(id));
  SI_RETURN_IF_ERROR(parts_.cache.allocate(*store_, indices).with_context(parts_.name));
  info_.state_cache_bytes = parts_.cache.memory_bytes();
  info_.cached_subgroups = parts_.cache.subgroups();
  return Status();
}

void LocalDevice::submit(Command& command) {
  if (const auto* put = command.as<PutGradient>()) return put_gradient(command, *put);
  if (const auto* put = command.as<PutCompressedGradient>()) return put_gradient(command, *put);
  // Here and not when the command is served: gradients may follow at once.
  if (command.as<BeginStep>() != nullptr) {
    if (Status status = gradients_->begin_step(); !status.ok()) {
      return parts_.complete(command, std::move(status));
    }
  }
  if (const auto* update = command.as<Update>();
      update != nullptr && update->mode == plan::UpdateMode::kAsCompleted) {
    gradients_->reserve_buffers(static_cast<uint32_t>(parts_.slots_as_completed().size()));
  }
  event_queue_.post(&command);
}

template <typename Put>
void LocalDevice::put_gradient(Command& command, const Put& put) {
  const Result<uint32_t> found = parts_.find(put.subgroup);
  if (!found.ok()) return parts_.complete(command, found.status());
  const uint64_t begin_ns = base::now_ns();
  GradientTaken event;
  uint64_t bytes = 0;
  if constexpr (std::is_same_v<Put, PutCompressedGradient>) {
    bytes = put.message.size();
    Status taken = gradients_->put_compressed(*found, put.subgroup, put.message);
    if (!taken.ok()) return parts_.complete(command, std::move(taken));
    event.completed = *found;
  } else {
    bytes = put.count * base::data_type_bytes(put.type);
    Result<GradientMemory::Put> taken = gradients_->put(
        *found, put.first, put.count, put.type, put.gradient, parts_.options.store.watchdog);
    if (!taken.ok()) return parts_.complete(command, std::move(taken).status());
    event.spill = taken->spill;
    if (taken->completed && !taken->spill.has_value()) event.completed = *found;
  }
  if (parts_.options.host_link_place == HostLinkPlace::kAtProcessor) {
    parts_.host_traffic.add_down(base::TrafficKind::kGradient, bytes);
    parts_.record_host(LinkDirection::kDown, base::TrafficKind::kGradient, put.subgroup, begin_ns,
                       bytes);
    if (Link* link = parts_.options.links.host.get(); link != nullptr) {
      event.due_ns = link->book(LinkDirection::kDown, base::TrafficKind::kGradient, bytes);
      event.command = &command;
    }
  }
  const bool done = event.command == nullptr;
  if (event.spill.has_value() || event.completed.has_value() || !done) {
    event_queue_.post(std::move(event));
  }
  if (done) parts_.complete(command, Status());
}

void LocalDevice::run() {
  // Sleeps in the event queue only when the store has nothing to do and what it last did is acted
  // upon.
  bool polled = false;
  while (true) {
    read_events(polled ? std::chrono::nanoseconds(0) : until_due());
    on_time();
    serve_commands();
    const bool done = closing_ && nothing_in_flight() && weights_.answered_all() &&
                      std::ranges::all_of(beside_, &BesideAccess::idle);
    if (done && !flush_before_closing()) return;
    polled = parts_.transfers_in_flight > 0 || std::ranges::any_of(beside_, &BesideAccess::moving);
    if (polled) poll_store(std::min<std::chrono::nanoseconds>(kPollWaitMax, until_due()));
  }
}

std::chrono::nanoseconds LocalDevice::until_due() const {
  uint64_t due = std::min(handler_.next_due_ns(), weights_.next_due_ns());
  for (const auto& access : beside_) due = std::min(due, access->next_due_ns());
  if (!in_transit_.empty()) due = std::min(due, in_transit_.front().due_ns);
  if (due == ~uint64_t{0}) return kIdleWait;
  const uint64_t now = base::now_ns();
  return std::chrono::nanoseconds(due > now ? due - now : 0);
}

/// But for reads of weights, for which only a commit waits.
bool LocalDevice::nothing_in_flight() const {
  return parts_.transfers_in_flight == weights_.transfers_in_flight() && in_transit_.empty() &&
         !handler_.running() && state_access_.idle() && !flush_.running();
}

void LocalDevice::read_events(std::chrono::nanoseconds wait) {
  const bool closed = event_queue_.take(events_, wait);
  for (const Event& event : events_) {
    std::visit([this](const auto& what) { on_event(what); }, event);
  }
  if (closed && !closing_) {
    closing_ = true;
    weights_.cancel(device_closes());
    handler_.cancel();
    prefetch_.stop();
  }
}

/// Carries out what cannot wait for its turn; the rest when the command is served.
void LocalDevice::on_event(Command* command) {
  for (const auto& access : beside_) {
    if (access->serves(*command)) return access->serve(*command, refusal());
  }
  if (command->as<ReadWeights>() != nullptr) return read_weights(*command);
  prefetch_.stop();
  // A step that is to be forgotten need not be finished.
  if (command->as<Abort>() != nullptr) handler_.cancel();
  if (const auto* begin = command->as<BeginStep>()) {
    handler_.begin_step();
    weights_.begin_step(begin->step);
  }
  apply_hint(*command);
  commands_.push_back(command);
}

/// A command behind an update can say that it waits for nothing more.
void LocalDevice::apply_hint(const Command& behind) {
  if (behind.as<FinishUpdate>() != nullptr) return handler_.finish_update();
  if (behind.as<StopUpdate>() != nullptr) return handler_.stop();
  const auto* update = behind.as<Update>();
  if (update == nullptr) return;
  // Without every gradient one as gradients become complete would not come to its end.
  const auto complete = [this](const SubgroupUpdate& entry) {
    const Result<uint32_t> found = parts_.find(entry.subgroup);
    return found.ok() && gradients_->complete(*found);
  };
  const bool goes_on =
      update->mode == plan::UpdateMode::kRest && std::ranges::all_of(update->updates, complete);
  if (!goes_on) handler_.stop();
}

void LocalDevice::read_weights(Command& command) {
  if (Status refused = refusal(); !refused.ok()) {
    return parts_.complete(command, std::move(refused));
  }
  const auto* commit = commands_.empty() ? nullptr : commands_.front()->as<Commit>();
  const bool committing = commit != nullptr && commit->step > store_->state().committed_step;
  weights_.take(command, step_failure(), committing);
  handler_.weights_asked_or_read();
}

void LocalDevice::on_event(const GradientTaken& taken) {
  if (taken.spill.has_value()) {
    broken_.ok() ? spill_.start(*taken.spill) : gradients_->written(*taken.spill);
  }
  if (taken.command != nullptr) {
    in_transit_.push_back(taken);
  } else if (taken.completed.has_value()) {
    handler_.gradient_completed(*taken.completed);
  }
}

void LocalDevice::on_event(Job* job) {
  if (job->slot->state == SlotState::kUpdating) return handler_.on_job(*job);
  if (job->slot->state != SlotState::kCasting) return state_access_.on_job(*job);
  weights_.on_job(*job);
  handler_.weights_asked_or_read();
}

void LocalDevice::on_transfer(Transfer& transfer) {
  parts_.finished(transfer);
  Slot& slot = *transfer.slot;
  if (&transfer == &slot.gradient_out) return spill_.on_transfer(transfer);
  switch (slot.state) {
    case SlotState::kUpdating:
      return handler_.on_transfer(transfer);
    case SlotState::kReading:
    case SlotState::kWriting:
      return state_access_.on_transfer(transfer);
    case SlotState::kFlushing:
      return flush_.on_transfer(transfer);
    case SlotState::kPrefetching:
      return prefetch_.on_transfer(transfer);
    case SlotState::kReadingWeights:
      weights_.on_transfer(transfer);
      return handler_.weights_asked_or_read();
    case SlotState::kFree:
    case SlotState::kDecoding:
    case SlotState::kEncoding:
    case SlotState::kCasting:
      SI_CHECK(false, "a transfer of a slot that had none");
  }
}

void LocalDevice::on_time() {
  const uint64_t now = base::now_ns();
  while (!in_transit_.empty() && in_transit_.front().due_ns <= now) {
    const GradientTaken event = in_transit_.front();
    in_transit_.pop_front();
    if (event.completed.has_value()) handler_.gradient_completed(*event.completed);
    parts_.complete(*event.command, Status());
  }
  handler_.on_time(now);
  for (const auto& access : beside_) access->on_time(now);
  weights_.on_time(now);
}

void LocalDevice::poll_store(std::chrono::nanoseconds wait) {
  const Result<size_t> count = store_->poll(polled_, wait);
  if (!count.ok()) return give_up(count.status());
  for (size_t i = 0; i < *count; ++i) {
    storage::SubgroupIo& io = *polled_[i];
    if (std::ranges::any_of(beside_, [&](const auto& access) { return access->took(io); }))
      continue;
    on_transfer(*static_cast<Transfer*>(io.owner));
  }
}

/// Why no command is carried out; ok: they are.
Status LocalDevice::refusal() const {
  if (closing_) return device_closes();
  if (!broken_.ok()) return broken_;
  return recovered_ ? Status() : out_of_order("the device has not been recovered");
}

void LocalDevice::serve_commands() {
  while (!commands_.empty()) {
    Command& command = *commands_.front();
    if (Status refused = refusal(); !refused.ok()) {
      parts_.complete(command, std::move(refused));
    } else if (!try_serve(command)) {
      return;
    }
    commands_.pop_front();
  }
}

/// False when the command must wait for what is in flight.
bool LocalDevice::try_serve(Command& command) {
  if (handler_.running() || flush_.running()) return false;
  const auto* write = command.as<WriteState>();
  const bool updates = command.as<Update>() != nullptr;
  const auto* prefetch = command.as<Prefetch>();
  if (Status status = step_.check(command); !status.ok()) {
    parts_.complete(command, std::move(status));
    return true;
  }
  if (prefetch != nullptr) {
    parts_.complete(command, prefetch_.start(prefetch->subgroups));
    return true;
  }
  if (write != nullptr) {
    const Result<uint32_t> subgroup = parts_.find(write->subgroup);
    if (subgroup.ok() && weights_.holds_back(*subgroup)) return false;
    if (!state_access_.try_start(command)) return false;
    if (subgroup.ok()) weights_.begin_change(*subgroup);
    return true;
  }
  if (command.as<ReadState>() != nullptr) return state_access_.try_start(command);
  if (command.as<StopUpdate>() != nullptr || command.as<FinishUpdate>() != nullptr) {
    // The update has ended, or none ran.
    parts_.complete(command, Status());
    return true;
  }
  if (!nothing_in_flight()) return false;
  if (command.as<Commit>() != nullptr && !weights_.idle()) return false;
  if (updates) {
    // A command that ends an update may have come while this one waited here.
    if (!spill_.failure().ok()) {
      weights_.fail_waiting(spill_.failure());
      parts_.complete(command, spill_.failure());
    } else if (std::any_of(commands_.begin() + 1, commands_.end(),
                           [](const Command* behind) { return behind->as<Abort>() != nullptr; })) {
      parts_.complete(command, Status(ErrorCode::kCancelled, "the update was stopped"));
    } else {
      handler_.start(command);
      for (size_t behind = 1; behind < commands_.size(); ++behind) apply_hint(*commands_[behind]);
    }
  } else if (command.as<Flush>() != nullptr) {
    if (!step_.lost().ok()) {
      parts_.complete(command, step_.lost());
    } else if (!step_.between_steps()) {
      parts_.complete(command, out_of_order("the state is flushed between steps, and step " +
                                            std::to_string(step_.number()) + " is in progress"));
    } else {
      flush_.start(&command);
    }
  } else {
    serve_step(command);
  }
  return true;
}

/// Begins or ends a step at once.
void LocalDevice::serve_step(Command& command) {
  if (const auto* begin = command.as<BeginStep>()) {
    prefetch_.forget();
    Status status = step_.begin(begin->step);
    for (const auto& access : beside_) {
      if (status.ok()) access->begin_step(begin->step);
    }
    weights_.begin_step(step_.between_steps() ? 0 : step_.number());
    return parts_.complete(command, std::move(status));
  }
  const uint64_t begin_ns = base::now_ns();
  Status status;
  base::StepNumber step = 0;
  if (const auto* prepared = command.as<Prepare>()) {
    status = prepare(*prepared);
    step = prepared->step;
  } else if (const auto* committed = command.as<Commit>()) {
    status = commit(committed->step);
    step = committed->step;
  } else {
    step = std::get<Abort>(command.message).step;
    status = abort(step);
  }
  if (parts_.options.trace != nullptr) {
    parts_.options.trace->record(
        {message_name(command.message).data(), parts_.step_track, step, begin_ns, base::now_ns()});
  }
  remember_state();
  if (step_.between_steps()) weights_.end_step(command.as<Abort>() != nullptr);
  parts_.complete(command, std::move(status));
}

/// Why the step cannot be prepared, until it is aborted; ok: it can.
const Status& LocalDevice::step_failure() const {
  if (!spill_.failure().ok()) return spill_.failure();
  return handler_.failure().ok() ? state_access_.write_failure() : handler_.failure();
}

Status LocalDevice::prepare(const Prepare& message) {
  Prepare whole = message;
  SI_RETURN_IF_ERROR(step_.check_prepare(message, step_failure()));
  for (const auto& access : beside_) {
    SI_ASSIGN_OR_RETURN(const std::string record, access->prepare(message.step));
    whole.client_metadata = storage::join_row_commit(std::move(whole.client_metadata), record);
  }
  return step_.prepare(whole, Status());
}

Status LocalDevice::commit(base::StepNumber step) {
  const bool prepared = !step_.between_steps();
  SI_RETURN_IF_ERROR(step_.commit(step));
  if (!prepared) return Status();
  for (const auto& access : beside_) SI_RETURN_IF_ERROR(access->commit(step));
  return Status();
}

Status LocalDevice::abort(base::StepNumber step) {
  const bool in_step = !step_.between_steps();
  Status status = step_.abort(step);
  if (in_step && step_.between_steps()) {
    for (const auto& access : beside_) {
      Status aborted = access->abort(step);
      if (status.ok()) status = std::move(aborted);
    }
  }
  if (step_.between_steps()) {
    handler_.forget_failure();
    state_access_.forget_failure();
    spill_.forget_failure();
  }
  return status;
}

/// After the last command: brings what only memory has to the drive. True while that is under way.
bool LocalDevice::flush_before_closing() {
  const bool failed = !flush_.status().ok();
  if (parts_.cache.all_unwritten().empty() && !failed) return false;
  Status status = !broken_.ok() ? broken_ : closing_flush_ ? flush_.status() : Status();
  if (status.ok() && !step_.between_steps()) status = abort(step_.number());
  if (status.ok() && !std::exchange(closing_flush_, true)) {
    flush_.start(nullptr);
    return true;
  }
  if (!status.ok()) {
    base::log(base::LogLevel::kWarning,
              Status(status)
                  .with_context(parts_.name + " is closed, and its newest state was in memory only")
                  .to_string());
  }
  return false;
}

void LocalDevice::give_up(Status status) {
  broken_ = std::move(status);
  parts_.transfers_in_flight = 0;
  gradients_->fail(broken_);
  handler_.abandon(broken_);
  state_access_.abandon(broken_);
  flush_.abandon(broken_);
  for (const auto& access : beside_) access->abandon(broken_);
  weights_.abandon(broken_);
  prefetch_.stop();
}

}  // namespace

Result<std::unique_ptr<Device>> make_device_over(std::unique_ptr<storage::Store> store,
                                                 StoreOrigin origin, LocalDeviceOptions options,
                                                 std::string kind) {
  auto device = std::make_unique<LocalDevice>(std::move(options), std::move(kind));
  Status status = device->open(std::move(store), origin);
  if (!status.ok()) return std::move(status).with_context(device->info().name);
  return std::unique_ptr<Device>(std::move(device));
}

}  // namespace smartinf::csd
