// Messages between the stages of a pipeline: activations to the stage behind, their gradients to
// the one before. Receives are posted ahead, and nobody waits for what was sent until much more
// was, so that messages are on their way while stages compute.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <vector>

#include <torch/types.h>

#include "smartinf/engine/ranks/collectives.h"

namespace smartinf::train {

/// Threads: one caller. Errors: StatusError of the ranks.
class StageLink {
 public:
  enum class Way : uint8_t { kForward, kBackward };
  struct Ends {
    std::optional<uint32_t> before;  // ranks; none: this is the first stage, or the last
    std::optional<uint32_t> behind;
    std::vector<uint32_t> column;  // of all stages of this replica, the first one's first
  };
  /// activations: their type, and where stages compute. in_flight: messages of each way that are
  /// sent and not waited for, at most.
  StageLink(std::shared_ptr<engine::Collectives> ranks, Ends ends,
            const torch::TensorOptions& activations, uint64_t in_flight);

  bool first() const { return !ends_.before; }
  bool last() const { return !ends_.behind; }

  /// The next `count` messages of a way have these sizes; so many of them are awaited at once.
  /// Those of before have been taken.
  void expect(Way way, std::vector<int64_t> sizes, uint64_t count, uint64_t at_once = 1);
  torch::Tensor receive(Way way);
  void send(Way way, const torch::Tensor& tensor);
  /// Waits until all that was sent is gone.
  void finish();
  /// The last stage's, [size], on all stages.
  torch::Tensor from_last(const torch::Tensor& mine, int64_t size);

  /// Bytes sent, and seconds waited, of all time.
  uint64_t sent_bytes() const { return sent_bytes_; }
  double waited_s() const { return waited_s_; }

 private:
  struct Message {
    torch::Tensor tensor;  // in the host's memory
    std::unique_ptr<engine::Collectives::Pending> pending;
  };
  struct Line {
    std::vector<int64_t> sizes;
    uint64_t to_post = 0;
    std::deque<Message> receiving;
    std::deque<Message> sending;
  };
  Line& line(Way way) { return lines_[static_cast<size_t>(way)]; }
  void post(Way way);
  void start_send(Line& line, engine::Channel channel, const torch::Tensor& tensor, uint32_t to);
  void wait(engine::Collectives::Pending& pending);

  const std::shared_ptr<engine::Collectives> ranks_;
  const Ends ends_;
  const torch::TensorOptions activations_;
  const uint64_t in_flight_;
  Line lines_[2];
  uint64_t sent_bytes_ = 0;
  double waited_s_ = 0;
};

}  // namespace smartinf::train
