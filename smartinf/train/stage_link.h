// Messages between the stages of a pipeline: activations to the stage behind, their gradients to
// the one before. Receives are posted ahead, and nobody waits for what was sent until much more
// was, so that messages are on their way while stages compute. Gradients may go in a short form
// (train/gradient_codec.h), which a thread makes meanwhile.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include <torch/types.h>

#include "smartinf/base/worker.h"
#include "smartinf/engine/ranks/collectives.h"
#include "smartinf/train/gradient_codec.h"

namespace smartinf::train {

/// Threads: one caller. Errors: StatusError of the ranks.
class StageLink {
 public:
  enum class Way : uint8_t { kForward, kBackward };
  struct Ends {
    std::optional<uint32_t> before;  // ranks; none: this is the first stage, or the last, and
    std::optional<uint32_t> behind;  // stages have one chunk each
    std::vector<uint32_t> column;  // of all stages of this replica, the first one's first
  };
  /// activations: their type, and where stages compute. in_flight: messages of each way that are
  /// sent and not waited for, at most. compression: of gradients in training.
  StageLink(std::shared_ptr<engine::Collectives> ranks, Ends ends,
            const torch::TensorOptions& activations, uint64_t in_flight,
            const StageCompression& compression = {});

  bool first() const { return !ends_.before; }

  /// A step of so many micro batches begins; gradients come and go in their order.
  void begin_step(uint64_t micro_batches);
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
    bool compressed = false;
    std::future<base::Status> started = {};  // valid: the thread fills in what is above
  };
  struct Line {
    std::vector<int64_t> sizes;
    uint64_t to_post = 0;
    std::deque<Message> receiving;
    std::deque<Message> sending;
  };
  Line& line(Way way) { return lines_[static_cast<size_t>(way)]; }
  void post(Way way);
  /// compress: by the thread, as all gradients of a step go that may be.
  void start_send(Line& line, engine::Channel channel, const torch::Tensor& tensor, uint32_t to,
                  std::optional<bool> compress = std::nullopt);
  base::Status send_now(Message& message, engine::Channel channel, uint32_t to);
  void wait(Message& message);
  /// Whether the gradient that the stage at this place of the column sends is compressed.
  bool is_compressed(size_t stage, uint64_t micro_batch) const;

  const std::shared_ptr<engine::Collectives> ranks_;
  const Ends ends_;
  const torch::TensorOptions activations_;
  const uint64_t in_flight_;
  const StageCompression compression_;
  size_t stage_ = 0;  // place in the column
  Line lines_[2];
  uint64_t sent_bytes_ = 0;
  double waited_s_ = 0;
  // Of the step: gradients so far.
  uint64_t micro_batches_ = 0;
  uint64_t awaited_ = 0;
  uint64_t sent_ = 0;

  GradientCodec codec_;                             // the thread's, between steps the caller's
  std::mutex starting_;                             // messages on Channel::kBackward
  base::Worker<std::function<void()>> compressor_;  // the last: it uses all others
};

}  // namespace smartinf::train
