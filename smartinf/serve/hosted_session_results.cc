// The session's own thread: what the device answers, and how it is sent.
#include <algorithm>
#include <utility>

#include <fmt/format.h>

#include "smartinf/base/check.h"
#include "smartinf/base/checksum.h"
#include "smartinf/base/log.h"
#include "smartinf/base/units.h"
#include "smartinf/serve/hosted_session.h"
#include "smartinf/serve/samples.h"
#include "smartinf/storage/leak_in_flight.h"

namespace smartinf::serve::wire {

using base::ErrorCode;
using base::Status;
using std::chrono::steady_clock;

namespace {

constexpr std::chrono::milliseconds kLook{200};

}  // namespace

void HostedSession::run() {
  while (goes_on()) {
    bool can_send = false;
    {
      const std::lock_guard lock(mutex_);
      can_send = stream_ != nullptr && link_.has_next();
    }
    csd::Completion completion;
    const auto wait = can_send ? std::chrono::milliseconds(0) : kLook;
    if (completions_.pop(completion, wait)) {
      if (completion.command != nullptr) on_completion(completion);
      continue;
    }
    if (can_send) {
      (void)send_one();
    } else {
      show_life();
    }
  }
  close_device();
}

/// Shows that a device that answers nothing works: the client sees that it moves bytes.
void HostedSession::show_life() {
  const Vitals life = vitals();
  const auto moved = [](const Vitals& v) {
    return v.host.up_total() + v.host.down_total() + v.store.up_total() + v.store.down_total();
  };
  const std::lock_guard lock(mutex_);
  if (stream_ == nullptr || moved(life) == moved(vitals_)) return;
  vitals_ = life;
  push({VitalsFrame{life}, {}});
}

/// False when the session ends: asked to, or by itself.
bool HostedSession::goes_on() {
  const auto now = steady_clock::now();
  Status why;
  {
    const std::lock_guard lock(mutex_);
    if (ending_) return false;
    if (stream_ == nullptr && !taking_over_ && now - detached_at_ > limits_.lease) {
      why = Status(ErrorCode::kUnavailable,
                   fmt::format("client {} was away for longer than its lease of {}", client_.name,
                               base::format_seconds(limits_.lease.count())));
    }
  }
  if (why.ok()) return true;
  end(why);
  return false;
}

void HostedSession::push(Entry entry) {
  link_.put(std::move(entry));
  completions_.push({});
}

void HostedSession::push_done(DoneFrame done) {
  if (!done.standing) return push({std::move(done), {}});
  // Kept until it is acknowledged, and in no command's memory.
  auto text = std::make_shared<Charge>(standings_, done.standing->client_metadata.size());
  if (!text->taken() && !ending_) {
    ending_ = true;
    end_why_ = Status(ErrorCode::kUnavailable, "the client does not acknowledge what it is sent");
    changed_.notify_all();
  }
  push({std::move(done), {std::move(text), {}}});
}

void HostedSession::give_data(uint64_t command, uint32_t place, Payload payload) {
  for (uint64_t at = 0; at < payload.bytes.size();) {
    const uint64_t some = std::min<uint64_t>(kPieceBytes, payload.bytes.size() - at);
    const auto bytes = payload.bytes.subspan(at, some);
    const DataFrame data{command, place, at, base::checksum(bytes, at)};
    const std::lock_guard lock(mutex_);
    push({data, {payload.owner, bytes}});
    at += some;
  }
}

void HostedSession::on_completion(const csd::Completion& completion) {
  std::shared_ptr<Running> running;
  const bool done = completion.event == csd::Completion::Event::kDone;
  {
    const std::lock_guard lock(mutex_);
    const auto found = std::ranges::find_if(
        running_, [&](const auto& some) { return some.get() == completion.command->owner; });
    SI_CHECK(found != running_.end(), "an answer of the device to nothing");
    running = *found;
    if (done) {
      running_.erase(found);
      gate_->finished(running->command.message);
    }
  }
  if (!done) return on_ready(running, completion.subgroup);
  Status status = completion.status;
  const csd::Message& message = running->command.message;
  // An update's came with each subgroup.
  if (status.ok() && !std::holds_alternative<csd::Update>(message)) give_results(running, {});
  // After a timeout the drive may still use the memory.
  if (status.code() == ErrorCode::kTimeout) {
    if (running->in.size() > 0) storage::leak_in_flight(std::move(running->in));
    if (running->region != nullptr) storage::leak_in_flight(std::move(running->region->results));
  }
  const bool gradient = std::holds_alternative<csd::PutGradient>(message);
  const bool stands = std::holds_alternative<csd::Prepare>(message) ||
                      std::holds_alternative<csd::Commit>(message) ||
                      std::holds_alternative<csd::Abort>(message) ||
                      std::holds_alternative<csd::Flush>(message);
  std::optional<Standing> now;
  Vitals life;
  // Only this thread destroys the device. A gradient moves nothing that is looked at.
  if (device_ != nullptr && stands) now = standing();
  if (device_ != nullptr && !gradient) life = vitals();
  const std::lock_guard lock(mutex_);
  if (device_ != nullptr && !gradient) vitals_ = life;
  if (now) standing_ = *now;
  if (status.ok()) {
    if (const auto* begin = std::get_if<csd::BeginStep>(&message)) step_ = begin->step;
    if (std::holds_alternative<csd::Commit>(message)) ++hosted_.counters().commits;
  } else {
    ++hosted_.counters().errors;
    if (ending_ && !end_why_.ok() && status.code() == ErrorCode::kCancelled) status = end_why_;
  }
  if (gradient && running->in.size() > 0 && spare_.size() < kSpareMax) {
    spare_.push_back(std::move(running->in));
  }
  push_done({running->number, status, vitals_, now});
}

void HostedSession::on_ready(const std::shared_ptr<Running>& running, base::SubgroupId subgroup) {
  give_results(running, subgroup);
  const Vitals life = device_ != nullptr ? vitals() : vitals_;
  const std::lock_guard lock(mutex_);
  vitals_ = life;
  push({ReadyFrame{running->number, subgroup, vitals_}, {}});
}

/// Gives the results of a subgroup, or all.
void HostedSession::give_results(const std::shared_ptr<Running>& running,
                                 std::optional<base::SubgroupId> subgroup) {
  struct Give {
    HostedSession& session;
    const std::shared_ptr<Running>& running;
    const std::optional<base::SubgroupId> wanted;
    uint32_t place = 0;

    void down(const void*, uint64_t) {}
    void down(std::span<const std::byte>) {}
    void up(const void* memory, uint64_t bytes, base::SubgroupId of) {
      if (memory == nullptr) return;
      const uint32_t mine = place++;
      if (wanted && *wanted != of) return;
      session.give_data(running->number, mine,
                        {running, {static_cast<const std::byte*>(memory), bytes}});
    }
    void up(std::span<const std::byte> memory, base::SubgroupId of) {
      up(memory.data(), memory.size(), of);
    }
    void samples(const base::Bf16* memory, base::SubgroupId of) {
      if (memory == nullptr) return;
      const uint32_t mine = place++;
      if (wanted && *wanted != of) return;
      const csd::DeviceSpace& space = *session.space_;
      // With the command, whose region is charged for the copy as well.
      struct Packed {
        std::shared_ptr<Running> running;
        std::vector<base::Bf16> samples;
      };
      auto packed = std::make_shared<Packed>(
          Packed{running, pack_samples(space.matrices(), *space.find(of), memory)});
      const auto bytes = std::as_bytes(std::span(packed->samples));
      session.give_data(running->number, mine, {std::move(packed), bytes});
    }
  };
  Give give{*this, running, subgroup};
  std::visit([&](auto& one) { csd::memory(give, one, *space_); }, running->command.message);
}

bool HostedSession::send_one() {
  std::unique_lock lock(mutex_);
  if (stream_ == nullptr || !link_.has_next()) return false;
  Stream* stream = stream_;
  const auto next = link_.next();
  const Entry entry = next.frame;
  const Down down{next.number, link_.received(), entry.body};
  writing_ = true;
  lock.unlock();
  const OutFrame frame{encode(down), entry.payload};
  hosted_.counters().bytes_sent += frame.bytes();
  // Frames that were lost with a broken stream are sent again over the next one.
  const bool written = stream->write(frame);
  if (!written) stream->cancel();
  lock.lock();
  writing_ = false;
  changed_.notify_all();
  return written;
}

void HostedSession::end(Status why) {
  {
    const std::lock_guard lock(mutex_);
    if (ending_) return;
    ending_ = true;
    end_why_ = std::move(why);
    changed_.notify_all();
  }
  completions_.push({});
}

void HostedSession::cancel_stream() {
  const std::lock_guard lock(mutex_);
  if (stream_ != nullptr) stream_->cancel();
}

bool HostedSession::wait_ended(std::chrono::duration<double> wait) {
  std::unique_lock lock(mutex_);
  return changed_.wait_for(lock, wait, [&] { return ended_; });
}

void HostedSession::close_device() {
  std::unique_ptr<csd::Device> device;
  {
    const std::lock_guard lock(submit_mutex_);
    device = std::move(device_);
  }
  // Finishes what cannot be stopped, e.g. a commit, and refuses the rest; all of it is answered.
  device.reset();
  csd::Completion completion;
  while (completions_.pop(completion, std::chrono::nanoseconds(0))) {
    if (completion.command != nullptr) on_completion(completion);
  }
  std::string words = "nothing can be said of its state";
  if (auto state = source_->peek(); state.ok()) {
    const std::lock_guard lock(mutex_);
    if (!*state || !(*state)->initialized) {
      words = "its state was not whole and is deleted";
      if (created_) (void)source_->erase();
    } else if ((*state)->prepared_step > (*state)->committed_step) {
      words =
          fmt::format("step {} is prepared, and recovery decides on it", (*state)->prepared_step);
    } else if (step_ > (*state)->committed_step) {
      words =
          fmt::format("step {} was aborted; step {} is committed", step_, (*state)->committed_step);
    } else {
      words = fmt::format("step {} is committed", (*state)->committed_step);
    }
  }
  {
    const std::lock_guard lock(mutex_);
    last_words_ = words;
    push({ClosedFrame{end_why_}, {}});
    base::log(base::LogLevel::kInfo,
              fmt::format("client {} ({}), device {}: closed{}; {}", client_.name, client_.address,
                          hosted_.name(),
                          end_why_.ok() ? std::string() : " (" + end_why_.what() + ")", words));
  }
  {
    const std::lock_guard lock(submit_mutex_);
    regions_.clear();
  }
  // The lease is given back before the client is told: it may come again at once.
  device_charge_ = Charge();
  cache_charge_ = Charge();
  lease_ = DeviceLease();
  // The session's end breaks the connection of a client that does not read.
  while (send_one()) {
  }
  const std::lock_guard lock(mutex_);
  // Frames that a client which has been told does not acknowledge are not kept for it.
  link_.give_up();
  ended_ = true;
  changed_.notify_all();
}

}  // namespace smartinf::serve::wire
