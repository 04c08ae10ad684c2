// Messages between the stages of a pipeline: activations to the stage behind, their gradients to
// the one before. Receives are posted ahead, and nobody waits for what was sent until much more
// was, so that messages are on their way while stages compute. In training they may go in a short
// form (train/gradient_codec.h), which a thread makes meanwhile.
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
    bool folds = false;            // the first one computes the head
  };
  /// activations: their type, and where stages compute. in_flight: messages of each way that are
  /// sent and not waited for, at most. compression: in training.
  StageLink(std::shared_ptr<engine::Collectives> ranks, Ends ends,
            const torch::TensorOptions& activations, uint64_t in_flight,
            const StageCompression& compression = {});

  bool first() const { return !ends_.before; }

  /// A step of so many micro batches begins, which finish() ends; gradients come and go in their
  /// order.
  void begin_step(uint64_t micro_batches);
  /// The next `count` messages of a way have these sizes; so many of them are awaited at once.
  /// Those of before have been taken.
  void expect(Way way, std::vector<int64_t> sizes, uint64_t count, uint64_t at_once = 1);
  torch::Tensor receive(Way way);
  void send(Way way, const torch::Tensor& tensor);
  /// Waits until all that was sent is gone.
  void finish();
  /// The head's stage's, [size], on all stages.
  torch::Tensor from_head(const torch::Tensor& mine, int64_t size);

  /// Bytes sent, and seconds waited, of all time.
  uint64_t sent_bytes() const { return sent_bytes_; }
  double waited_s() const { return waited_s_; }

 private:
  struct Message {
    torch::Tensor tensor;  // in the host's memory
    std::unique_ptr<engine::Collectives::Pending> pending;
    bool is_short = false;
    std::future<base::Status> started = {};  // valid: the thread fills in what is above
  };
  struct Line {
    StageCompression form;  // kNone: all go whole
    GradientCodec codec;    // the thread's, between steps the caller's
    std::vector<int64_t> sizes = {};
    uint64_t to_post = 0;
    uint64_t awaited = 0;  // of the step, so far
    uint64_t sent = 0;
    std::deque<Message> receiving = {};
    std::deque<Message> sending = {};
  };
  Line& line(Way way) { return lines_[static_cast<size_t>(way)]; }
  void post(Way way);
  /// shorten: by the thread, as all messages go of a way that has a short form.
  void start_send(Way way, const torch::Tensor& tensor, uint32_t to,
                  std::optional<bool> shorten = std::nullopt);
  base::Status send_now(Message& message, engine::Channel channel, uint32_t to);
  void wait(Message& message);
  /// Whether a way has a short form in this step.
  bool shortens(const Line& line) const;
  /// Whether what the stage at this place of the column sends goes in it.
  bool is_short(Way way, size_t stage, uint64_t micro_batch) const;

  const std::shared_ptr<engine::Collectives> ranks_;
  const Ends ends_;
  const torch::TensorOptions activations_;
  const uint64_t in_flight_;
  size_t stage_ = 0;  // place in the column
  Line lines_[2];
  uint64_t sent_bytes_ = 0;
  double waited_s_ = 0;
  uint64_t micro_batches_ = 0;  // of the step; 0: none is computed

  std::mutex starting_;                             // messages
  base::Worker<std::function<void()>> compressor_;  // the last: it uses all others
};

}  // namespace smartinf::train
