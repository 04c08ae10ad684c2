// Commands to devices and the wait for their answers: the one place where the engine waits for a
// device. One that shows no sign of life for too long is given up: an error that names it takes the
// place of every answer that it owes, and of every later one.
//
// An update of subgroups as their gradients become complete, or as their weights are asked for,
// waits for the trainer, however long that computes: only commands behind it are watched.
//
// What a device that was given up still has in hand stays in memory until the device is destroyed,
// because it may yet be read or written.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "smartinf/base/status.h"
#include "smartinf/csd/device.h"

namespace smartinf::engine {

/// Which devices were given up: what all who speak to them share. Threads: any.
class DeviceWatch {
 public:
  /// silence_max: UpdaterOptions::device_silence_max.
  explicit DeviceWatch(std::chrono::nanoseconds silence_max) : silence_max_(silence_max) {}

  std::chrono::nanoseconds silence_max() const { return silence_max_; }
  /// Why the device was given up; ok: it was not.
  base::Status given_up(const csd::Device& device) const;
  void give_up(const csd::Device& device, const base::Status& why);

 private:
  const std::chrono::nanoseconds silence_max_;
  mutable std::mutex mutex_;
  std::map<const csd::Device*, base::Status> given_up_;
};

/// Threads: submit() and close() from any, next() from one. The devices are destroyed first.
class DeviceReplies {
 public:
  explicit DeviceReplies(DeviceWatch& watch);

  /// kNo: what the command waits for is not the device's doing.
  enum class Watch : uint8_t { kYes, kNo };
  /// Command::owner is the device. The command stays here.
  const csd::Command* submit(csd::Device& device, csd::Message message, Watch watch = Watch::kYes);
  /// The next answer; waits for it. A failure names the device. The command is there until the
  /// call that follows; null: closed.
  csd::Completion next();
  /// The next answer if it is there already; else, and when closed, its command is null.
  csd::Completion poll();
  /// Commands whose kDone is still to come.
  size_t owed() const;
  /// Ends the wait of next(), which reads no device from then on.
  void close();

 private:
  struct Peer {
    csd::Device* device = nullptr;
    std::string name;
    size_t owed = 0;           // of those that are watched
    uint64_t bytes_moved = 0;  // over its links and at its store, when last looked at
    std::chrono::nanoseconds silent{0};
  };
  struct Sent : csd::Command {
    Peer* peer = nullptr;
    bool owed = false;
    bool watched = true;    // the device says nothing of it for too long only when it is stuck
    bool given_up = false;  // never used again
  };
  Peer& peer_of(csd::Device& device);
  /// False: none came within `wait`.
  bool take(csd::Completion& completion, std::chrono::nanoseconds wait);
  void look_for_life();
  void give_up(Sent& sent, const base::Status& why);

  DeviceWatch& watch_;
  const std::chrono::nanoseconds interval_;  // between looks at devices that are silent
  csd::CompletionQueue queue_;

  mutable std::mutex mutex_;  // of everything below
  std::vector<std::unique_ptr<Peer>> peers_;
  std::vector<std::unique_ptr<Sent>> sent_;  // bound: as many as were ever owed at once
  std::vector<Sent*> free_;
  Sent* answered_ = nullptr;              // by the last next()
  std::deque<csd::Completion> given_up_;  // answers in the devices' place
  size_t owed_ = 0;
  bool closed_ = false;
};

}  // namespace smartinf::engine
