// A step's gradients on their way to the ranks whose devices have them. Each rank gives its own
// sums over micro batches; a rank gets those of all ranks for the elements that it has, adds them
// up by the tree over micro batches (plan/micro_batches.h) and hands the sums to its devices.
//
// Spans are collected into buckets, which all ranks cut alike, and each bucket is one all_to_all. A
// thread takes the buckets as they arrive, so that the caller goes on with its backward. What one
// rank alone has summed for devices of its own goes to them at once, and nobody waits for that:
// where stages meet a piece has parts of both kinds, and its subgroups would be incomplete until a
// bucket is full.
//
// Replicas may send their sums compressed (compressed_sums.h): a message of each piece in the place
// of the sums, and what all of them say is added up in the order of the ranks.
//
// The norm is measured piece by piece (gradient_tracker.h). A piece that reaches over subgroups of
// several ranks goes whole to the rank of its first element, which measures it, and its parts go to
// the others as well.
#pragma once

#include <array>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "smartinf/base/status.h"
#include "smartinf/base/traffic.h"
#include "smartinf/base/worker.h"
#include "smartinf/engine/device_updater.h"
#include "smartinf/engine/ranks/collectives.h"
#include "smartinf/engine/ranks/compressed_sums.h"
#include "smartinf/engine/ranks/gradient_layout.h"
#include "smartinf/engine/updater.h"
#include "smartinf/plan/rank_share.h"

namespace smartinf::engine {

/// Threads: one caller. A step: put ..., then finish() or drop().
class GradientExchange {
 public:
  /// updater: of this rank. rank_of: of each subgroup. compressed: what replicas of the first
  /// `compressed_stages` send; null: nothing is compressed. All that is referred to outlives this.
  GradientExchange(std::shared_ptr<Collectives> ranks, DeviceUpdater& updater,
                   const std::vector<uint32_t>& rank_of, base::TrafficCounter& traffic,
                   CompressedSums* compressed, uint32_t compressed_stages);
  /// Waits for what is under way.
  ~GradientExchange() = default;
  GradientExchange(const GradientExchange&) = delete;
  GradientExchange& operator=(const GradientExchange&) = delete;

  /// holders: of each tree. Errors: kInvalidArgument for other nodes than the rank's.
  base::Status check(const GradientSums& sums, const std::vector<Holders>& holders);
  /// Pieces of a span that begins at `first`, taken by the updater; sums that were checked. What
  /// fails is kept for finish().
  void put(std::span<const GradientTracker::Piece> pieces, uint64_t first, const GradientSums& sums,
           const std::vector<Holders>& holders);
  /// Sends what was put and waits for all of it. Errors: of a device here, or of a call.
  base::Status finish();
  /// The step is given up, or another begins: what was not sent is forgotten, and what failed.
  void drop();
  /// After finish() on all ranks: what each rank has measured, on every rank.
  base::Status share_norms();

  /// Checksum of the spans that were put in this step: the same on all ranks.
  uint64_t spans_checksum() const { return spans_checksum_; }

 private:
  struct Segment {
    GradientTracker::Piece piece;
    const SumFormat* format = nullptr;
    std::vector<const std::byte*> nodes;  // of this rank: the caller's memory
    std::optional<size_t> kept_at;        // in kept_, all nodes one after another, or a message
  };
  /// A part of a piece that this rank has received, of all ranks' nodes, or their messages.
  struct Received {
    GradientPart part;
    const SumFormat* format = nullptr;
    std::vector<const std::byte*> nodes;
    std::optional<GradientTracker::Piece> compressed;  // the whole piece, of messages
  };
  struct Bucket {
    std::vector<std::pair<GradientTracker::Piece, const SumFormat*>> pieces;
    std::vector<std::byte> send, receive;
    std::vector<uint64_t> send_bytes, receive_bytes;
    uint64_t own_at = 0;  // in send, where what stays here begins
    std::unique_ptr<Collectives::Pending> pending;
  };

  /// Parts that go by buckets: not those that the only rank with sums has devices for.
  template <typename Visit>
  void visit_sent(const GradientTracker::Piece& piece, const SumFormat& format,
                  const Visit& visit) const {
    layout_.visit_parts(piece, [&](uint32_t rank, const GradientPart& part) {
      if (format.only != rank) visit(rank, part);
    });
  }
  void put_home(std::span<const Received> parts);
  /// Whether each rank sends its sum of a piece in a message.
  bool compresses(const GradientTracker::Piece& piece, const SumFormat& format) const;
  /// Bytes that a rank sends for a part of a piece.
  uint64_t part_bytes(uint32_t rank, const GradientTracker::Piece& piece, const SumFormat& format,
                      uint64_t count) const;
  void add(Segment segment);
  void compress(Segment& segment);
  void keep_values();
  void close_bucket();
  void lay_out(Bucket& bucket);
  void fill(Bucket& bucket);

  // The thread.
  void work(Bucket& bucket);
  base::Status receive(Bucket& bucket);
  std::vector<Received> received_in(const Bucket& bucket) const;

  // The thread, and the caller for what stays here.
  base::Status submit_all(std::span<const Received> parts);
  base::Status submit(std::span<const Received> run);
  base::Status add_messages(const Received& received, float* out,
                            std::vector<float>& scratch) const;
  void add_up(const Received& received, float* out, std::vector<float>& stack) const;

  const std::shared_ptr<Collectives> ranks_;
  DeviceUpdater& updater_;
  const GradientLayout layout_;
  const uint64_t bucket_bytes_;
  const std::vector<uint32_t> measured_by_;  // of each piece of the space
  base::TrafficCounter& traffic_;
  CompressedSums* const compressed_;
  const uint32_t compressed_stages_;
  SumFormats formats_;

  uint64_t spans_checksum_ = 0;
  // The open bucket.
  std::vector<Segment> open_;
  std::vector<std::byte> kept_;          // values of it
  std::vector<uint64_t> open_received_;  // bytes that each rank will have received
  uint64_t open_sent_ = 0;               // bytes of the rank that sends most, as if all were dense
  std::vector<float> sum_;               // of a piece that is compressed

  std::mutex submitting_;                   // of the devices and what follows
  std::vector<float> sums_;                 // of parts that follow each other
  std::vector<std::vector<float>> stacks_;  // of each worker of the team

  mutable std::mutex mutex_;  // of everything below
  std::condition_variable changed_;
  std::vector<Bucket*> free_;
  base::Status status_;       // of the step: what failed first
  base::Status call_status_;  // of the ranks: nothing is sent any more

  std::array<Bucket, plan::kRankBuckets> buckets_;
  base::Worker<Bucket*> worker_;  // of buckets under way; the last: it uses all others
};

}  // namespace smartinf::engine
