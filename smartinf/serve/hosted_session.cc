#include "smartinf/serve/hosted_session.h"

#include <algorithm>
#include <random>
#include <utility>

#include <fmt/format.h>
#include <pthread.h>

#include "smartinf/base/checksum.h"
#include "smartinf/base/log.h"
#include "smartinf/base/units.h"
#include "smartinf/csd/messages/rows/table_layout.h"
#include "smartinf/storage/format.h"

namespace smartinf::serve::wire {

using base::ErrorCode;
using base::Result;
using base::Status;
using std::chrono::steady_clock;

namespace {

// A client that sends commands and does not read their answers: beyond so many it is given up. One
// that reads has a fraction of them unanswered (ClientSession).
constexpr size_t kEntriesMax = size_t{1} << 16;
// Bytes of a device's memory for what is on its way beside the weights of an update.
constexpr uint64_t kOnTheWayBytes = uint64_t{96} << 20;
constexpr uint64_t kBodyGrows = 8;
// Alignment of the results of a message in memory: each begins on a cache line of its own.
constexpr uint64_t kResultAlignment = 64;
constexpr std::chrono::seconds kTakeOverWait{10};
constexpr std::chrono::seconds kNoticeWait{1};
constexpr std::chrono::seconds kGiveWayWait{10};
constexpr double kFarewellSeconds = 5;

SessionId make_id() {
  std::random_device random;
  const auto word = [&] { return uint64_t{random()} << 32 | random(); };
  return {word(), word()};
}

Status damaged(const char* what) {
  return Status(ErrorCode::kCorrupt, what,
                "It was damaged on its way or in a memory: check both machines' (the step can be "
                "repeated).");
}

struct SumMemory : MessageBytes {
  void down(const void* memory, uint64_t bytes) { down_bytes += memory != nullptr ? bytes : 0; }
  void down(std::span<const std::byte> memory) { down_bytes += memory.size(); }
  void up(const void* memory, uint64_t bytes, base::SubgroupId) {
    if (memory != nullptr) up_bytes += base::round_up(bytes, kResultAlignment);
  }
  void up(std::span<std::byte> memory, base::SubgroupId subgroup) {
    up(memory.data(), memory.size(), subgroup);
  }
  void samples(const base::Bf16* memory, base::SubgroupId) {
    has_samples = has_samples || memory != nullptr;
  }
};

/// Points a message to memory of the session's.
struct BindMemory {
  std::byte* in;
  std::byte* out;
  std::byte* samples_of_space;

  template <typename T>
  void down(const T*& memory, uint64_t bytes) {
    if (memory == nullptr) return;
    memory = reinterpret_cast<const T*>(in);
    in += bytes;
  }
  void down(std::span<const std::byte>& memory) {
    memory = {in, memory.size()};
    in += memory.size();
  }
  template <typename T>
  void up(T*& memory, uint64_t bytes, base::SubgroupId) {
    if (memory == nullptr) return;
    memory = reinterpret_cast<T*>(out);
    out += base::round_up(bytes, kResultAlignment);
  }
  void up(std::span<std::byte>& memory, base::SubgroupId) {
    memory = {out, memory.size()};
    out += base::round_up(memory.size(), kResultAlignment);
  }
  void samples(base::Bf16*& memory, base::SubgroupId) {
    if (memory != nullptr) memory = reinterpret_cast<base::Bf16*>(samples_of_space);
  }
};

}  // namespace

HostedSession::HostedSession(HostedDevice& device, Peer client, const Attach& request,
                             Limits limits)
    : hosted_(device),
      client_(std::move(client)),
      limits_(std::move(limits)),
      id_(make_id()),
      share_(request.share) {}

Result<std::shared_ptr<HostedSession>> HostedSession::open(HostedDevice& device, const Peer& client,
                                                           const Attach& request, Limits limits) {
  std::shared_ptr<HostedSession> session(
      new HostedSession(device, client, request, std::move(limits)));
  SI_ASSIGN_OR_RETURN(session->lease_, device.lease(client.name));
  SI_RETURN_IF_ERROR(session->open_device(request));
  ++device.counters().sessions;
  session->thread_ = std::jthread([raw = session.get()] { raw->run(); });
  pthread_setname_np(session->thread_.native_handle(), "si-session");
  return session;
}

Status HostedSession::open_device(const Attach& request) {
  SI_ASSIGN_OR_RETURN(source_, hosted_.served().source(request.wishes));
  const uint64_t quota =
      hosted_.served().quota_bytes > 0 ? hosted_.served().quota_bytes : ~uint64_t{0};
  created_ = request.create.has_value();
  storage::StoreLayout layout;
  if (created_) {
    layout = *request.create;
    SI_RETURN_IF_ERROR(check_layout(layout, request.wishes.durability, share_.spool_bytes, quota));
  } else {
    SI_ASSIGN_OR_RETURN(storage::StoreSummary summary, source_->summarize());
    layout = std::move(summary.layout);
    if (share_.spool_bytes > quota) {
      return Status(ErrorCode::kNoSpace, "the spool is larger than the client's quota");
    }
  }
  share_.cache_bytes = std::min(share_.cache_bytes, quota - share_.spool_bytes);
  SI_RETURN_IF_ERROR(check_share(layout, share_));
  uint64_t elements = 0;
  for (const storage::StoredSubgroup& subgroup : layout.subgroups) elements += subgroup.count;
  // The device may have what is left beside the weights on their way.
  MemoryAccount& memory = hosted_.memory();
  const uint64_t beside = kOnTheWayBytes + elements * sizeof(base::Bf16);
  const uint64_t limit = memory.limit_bytes();
  if (beside >= limit) {
    return Status(
        ErrorCode::kOutOfMemory,
        fmt::format("device {} may use {} of the server's memory; {} are needed for "
                    "weights and gradients on their way alone",
                    hosted_.name(), base::format_bytes(limit), base::format_bytes(beside)),
        "Raise the device's memory in the server's file.");
  }
  csd::DeviceShare share = share_;
  share.slot_memory_bytes = std::min(share.slot_memory_bytes, (limit - beside) / 2);
  share.gradient_memory_bytes =
      std::min(share.gradient_memory_bytes, limit - beside - share.slot_memory_bytes);
  auto device = created_ ? source_->create(layout, share) : source_->open(share);
  if (!device.ok()) {
    const auto left = created_ && device.status().code() != ErrorCode::kAlreadyExists
                          ? source_->peek()
                          : Result<std::optional<storage::StoreState>>(std::nullopt);
    if (left.ok() && *left && !(*left)->initialized) (void)source_->erase();
    return std::move(device).status();
  }
  const csd::DeviceInfo& info = (*device)->info();
  device_charge_ =
      Charge(memory, info.memory_bytes + info.gradient_memory_bytes + info.cache_memory_bytes +
                         info.row_memory_bytes + kSpareMax * kPieceBytes);
  Status enough = device_charge_.taken()
                      ? check_share((*device)->layout(), share_)
                      : Status(ErrorCode::kOutOfMemory,
                               fmt::format("device {} has no memory left", hosted_.name()),
                               "Raise the device's memory in the server's file.");
  if (!enough.ok()) {
    device->reset();
    if (created_) (void)source_->erase();
    return enough;
  }
  device_ = std::move(*device);
  space_.emplace(device_->layout(), share_, device_->info().spool_bytes);
  gate_.emplace(created_);
  vitals_ = vitals();
  standing_ = standing();
  return Status();
}

HostedSession::~HostedSession() {
  if (thread_.joinable()) {
    end(Status(ErrorCode::kUnavailable, "the server gave the session up"));
    thread_.join();
  }
}

bool HostedSession::attached() const {
  const std::lock_guard lock(mutex_);
  return stream_ != nullptr;
}

std::string HostedSession::last_words() const {
  const std::lock_guard lock(mutex_);
  return last_words_;
}

Result<std::unique_ptr<csd::Snapshot>> HostedSession::snapshot() {
  const std::lock_guard lock(submit_mutex_);
  if (device_ == nullptr) return Status(ErrorCode::kNotFound, "the session is at its end");
  return device_->snapshot();
}

Vitals HostedSession::vitals() const {
  return {device_->host_traffic(), device_->store_traffic(), device_->bytes_written_ever(),
          device_->state_bytes_cached()};
}

Standing HostedSession::standing() const {
  const csd::DeviceInfo& info = device_->info();
  return {device_->state(), device_->client_metadata(), info.state_cache_bytes,
          info.cached_subgroups};
}

// ---- Streams.

Attached HostedSession::greeting() const {
  Attached attached;
  attached.session = id_;
  attached.info = device_->info();
  attached.layout = space_->layout();
  attached.standing = standing_;
  attached.vitals = vitals_;
  return attached;
}

Status HostedSession::serve(Stream& stream, uint64_t client_received, bool fresh) {
  SI_RETURN_IF_ERROR(take_over(client_received));
  ++hosted_.counters().connections;
  Attached answer;
  {
    const std::lock_guard submit(submit_mutex_);
    const std::lock_guard lock(mutex_);
    if (fresh && device_ != nullptr) answer = greeting();
    answer.session = id_;
    answer.received = link_.received();
  }
  Status why;
  if (!stream.write({encode(answer), {}})) {
    why = Status(ErrorCode::kCancelled, "the client was gone before it had an answer");
    // Nobody knows the session's name.
    if (fresh) end(why);
  } else {
    {
      const std::lock_guard lock(mutex_);
      stream_ = &stream;
      taking_over_ = false;
    }
    completions_.push({});
  }
  while (why.ok()) {
    InFrame frame;
    why = stream.read(frame);
    if (!why.ok()) break;
    hosted_.counters().bytes_received += frame.bytes();
    if (why = receive(frame); !why.ok()) {
      base::log(base::LogLevel::kWarning,
                fmt::format("client {} ({}), device {}: {}; its session is closed", client_.name,
                            client_.address, hosted_.name(), why.to_string()));
      end(why);
      // So that it is told.
      (void)wait_ended(std::chrono::duration<double>(kFarewellSeconds));
    }
  }
  detach(stream);
  return why;
}

/// The stream's own to serve, once nobody else uses the session.
Status HostedSession::take_over(uint64_t client_received) {
  std::unique_lock lock(mutex_);
  if (taking_over_) {
    return Status(ErrorCode::kUnavailable, "another connection takes the session over just now");
  }
  taking_over_ = true;
  if (stream_ != nullptr) stream_->cancel();
  changed_.wait_for(lock, kTakeOverWait, [&] { return stream_ == nullptr || ending_; });
  if (!ending_ && stream_ == nullptr && link_.resume(client_received)) return Status();
  taking_over_ = false;
  if (stream_ != nullptr && !ending_) {
    return Status(ErrorCode::kUnavailable, "the session's last connection is still in use");
  }
  return Status(ErrorCode::kNotFound, "the session is at its end");
}

void HostedSession::detach(Stream& stream) {
  stream.cancel();
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return !writing_; });
  stream_ = nullptr;
  taking_over_ = false;
  detached_at_ = steady_clock::now();
  changed_.notify_all();
}

// ---- What the client sends.

Status HostedSession::receive(const InFrame& frame) {
  SI_ASSIGN_OR_RETURN(Up up, decode<Up>(frame));
  if (const auto* ack = std::get_if<AckFrame>(&up.body)) {
    std::optional<std::vector<Entry>> gone;  // outside the lock
    const std::lock_guard lock(mutex_);
    gone = link_.acknowledge(ack->received);
    return gone ? Status() : damaged("an acknowledgement of what was not sent");
  }
  {
    const std::lock_guard lock(mutex_);
    if (ending_) return Status();
    const auto came = link_.take(up.number, frame.bytes());
    if (came == ReliableLink<Entry>::Came::kAgain) return Status();
    if (came == ReliableLink<Entry>::Came::kGap) {
      return damaged("a message of the client is missing");
    }
    if (link_.kept() + running_.size() > kEntriesMax) {
      return Status(ErrorCode::kUnavailable, "the client does not read what it is answered");
    }
  }
  if (std::holds_alternative<ByeFrame>(up.body)) {
    assembling_.reset();
    end(Status());
    return Status();
  }
  if (const auto* piece = std::get_if<PieceFrame>(&up.body)) return take_piece(*piece, frame);
  return begin_command(std::get<CommandFrame>(std::move(up.body)), up.number, frame);
}

Status HostedSession::begin_command(CommandFrame command, uint64_t number, const InFrame& frame) {
  if (assembling_ != nullptr || skip_bytes_ > 0) {
    return damaged("a command before the payload of the one before it");
  }
  ++hosted_.counters().commands;
  auto running = std::make_shared<Running>();
  running->body = std::move(command.body);
  running->number = number;
  const bool inlined = command.payload_bytes <= kPieceBytes && frame.payload_bytes() > 0;
  if (inlined ? frame.payload_bytes() != command.payload_bytes : frame.payload_bytes() != 0) {
    return damaged("a payload of another size than was said");
  }
  auto* message = std::get_if<csd::Message>(&running->body);
  Status wrong;
  if (message != nullptr) {
    wrong = std::visit([&](const auto& one) { return csd::check(one, *space_); }, *message);
    if (wrong.ok()) running->size = size_of(*message);
  }
  // The body itself: lists are larger in memory than on the wire, and are there twice.
  running->body_charge = Charge(hosted_.memory(), kBodyGrows * frame.head().size());
  if (wrong.ok() && !running->body_charge.taken()) {
    wrong = Status(ErrorCode::kOutOfMemory,
                   fmt::format("the commands under way are too much for device {}", hosted_.name()),
                   "Raise the device's memory in the server's file.");
  }
  if (wrong.ok() && running->size.down_bytes != command.payload_bytes) {
    wrong = Status(ErrorCode::kInvalidArgument,
                   fmt::format("a payload of {} bytes where {} belong", command.payload_bytes,
                               running->size.down_bytes));
  }
  // A gradient's buffer is used again, so they are all of one size.
  const bool piece = message != nullptr && std::holds_alternative<csd::PutGradient>(*message);
  const uint64_t room = piece ? kPieceBytes : command.payload_bytes;
  if (wrong.ok() && (room > hosted_.memory().limit_bytes() || command.payload_bytes > room)) {
    wrong = Status(ErrorCode::kInvalidArgument, "a payload that no device takes at once");
  }
  if (wrong.ok() && command.payload_bytes > 0) {
    running->charge = Charge(hosted_.memory(), base::round_up(room, base::kPageBytes));
    if (!running->charge.taken()) {
      wrong = Status(ErrorCode::kOutOfMemory,
                     fmt::format("{} are too much for what device {} has left of its {}",
                                 base::format_bytes(command.payload_bytes), hosted_.name(),
                                 base::format_bytes(hosted_.memory().limit_bytes())),
                     "Raise the device's memory in the server's file.");
    }
  }
  if (wrong.ok() && command.payload_bytes > 0) {
    if (piece) {
      const std::lock_guard lock(mutex_);
      if (!spare_.empty()) {
        running->in = std::move(spare_.back());
        spare_.pop_back();
      }
    }
    if (running->in.size() == 0) {
      auto memory = base::AlignedBuffer::allocate(room);
      wrong = memory.status();
      if (memory.ok()) running->in = std::move(*memory);
    }
  }
  if (!wrong.ok()) {
    if (!inlined) skip_bytes_ = command.payload_bytes;
    answer(number, std::move(wrong));
    return Status();
  }
  if (inlined) {
    const uint64_t checksum =
        frame.copy_payload(running->in.bytes().first(frame.payload_bytes()), 0);
    if (checksum != command.checksum) running->damaged = damaged("a payload came damaged");
    running->came = running->size.down_bytes;
  }
  if (running->came < running->size.down_bytes) {
    assembling_ = std::move(running);
    return Status();
  }
  submit(running);
  return Status();
}

Status HostedSession::take_piece(const PieceFrame& piece, const InFrame& frame) {
  const uint64_t bytes = frame.payload_bytes();
  if (bytes == 0) return damaged("an empty piece of a payload");
  if (skip_bytes_ > 0) {
    if (bytes > skip_bytes_) return damaged("more payload than was said");
    skip_bytes_ -= bytes;
    return Status();
  }
  if (assembling_ == nullptr || bytes > assembling_->size.down_bytes - assembling_->came) {
    return damaged("more payload than was said");
  }
  Running& running = *assembling_;
  const uint64_t checksum =
      frame.copy_payload(running.in.bytes().subspan(running.came, bytes), running.came);
  if (checksum != piece.checksum) running.damaged = damaged("a payload came damaged");
  running.came += bytes;
  if (running.came == running.size.down_bytes) submit(std::exchange(assembling_, nullptr));
  return Status();
}

void HostedSession::submit(const std::shared_ptr<Running>& running) {
  Status status = running->damaged.ok() ? try_submit(running) : running->damaged;
  if (!status.ok()) answer(running->number, std::move(status));
}

/// New tables count in the client's quota, with the state, which has two slots then.
Status HostedSession::check_tables(const csd::OpenTables& tables) const {
  if (!tables.create) return Status();
  const storage::StoreLayout& state = device_->layout();
  SI_ASSIGN_OR_RETURN(const storage::Geometry geometry, storage::Geometry::make(state, 2));
  SI_ASSIGN_OR_RETURN(
      const csd::DeviceTables made,
      csd::device_tables({tables.tables, tables.pattern}, state.run, tables.device_index,
                         tables.device_count, tables.log_bytes));
  return wire::check_tables(made.layout, geometry.container_bytes() + share_.spool_bytes,
                            hosted_.served().quota_bytes);
}

/// A failure: the device does not have it.
Status HostedSession::try_submit(const std::shared_ptr<Running>& running) {
  const std::lock_guard submit(submit_mutex_);
  if (device_ == nullptr) {
    const std::lock_guard lock(mutex_);
    return end_why_.ok() ? Status(ErrorCode::kCancelled, "the session is at its end") : end_why_;
  }
  const storage::StoreState state = device_->state();
  if (const auto* message = std::get_if<csd::Message>(&running->body)) {
    const auto* tables = std::get_if<csd::OpenTables>(message);
    if (tables != nullptr) SI_RETURN_IF_ERROR(check_tables(*tables));
  }
  {
    const std::lock_guard lock(mutex_);
    SI_RETURN_IF_ERROR(gate_->admit(running->body, *space_, state));
  }
  const auto* recover = std::get_if<RecoverTo>(&running->body);
  const auto* cache = std::get_if<CacheState>(&running->body);
  if (recover != nullptr || cache != nullptr) {
    Status status = recover != nullptr ? device_->recover_to(recover->step) : cache_state(*cache);
    Standing now = standing();
    const std::lock_guard lock(mutex_);
    standing_ = now;
    vitals_ = vitals();
    if (!status.ok()) ++hosted_.counters().errors;
    push_done({running->number, status, vitals_, now});
    return Status();
  }
  running->command.message = std::move(std::get<csd::Message>(running->body));
  if (Status status = take_region(*running); !status.ok()) {
    const std::lock_guard lock(mutex_);
    gate_->finished(running->command.message);
    return status;
  }
  bind_memory(*running);
  running->command.replies = &completions_;
  running->command.owner = running.get();
  {
    const std::lock_guard lock(mutex_);
    running_.push_back(running);
  }
  device_->submit(running->command);
  return Status();
}

/// The device takes the memory at once and keeps it, so it is asked for before.
Status HostedSession::cache_state(const CacheState& cache) {
  const storage::StoreLayout& layout = space_->layout();
  SI_ASSIGN_OR_RETURN(const storage::Geometry geometry, storage::Geometry::make(layout, 1));
  uint64_t bytes = 0;
  for (const base::SubgroupId subgroup : cache.subgroups) {
    bytes += geometry.plane_offset(geometry.index_of(subgroup), layout.state_planes().size());
  }
  cache_charge_ = Charge(hosted_.memory(), bytes);
  if (!cache_charge_.taken()) {
    return Status(ErrorCode::kOutOfMemory, "the state that is to stay in memory does not fit",
                  "Raise the device's memory in the server's file.");
  }
  return device_->cache_state(cache.subgroups);
}

/// Memory for its results.
Status HostedSession::take_region(Running& running) {
  const uint64_t results = running.size.up_bytes;
  const uint64_t samples = running.size.has_samples
                               ? compress::sample_count(space_->matrices()) * sizeof(base::Bf16)
                               : 0;
  if (results + samples == 0) return Status();
  const bool update = std::holds_alternative<csd::Update>(running.command.message);
  for (const auto& region : regions_) {
    if (update && region.use_count() == 1 && region->results.size() >= results &&
        region->samples.size() >= samples) {
      std::atomic_thread_fence(std::memory_order_acquire);
      running.region = region;
      return Status();
    }
  }
  if (update) std::erase_if(regions_, [](const auto& region) { return region.use_count() == 1; });
  auto region = std::make_shared<Region>();
  // The samples that are sent are copies, of which there are no more than samples.
  if (results <= hosted_.memory().limit_bytes()) {
    region->charge = Charge(hosted_.memory(), results + 2 * samples);
  }
  if (!region->charge.taken()) {
    return Status(ErrorCode::kOutOfMemory,
                  fmt::format("{} to be sent are too much for what device {} has left of its {}",
                              base::format_bytes(results), hosted_.name(),
                              base::format_bytes(hosted_.memory().limit_bytes())),
                  "Raise the device's memory in the server's file.");
  }
  if (results > 0) {
    SI_ASSIGN_OR_RETURN(region->results, base::AlignedBuffer::allocate(results));
  }
  if (samples > 0) {
    SI_ASSIGN_OR_RETURN(region->samples, base::AlignedBuffer::allocate(samples));
  }
  if (update) regions_.push_back(region);
  running.region = std::move(region);
  return Status();
}

/// Points what came with a message to the session's memory from here on.
void HostedSession::bind_memory(Running& running) const {
  const bool results = running.region != nullptr;
  BindMemory bind{running.in.data(), results ? running.region->results.data() : nullptr,
                  results ? running.region->samples.data() : nullptr};
  std::visit([&](auto& one) { csd::memory(bind, one, *space_); }, running.command.message);
}

MessageBytes HostedSession::size_of(csd::Message& message) const {
  SumMemory sum;
  std::visit([&](auto& one) { csd::memory(sum, one, *space_); }, message);
  return sum;
}

void HostedSession::answer(uint64_t number, Status status) {
  const std::lock_guard lock(mutex_);
  ++hosted_.counters().errors;
  push_done({number, std::move(status).with_context(hosted_.name()), vitals_, {}});
}

bool session_gives_way(HostedDevice& device, const Peer& peer) {
  const auto session = device.session();
  if (session == nullptr || session->client().name != peer.name) return false;
  const auto noticed = steady_clock::now() + kNoticeWait;
  while (session->attached() && steady_clock::now() < noticed) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  if (session->attached()) return false;
  session->end(Status(ErrorCode::kUnavailable, "the client has opened the device again"));
  return session->wait_ended(kGiveWayWait);
}

}  // namespace smartinf::serve::wire
