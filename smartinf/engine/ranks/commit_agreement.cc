#include "smartinf/engine/ranks/commit_agreement.h"

#include <utility>

#include <pthread.h>

#include "smartinf/base/check.h"

namespace smartinf::engine {

CommitAgreement::CommitAgreement(std::shared_ptr<Collectives> ranks, Then then)
    : ranks_(std::move(ranks)), then_(std::move(then)) {
  thread_ = std::jthread([this] { work(); });
  pthread_setname_np(thread_.native_handle(), "si-commit");
}

CommitAgreement::~CommitAgreement() {
  {
    const std::lock_guard lock(mutex_);
    ends_ = true;
  }
  changed_.notify_all();
}

void CommitAgreement::ask(std::string call, base::Status mine) {
  {
    const std::lock_guard lock(mutex_);
    SI_CHECK(!question_.has_value(), "ranks are asked two things at once");
    question_ = {std::move(call), std::move(mine)};
  }
  changed_.notify_all();
}

void CommitAgreement::work() {
  while (true) {
    Question question;
    {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] { return ends_ || question_.has_value(); });
      if (!question_.has_value()) return;
      question = std::move(*question_);
      question_.reset();
    }
    then_(agree(*ranks_, Channel::kGradients, question.call, question.mine));
  }
}

}  // namespace smartinf::engine
