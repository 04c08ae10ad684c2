#include "smartinf/serve/hosted_session.h"

#include <algorithm>
#include <bit>
#include <random>
#include <utility>

#include <fmt/format.h>
#include <pthread.h>

#include "smartinf/base/checksum.h"
#include "smartinf/base/log.h"
#include "smartinf/base/units.h"
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
// Of a device's memory, for what is on its way beside the weights of an update.
constexpr uint64_t kOnTheWayBytes = uint64_t{96} << 20;
constexpr uint64_t kBodyGrows = 8;
// Each subgroup's weights begin on a cache line of their own.
constexpr uint64_t kRegionAlignment = 64;
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
  if (created_) {
    layout_ = *request.create;
    SI_RETURN_IF_ERROR(check_layout(layout_, request.wishes.durability, share_.spool_bytes, quota));
  } else {
    SI_ASSIGN_OR_RETURN(storage::StoreSummary summary, source_->summarize());
    layout_ = std::move(summary.layout);
    if (share_.spool_bytes > quota) {
      return Status(ErrorCode::kNoSpace, "the spool is larger than the client's quota");
    }
  }
  SI_RETURN_IF_ERROR(check_share(layout_, share_));
  uint64_t elements = 0;
  for (const storage::StoredSubgroup& subgroup : layout_.subgroups) {
    region_first_.push_back(region_elements_);
    region_elements_ += base::round_up(subgroup.count, kRegionAlignment);
    elements += subgroup.count;
  }
  // What the device may have is what is left beside the weights on their way.
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
  auto device = created_ ? source_->create(layout_, share) : source_->open(share);
  if (!device.ok()) {
    const auto left = created_ && device.status().code() != ErrorCode::kAlreadyExists
                          ? source_->peek()
                          : Result<std::optional<storage::StoreState>>(std::nullopt);
    if (left.ok() && *left && !(*left)->initialized) (void)source_->erase();
    return std::move(device).status();
  }
  const csd::DeviceInfo& info = (*device)->info();
  device_charge_ =
      Charge(memory, info.memory_bytes + info.gradient_memory_bytes + kSpareMax * kPieceBytes);
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
  layout_ = device_->layout();
  gate_ = std::make_unique<CommandGate>(layout_, share_, created_);
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
  attached.layout = layout_;
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
    answer.received = received_;
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
  const bool known = client_received + 1 >= first_number_ && client_received < next_;
  if (ending_ || stream_ != nullptr || !known) {
    taking_over_ = false;
    if (stream_ != nullptr && !ending_) {
      return Status(ErrorCode::kUnavailable, "the session's last connection is still in use");
    }
    return Status(ErrorCode::kNotFound, "the session is at its end");
  }
  while (first_number_ <= client_received) {
    entries_.pop_front();
    ++first_number_;
  }
  next_ = first_number_;
  return Status();
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
    std::vector<Payload> freed;  // outside the lock
    const std::lock_guard lock(mutex_);
    if (ack->received >= next_) return damaged("an acknowledgement of what was not sent");
    while (first_number_ <= ack->received && !entries_.empty()) {
      freed.push_back(std::move(entries_.front().payload));
      entries_.pop_front();
      ++first_number_;
    }
    return Status();
  }
  {
    const std::lock_guard lock(mutex_);
    if (ending_ || up.number <= received_) return Status();  // came before the break
    if (up.number != received_ + 1) return damaged("a message of the client is missing");
    if (entries_.size() + running_.size() > kEntriesMax) {
      return Status(ErrorCode::kUnavailable, "the client does not read what it is answered");
    }
    received_ = up.number;
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
  running->in_bytes = command.payload_bytes;
  const bool inlined = command.payload_bytes <= kPieceBytes && frame.payload_bytes() > 0;
  if (inlined ? frame.payload_bytes() != command.payload_bytes : frame.payload_bytes() != 0) {
    return damaged("a payload of another size than was said");
  }
  Result<uint64_t> expected = gate_->payload_bytes(running->body);
  Status wrong = expected.status();
  // The body itself: lists are larger in memory than on the wire, and are there twice.
  running->body_charge = Charge(hosted_.memory(), kBodyGrows * frame.head().size());
  if (wrong.ok() && !running->body_charge.taken()) {
    wrong = Status(ErrorCode::kOutOfMemory,
                   fmt::format("the commands under way are too much for device {}", hosted_.name()),
                   "Raise the device's memory in the server's file.");
  }
  if (wrong.ok() && *expected != ~uint64_t{0} && *expected != command.payload_bytes) {
    wrong = Status(ErrorCode::kInvalidArgument, fmt::format("a payload of {} bytes where {} belong",
                                                            command.payload_bytes, *expected));
  }
  // A gradient's buffer is used again, so they are all of one size.
  const bool piece = std::holds_alternative<Gradient>(running->body);
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
    answer(number, running->body, std::move(wrong));
    return Status();
  }
  if (inlined) {
    const uint64_t checksum =
        frame.copy_payload(running->in.bytes().first(frame.payload_bytes()), 0);
    if (checksum != command.checksum) running->damaged = damaged("a payload came damaged");
    running->came = running->in_bytes;
  }
  if (running->came < running->in_bytes) {
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
  if (assembling_ == nullptr || bytes > assembling_->in_bytes - assembling_->came) {
    return damaged("more payload than was said");
  }
  Running& running = *assembling_;
  const uint64_t checksum =
      frame.copy_payload(running.in.bytes().subspan(running.came, bytes), running.came);
  if (checksum != piece.checksum) running.damaged = damaged("a payload came damaged");
  running.came += bytes;
  if (running.came == running.in_bytes) submit(std::exchange(assembling_, nullptr));
  return Status();
}

void HostedSession::submit(const std::shared_ptr<Running>& running) {
  Status status = running->damaged.ok() ? try_submit(running) : running->damaged;
  if (!status.ok()) answer(running->number, running->body, std::move(status));
}

/// A failure: the device does not have it.
Status HostedSession::try_submit(const std::shared_ptr<Running>& running) {
  const std::lock_guard submit(submit_mutex_);
  if (device_ == nullptr) {
    const std::lock_guard lock(mutex_);
    return end_why_.ok() ? Status(ErrorCode::kCancelled, "the session is at its end") : end_why_;
  }
  const storage::StoreState state = device_->state();
  {
    const std::lock_guard lock(mutex_);
    SI_RETURN_IF_ERROR(gate_->admit(running->body, state));
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
  if (Status status = make_message(*running); !status.ok()) {
    const std::lock_guard lock(mutex_);
    gate_->finished(running->body);
    return status;
  }
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
  SI_ASSIGN_OR_RETURN(const storage::Geometry geometry, storage::Geometry::make(layout_, 1));
  uint64_t bytes = 0;
  for (const base::SubgroupId subgroup : cache.subgroups) {
    bytes += geometry.plane_offset(geometry.index_of(subgroup), layout_.state_planes().size());
  }
  cache_charge_ = Charge(hosted_.memory(), bytes);
  if (!cache_charge_.taken()) {
    return Status(ErrorCode::kOutOfMemory, "the state that is to stay in memory does not fit",
                  "Raise the device's memory in the server's file.");
  }
  return device_->cache_state(cache.subgroups);
}

Status HostedSession::give_out(Running& running, uint64_t bytes) {
  if (bytes <= hosted_.memory().limit_bytes()) {
    running.charge = Charge(hosted_.memory(), base::round_up(bytes, base::kPageBytes));
  }
  if (!running.charge.taken()) {
    return Status(ErrorCode::kOutOfMemory,
                  fmt::format("{} to be sent are too much for what device {} has left of its {}",
                              base::format_bytes(bytes), hosted_.name(),
                              base::format_bytes(hosted_.memory().limit_bytes())),
                  "Raise the device's memory in the server's file.");
  }
  SI_ASSIGN_OR_RETURN(running.out, base::AlignedBuffer::allocate(std::max<uint64_t>(bytes, 1)));
  return Status();
}

/// What the device is given: the same, with memory.
Status HostedSession::make_message(Running& running) {
  csd::Message& message = running.command.message;
  const std::byte* in = running.in.data();
  if (const auto* put = std::get_if<Gradient>(&running.body)) {
    message = csd::PutGradient{put->subgroup, put->first, put->count, put->type, in};
  } else if (const auto* compressed = std::get_if<CompressedGradient>(&running.body)) {
    message = csd::PutCompressedGradient{compressed->subgroup,
                                         running.in.bytes().first(running.in_bytes)};
  } else if (const auto* given = std::get_if<StateGiven>(&running.body)) {
    csd::WriteState write;
    write.subgroup = given->subgroup;
    write.count = given->count;
    write.plane_mask = given->plane_mask;
    for (size_t plane = 0; plane < layout_.planes.size(); ++plane) {
      if ((given->planes >> plane & 1u) == 0) continue;
      write.planes[plane] = reinterpret_cast<const float*>(in);
      in += given->count * sizeof(float);
    }
    if (given->residual) write.residual = reinterpret_cast<const base::Bf16*>(in);
    message = write;
  } else if (const auto* wanted = std::get_if<StateWanted>(&running.body)) {
    const auto planes = static_cast<uint64_t>(std::popcount(wanted->planes));
    if (planes > 0) SI_RETURN_IF_ERROR(give_out(running, planes * wanted->count * sizeof(float)));
    csd::ReadState read;
    read.subgroup = wanted->subgroup;
    read.first = wanted->first;
    read.count = wanted->count;
    auto* out = reinterpret_cast<float*>(running.out.data());
    for (size_t plane = 0; plane < layout_.planes.size(); ++plane) {
      if ((wanted->planes >> plane & 1u) == 0) continue;
      read.planes[plane] = out;
      out += wanted->count;
    }
    message = read;
  } else if (const auto* weights = std::get_if<ReadWanted>(&running.body)) {
    SI_RETURN_IF_ERROR(give_out(
        running, gate_->find(weights->subgroup)->count * base::data_type_bytes(weights->type)));
    message = csd::ReadWeights{weights->subgroup, weights->step, weights->type, running.out.data()};
  } else if (const auto* spooled = std::get_if<SpoolGiven>(&running.body)) {
    message = csd::PutSpool{spooled->offset_bytes, running.in.bytes().first(running.in_bytes)};
  } else if (const auto* fetched = std::get_if<SpoolWanted>(&running.body)) {
    if (device_->info().spool_bytes == 0) {
      return Status(ErrorCode::kUnsupported, "the device was opened without room for a spool");
    }
    if (fetched->bytes > device_->info().spool_bytes) {
      return Status(ErrorCode::kNoSpace, "the spool is smaller than what is asked of it");
    }
    SI_RETURN_IF_ERROR(give_out(running, fetched->bytes));
    message = csd::GetSpool{fetched->offset_bytes, running.out.bytes().first(fetched->bytes)};
  } else if (const auto* update = std::get_if<UpdateWanted>(&running.body)) {
    return make_update(running, *update);
  } else {
    std::visit(
        [&](const auto& same) {
          if constexpr (std::is_constructible_v<csd::Message, decltype(same)>) message = same;
        },
        running.body);
  }
  return Status();
}

Status HostedSession::make_update(Running& running, const UpdateWanted& wanted) {
  const uint64_t element_bytes = base::data_type_bytes(wanted.weights_type);
  const bool weights = std::ranges::any_of(wanted.updates, &WeightsWanted::weights);
  const bool samples = std::ranges::any_of(wanted.updates, &WeightsWanted::samples);
  const uint64_t weights_bytes = weights ? region_elements_ * element_bytes : 0;
  const uint64_t samples_bytes = samples ? gate_->samples() * sizeof(base::Bf16) : 0;
  if (weights_bytes + samples_bytes > 0) {
    for (const auto& region : regions_) {
      if (region.use_count() == 1 && region->weights.size() >= weights_bytes &&
          region->samples.size() >= samples_bytes) {
        std::atomic_thread_fence(std::memory_order_acquire);
        running.region = region;
        break;
      }
    }
  }
  if (weights_bytes + samples_bytes > 0 && running.region == nullptr) {
    std::erase_if(regions_, [](const auto& region) { return region.use_count() == 1; });
    auto region = std::make_shared<Region>();
    // The samples that are sent are copies, of which there are no more than samples.
    region->charge = Charge(hosted_.memory(), weights_bytes + 2 * samples_bytes);
    if (!region->charge.taken()) {
      return Status(ErrorCode::kOutOfMemory,
                    fmt::format("weights of {} on their way are too much for what device {} has "
                                "left of its {}",
                                base::format_bytes(weights_bytes), hosted_.name(),
                                base::format_bytes(hosted_.memory().limit_bytes())),
                    "Raise the device's memory in the server's file.");
    }
    if (weights_bytes > 0) {
      SI_ASSIGN_OR_RETURN(region->weights, base::AlignedBuffer::allocate(weights_bytes));
    }
    if (samples_bytes > 0) {
      SI_ASSIGN_OR_RETURN(region->samples, base::AlignedBuffer::allocate(samples_bytes));
    }
    regions_.push_back(region);
    running.region = std::move(region);
  }
  csd::Update update;
  update.weights_type = wanted.weights_type;
  update.scalars = wanted.scalars;
  update.as_completed = wanted.as_completed;
  update.keep_updated = wanted.keep_updated;
  update.weights_on_demand = wanted.weights_on_demand;
  for (const WeightsWanted& entry : wanted.updates) {
    csd::SubgroupUpdate& one = update.updates.emplace_back();
    one.subgroup = entry.subgroup;
    const auto index = static_cast<size_t>(gate_->find(entry.subgroup) - layout_.subgroups.data());
    if (entry.weights) {
      one.weights_out = running.region->weights.data() + region_first_[index] * element_bytes;
    }
    if (entry.samples) {
      one.samples_out = reinterpret_cast<base::Bf16*>(running.region->samples.data());
    }
  }
  running.command.message = std::move(update);
  return Status();
}

void HostedSession::answer(uint64_t number, const CommandBody&, Status status) {
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
