#include "smartinf/engine/device_replies.h"

#include <algorithm>
#include <utility>

#include <fmt/format.h>

#include "smartinf/base/units.h"

namespace smartinf::engine {
namespace {

// A process that was stopped and goes on has missed one of them, however long it stood still.
constexpr int kLooks = 20;

}  // namespace

base::Status DeviceWatch::given_up(const csd::Device& device) const {
  const std::lock_guard lock(mutex_);
  const auto found = given_up_.find(&device);
  return found == given_up_.end() ? base::Status() : found->second;
}

void DeviceWatch::give_up(const csd::Device& device, const base::Status& why) {
  const std::lock_guard lock(mutex_);
  given_up_.emplace(&device, why);
}

DeviceReplies::DeviceReplies(DeviceWatch& watch)
    : watch_(watch),
      interval_(std::max(watch.silence_max() / kLooks, std::chrono::nanoseconds(1))) {}

DeviceReplies::Peer& DeviceReplies::peer_of(csd::Device& device) {
  for (const auto& peer : peers_) {
    if (peer->device == &device) return *peer;
  }
  Peer& peer = *peers_.emplace_back(std::make_unique<Peer>());
  peer.device = &device;
  peer.name = device.info().name;
  return peer;
}

const csd::Command* DeviceReplies::submit(csd::Device& device, csd::Message message, Watch watch) {
  Sent* sent = nullptr;
  {
    const std::lock_guard lock(mutex_);
    if (free_.empty()) free_.push_back(sent_.emplace_back(std::make_unique<Sent>()).get());
    sent = free_.back();
    free_.pop_back();
    sent->message = std::move(message);
    sent->replies = &queue_;
    sent->owner = &device;
    sent->peer = &peer_of(device);
    sent->owed = true;
    const auto* update = sent->as<csd::Update>();
    const bool waits = update != nullptr && (update->mode == plan::UpdateMode::kAsCompleted ||
                                             update->mode == plan::UpdateMode::kOnDemand);
    sent->watched = watch == Watch::kYes && !waits;
    if (sent->watched && sent->peer->owed++ == 0) sent->peer->silent = {};
    ++owed_;
    if (const base::Status why = watch_.given_up(device); !why.ok()) {
      give_up(*sent, why);
      queue_.push({});  // wakes next()
      return sent;
    }
  }
  device.submit(*sent);
  return sent;
}

csd::Completion DeviceReplies::next() {
  csd::Completion completion;
  while (!take(completion, interval_)) look_for_life();
  return completion;
}

csd::Completion DeviceReplies::poll() {
  csd::Completion completion;
  (void)take(completion, std::chrono::nanoseconds(0));
  return completion;
}

bool DeviceReplies::take(csd::Completion& completion, std::chrono::nanoseconds wait) {
  for (;;) {
    completion = {};
    {
      const std::lock_guard lock(mutex_);
      if (answered_ != nullptr) free_.push_back(std::exchange(answered_, nullptr));
      if (closed_) return true;
      if (!given_up_.empty()) {
        completion = std::move(given_up_.front());
        given_up_.pop_front();
        return true;
      }
    }
    if (!queue_.pop(completion, wait)) return false;
    if (completion.command == nullptr) continue;
    const std::lock_guard lock(mutex_);
    Sent& sent = static_cast<Sent&>(*completion.command);
    if (sent.given_up) continue;  // too late
    Peer& peer = *sent.peer;
    peer.silent = {};
    if (completion.event == csd::Completion::Event::kDone) {
      sent.owed = false;
      if (sent.watched) --peer.owed;
      --owed_;
      answered_ = &sent;
    }
    // Devices and stores name themselves where they can.
    if (!completion.status.ok() && completion.status.what().find(peer.name) == std::string::npos &&
        completion.status.place().path.find(peer.name) == std::string::npos) {
      completion.status = std::move(completion.status).with_context("device " + peer.name);
    }
    return true;
  }
}

size_t DeviceReplies::owed() const {
  const std::lock_guard lock(mutex_);
  return owed_;
}

void DeviceReplies::close() {
  const std::lock_guard lock(mutex_);
  closed_ = true;
  queue_.push({});
}

void DeviceReplies::look_for_life() {
  const std::lock_guard lock(mutex_);
  if (closed_) return;
  for (const auto& peer : peers_) {
    if (peer->owed == 0) continue;
    base::Status why = watch_.given_up(*peer->device);
    if (why.ok()) {
      const base::TrafficReading host = peer->device->host_traffic();
      const base::TrafficReading store = peer->device->store_traffic();
      const uint64_t moved =
          host.up_total() + host.down_total() + store.up_total() + store.down_total();
      peer->silent = moved == peer->bytes_moved ? peer->silent + interval_ : interval_;
      peer->bytes_moved = moved;
      if (peer->silent <= watch_.silence_max()) continue;
    }
    for (const auto& sent : sent_) {
      if (sent->peer != peer.get() || !sent->owed) continue;
      if (why.ok()) {
        why = base::Status(
            base::ErrorCode::kTimeout,
            fmt::format(
                "device {} has neither answered \"{}\" nor moved a byte for {}", peer->name,
                csd::message_name(sent->message),
                base::format_seconds(std::chrono::duration<double>(watch_.silence_max()).count())),
            "Check the device and its connection (dmesg shows the kernel's messages), then start "
            "again: the state is recovered to its last committed step.");
        watch_.give_up(*peer->device, why);
      }
      give_up(*sent, why);
    }
  }
}

void DeviceReplies::give_up(Sent& sent, const base::Status& why) {
  sent.owed = false;
  sent.given_up = true;
  if (sent.watched) --sent.peer->owed;
  --owed_;
  given_up_.push_back({&sent, csd::Completion::Event::kDone, {}, why});
}

}  // namespace smartinf::engine
