// The question between prepare and commit, and the one after it (step_protocol.h), asked of all
// ranks by a thread of its own, so that the caller may compute meanwhile.
#pragma once

#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>

#include "smartinf/base/status.h"
#include "smartinf/engine/ranks/collectives.h"

namespace smartinf::engine {

/// Over Channel::kGradients, on which nothing else is going on during a commit.
class CommitAgreement {
 public:
  /// then: called on the thread, with what all ranks have said; it may ask again.
  using Then = std::function<void(Agreement)>;
  CommitAgreement(std::shared_ptr<Collectives> ranks, Then then);
  /// Waits for what was asked.
  ~CommitAgreement();
  CommitAgreement(const CommitAgreement&) = delete;
  CommitAgreement& operator=(const CommitAgreement&) = delete;

  /// As agree() does; returns at once. One question at a time.
  void ask(std::string call, base::Status mine);

 private:
  struct Question {
    std::string call;
    base::Status mine;
  };
  void work();

  const std::shared_ptr<Collectives> ranks_;
  const Then then_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::optional<Question> question_;
  bool ends_ = false;
  std::jthread thread_;
};

}  // namespace smartinf::engine
