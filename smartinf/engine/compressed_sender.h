// Compresses a step's gradients on several threads and sends them to their devices. While one
// message is on its way, its thread makes the next.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "smartinf/base/status.h"
#include "smartinf/base/thread_team.h"
#include "smartinf/compress/gradient_compressor.h"
#include "smartinf/csd/device.h"
#include "smartinf/engine/device_replies.h"

namespace smartinf::engine {

class CompressedSender {
 public:
  /// Compressor and team outlive this. Each thread of the team needs two messages and a Scratch.
  CompressedSender(compress::GradientCompressor& compressor, base::ThreadTeam& team,
                   DeviceWatch& watch);

  struct Piece {
    const plan::Subgroup* subgroup = nullptr;
    csd::Device* device = nullptr;
    std::vector<plan::GroupSpan> skipped;  // as compress::GradientCompressor::compress()
  };
  struct Failure {
    base::Status status;
    const csd::Device* device = nullptr;  // whose it is
    base::SubgroupId subgroup;
  };
  /// The message of every piece; when it returns, every device has what was sent to it. Gives up
  /// after the first failure. Threads: one at a time, and nobody else submits to the devices.
  Failure send(std::span<const Piece> pieces);

 private:
  struct Outgoing {
    compress::CompressedWriter writer;
    const csd::Command* in_flight = nullptr;
  };
  struct Worker {
    compress::GradientCompressor::Scratch scratch;
    std::array<Outgoing, 2> outgoing;
    size_t turn = 0;
    DeviceReplies replies;
    explicit Worker(DeviceWatch& watch) : replies(watch) {}
  };
  void send_one(Worker& worker, const Piece& piece);
  void wait_for(Worker& worker, const Outgoing& outgoing);

  compress::GradientCompressor& compressor_;
  base::ThreadTeam& team_;
  DeviceWatch& watch_;
  std::vector<std::unique_ptr<Worker>> workers_;  // made when first needed
  std::mutex mutex_;                              // of failure_
  std::atomic<bool> failed_{false};
  Failure failure_;
};

}  // namespace smartinf::engine
