// Collective calls of several ranks: what their processes do together, over memory of the host and
// on bytes. The trainer implements them over torch's process groups; tests over threads.
//
// A rank that died, hangs or gave up shows as the error of a call, which names it, on every other
// rank. All later calls then fail with the same error: the processes end, and opening the devices
// again recovers the last committed step.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "smartinf/base/status.h"

namespace smartinf::engine {

/// Collective calls of one channel are started in the same order by all ranks. Channels do not wait
/// for each other.
enum class Channel : uint8_t {
  kControl,    // what the callers of the updater decide together, and what the trainer does
  kGradients,  // a step's gradients, then its commit
  kWeights,
  kForward,   // from a stage to the one behind
  kBackward,  // and to the one before
};
inline constexpr size_t kChannels = 5;

/// Threads: calls of a channel are started by one thread at a time, those of different ones at
/// once; what was started may be waited for on another thread meanwhile. Errors of all calls:
/// kTimeout, kIo or what the rank that gave up said; each names the rank.
class Collectives {
 public:
  /// A call that was started. Its memory stays as it is until wait() has returned, which is called
  /// once, or this is destroyed; nothing reads or writes it after that, however the call has ended.
  class Pending {
   public:
    virtual ~Pending() = default;
    virtual base::Status wait() = 0;
  };
  using Started = base::Result<std::unique_ptr<Pending>>;

  virtual ~Collectives() = default;

  virtual uint32_t rank() const = 0;
  virtual uint32_t world() const = 0;
  /// The number that a rank has in messages: of a group's, that of the run.
  virtual uint32_t rank_of_run(uint32_t rank) const { return rank; }

  /// Some of these ranks, in this order, among themselves; null on a rank that is not one of them.
  /// All ranks make the same groups in the same order. A failure of any rank of the run is one of
  /// the group's. Errors: kUnsupported for a group of a group.
  virtual base::Result<std::shared_ptr<Collectives>> group(std::span<const uint32_t> ranks);
  /// A message to one rank, which receives as many bytes. Those from one rank to another arrive in
  /// the order in which they were sent on a channel, whatever else goes on there.
  virtual Started send(Channel channel, std::span<const std::byte> bytes, uint32_t to);
  virtual Started receive(Channel channel, std::span<std::byte> bytes, uint32_t from);

  /// send: what goes to rank 0, then what goes to rank 1 and so on, send_bytes[r] each; receive
  /// likewise from each rank. Both have world() sizes, which agree with the other ranks'; 0 is
  /// allowed, also for all.
  virtual Started all_to_all(Channel channel, std::span<const std::byte> send,
                             std::span<const uint64_t> send_bytes, std::span<std::byte> receive,
                             std::span<const uint64_t> receive_bytes) = 0;
  /// Root's bytes to all. The size is the same on all ranks.
  virtual Started broadcast(Channel channel, std::span<std::byte> bytes, uint32_t root) = 0;
  /// all: world() times mine.size(), by rank. The size is the same on all ranks.
  virtual Started all_gather(Channel channel, std::span<const std::byte> mine,
                             std::span<std::byte> all) = 0;
  virtual base::Status barrier(Channel channel) = 0;

  /// Waits until all ranks have come to this call, each as often as this one, for as long as they
  /// live: before a call on kControl to which ranks come at very different times. By default it
  /// does not wait, for collective calls without a limit in time.
  virtual base::Status barrier_without_timeout() { return base::Status(); }

  /// This rank gives up: calls of the other ranks fail with this, the rank's name in front, also
  /// those that wait now. Only the first failure of all ranks counts. Any thread.
  virtual void failed(const base::Status& why) = 0;
};

// ---- Calls that wait.

base::Status broadcast(Collectives& ranks, Channel channel, std::span<std::byte> bytes,
                       uint32_t root);
/// Root's text on every rank.
base::Status broadcast(Collectives& ranks, Channel channel, std::string& text, uint32_t root);
base::Status all_gather(Collectives& ranks, Channel channel, std::span<const std::byte> mine,
                        std::span<std::byte> all);
/// Every rank's text, by rank; of any size.
base::Result<std::vector<std::string>> all_gather(Collectives& ranks, Channel channel,
                                                  std::string_view mine);

/// As many values of each rank, by rank.
template <typename T>
base::Result<std::vector<T>> all_gather_values(Collectives& ranks, Channel channel,
                                               std::span<const T> mine) {
  static_assert(std::is_trivially_copyable_v<T>);
  std::vector<T> all(mine.size() * ranks.world());
  SI_RETURN_IF_ERROR(
      all_gather(ranks, channel, std::as_bytes(mine), std::as_writable_bytes(std::span(all))));
  return all;
}

/// Outcome on which the ranks have agreed.
struct Agreement {
  /// Ok on all ranks; else the first failure, with the same text everywhere. It names the rank,
  /// but where all have failed alike.
  base::Status status;
  /// False: this rank does not know what the others know. status says why.
  bool known = true;
};
/// call: what this rank is about. Where the ranks are not about the same it fails, on all of them.
Agreement agree(Collectives& ranks, Channel channel, std::string_view call,
                const base::Status& mine);
/// Its status.
base::Status all_ok(Collectives& ranks, Channel channel, std::string_view call,
                    const base::Status& mine);

}  // namespace smartinf::engine
