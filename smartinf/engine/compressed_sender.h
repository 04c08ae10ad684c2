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
#include "smartinf/csd/device.h"
#include "smartinf/engine/gradient_compressor.h"

namespace smartinf::engine {

class CompressedSender {
 public:
  /// More threads than this are faster than any link. What each needs: two messages and a Scratch.
  static constexpr uint32_t kThreadsMax = 8;
  /// As many as there are cores, within that.
  static uint32_t default_threads();

  /// threads: 0: default_threads(). The compressor outlives this.
  CompressedSender(GradientCompressor& compressor, uint32_t threads);

  struct Piece {
    const plan::Subgroup* subgroup = nullptr;
    csd::Device* device = nullptr;
    std::vector<plan::GroupStretch> sits_out;  // as GradientCompressor::compress()
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
    csd::CompressedWriter writer;
    csd::Command command;
    bool in_flight = false;
  };
  struct Worker {
    GradientCompressor::Scratch scratch;
    std::array<Outgoing, 2> outgoing;
    csd::CompletionQueue replies;
  };
  void work(Worker& worker, std::span<const Piece> pieces);
  void wait_for(Worker& worker, const Outgoing& outgoing);

  GradientCompressor& compressor_;
  std::vector<std::unique_ptr<Worker>> workers_;
  std::atomic<size_t> next_{0};
  std::mutex mutex_;  // of the devices' submit() and of failure_
  std::atomic<bool> failed_{false};
  Failure failure_;
};

}  // namespace smartinf::engine
