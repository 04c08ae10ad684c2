#include "smartinf/serve/remote_source.h"

#include <algorithm>
#include <cmath>
#include <type_traits>
#include <utility>

#include <fmt/format.h>

#include "smartinf/serve/client_session.h"
#include "smartinf/serve/remote_device.h"
#include "smartinf/serve/remote_snapshot.h"
#include "smartinf/serve/said_state.h"

namespace smartinf::serve {
namespace {

using base::ErrorCode;
using base::Result;
using base::Status;
using wire::Conversation;
using wire::Endpoint;

// Answers of a check, at most, in which a server says again how far it was.
constexpr uint64_t kStandStillMax = 1000;

/// The answers of a check before its last: it goes on, and no block has more than a fault.
class CheckAnswers {
 public:
  bool take(const wire::Progress& said) {
    if (said.blocks_done > said.blocks_total || said.blocks_done < done_) return false;
    if (said.blocks_done == done_ && ++stood_still_ > kStandStillMax) return false;
    done_ = said.blocks_done;
    blocks_ = std::max(blocks_, said.blocks_total);
    return true;
  }
  /// Some come before the first progress.
  bool take(const storage::StoreFault&) { return ++faults_ <= blocks_ + kStandStillMax; }

 private:
  uint64_t done_ = 0, blocks_ = 0, stood_still_ = 0, faults_ = 0;
};

class RemoteSource final : public csd::DeviceSource {
 public:
  explicit RemoteSource(RemoteDeviceOptions options)
      : options_(std::move(options)), endpoint_(Endpoint::parse(options_.url)) {
    if (options_.name.empty()) options_.name = options_.url;
  }

  const std::string& name() const override { return options_.name; }
  /// Two names of one server are not known to be one.
  std::string place() const override { return options_.url; }
  uint32_t rank() const override { return options_.rank; }

  Result<std::optional<storage::StoreState>> peek() override {
    SI_ASSIGN_OR_RETURN(const auto peeked, ask<wire::Peeked>(wire::Peek{}));
    if (peeked.state) SI_RETURN_IF_ERROR(named(wire::check_said(*peeked.state)));
    return peeked.state;
  }
  Result<storage::StoreSummary> summarize() override {
    SI_ASSIGN_OR_RETURN(auto summary, ask<storage::StoreSummary>(wire::Summarize{}));
    SI_RETURN_IF_ERROR(named(wire::check_said(summary.state, summary.layout)));
    return summary;
  }
  Result<storage::CheckReport> check(
      const storage::CheckOptions& options,
      const std::function<void(const storage::StoreFault&)>& visit) override {
    SI_ASSIGN_OR_RETURN(
        auto report, ask<storage::CheckReport>(wire::Check{options.memory_bytes, options.io_depth,
                                                           options.repair, options.step},
                                               visit, options.progress));
    SI_RETURN_IF_ERROR(named(wire::check_said(report.state)));
    return report;
  }
  Result<std::unique_ptr<csd::Snapshot>> snapshot(storage::ReaderLock lock) override {
    SI_RETURN_IF_ERROR(endpoint_.status());
    return wire::open_remote_snapshot(options_.name, *endpoint_, options_.remote, lock, {});
  }
  Result<std::unique_ptr<csd::NewState>> create_state(
      const storage::StoreLayout& layout, const csd::NewStateOptions& options) override {
    SI_RETURN_IF_ERROR(endpoint_.status());
    return wire::create_remote_state(*endpoint_, options_.remote, layout, options);
  }
  bool keeps_replaced() const override { return described().keeps_replaced; }
  std::string drive() const override { return described().drive; }

  Result<double> bandwidth() override {
    if (options_.bandwidth > 0) return options_.bandwidth;
    if (bandwidth_ == 0) {
      SI_ASSIGN_OR_RETURN(const auto measured, ask<wire::Measured>(wire::Measure{}));
      if (!std::isfinite(measured.bytes_per_second) || measured.bytes_per_second <= 0) {
        return named(wrong_answer());
      }
      bandwidth_ = measured.bytes_per_second;
    }
    return bandwidth_;
  }
  Result<uint64_t> capacity_bytes() override {
    SI_ASSIGN_OR_RETURN(const auto capable, ask<wire::Capable>(wire::Capacity{}));
    return options_.capacity_bytes == 0 ? capable.bytes
                                        : std::min(capable.bytes, options_.capacity_bytes);
  }

  Result<std::unique_ptr<csd::Device>> create(const storage::StoreLayout& layout,
                                              const csd::DeviceShare& share) override {
    return attach(layout, share);
  }
  Result<std::unique_ptr<csd::Device>> open(const csd::DeviceShare& share) override {
    return attach({}, share);
  }
  Status erase() override { return ask<wire::Erased>(wire::Erase{}).status(); }

 private:
  Result<std::unique_ptr<csd::Device>> attach(std::optional<storage::StoreLayout> create,
                                              const csd::DeviceShare& share) {
    SI_RETURN_IF_ERROR(endpoint_.status());
    wire::Attach request;
    request.create = std::move(create);
    request.share = share;
    request.wishes = options_.wishes;
    wire::Attached attached;
    SI_ASSIGN_OR_RETURN(
        auto session, wire::ClientSession::attach(*endpoint_, options_.remote, request, attached));
    SI_RETURN_IF_ERROR(named(wire::check_said(attached.standing.state, attached.layout)));
    if (request.create && !wire::same_layout(*request.create, attached.layout)) {
      return named(wrong_answer());
    }
    return wire::make_remote_device(options_.name, *endpoint_, options_.remote, std::move(session),
                                    std::move(attached), share);
  }

  static Status wrong_answer() {
    return Status(ErrorCode::kCorrupt, "the server answered something else",
                  "This is a bug in smartinf; please report it.");
  }
  Status named(Status status) const {
    return std::move(status).with_context(
        fmt::format("server {}, device {}", endpoint_->address, endpoint_->device));
  }

  /// One question on a stream of its own.
  template <typename Wanted, typename Asked>
  Result<Wanted> ask(const Asked& question,
                     const std::function<void(const storage::StoreFault&)>& visit = {},
                     const std::function<Status(uint64_t, uint64_t)>& progress = {}) const {
    SI_RETURN_IF_ERROR(endpoint_.status());
    SI_ASSIGN_OR_RETURN(Conversation talk,
                        Conversation::begin(*endpoint_, options_.remote, wire::Purpose::kAsk));
    SI_RETURN_IF_ERROR(talk.say(wire::Ask(question)));
    constexpr bool kIsCheck = std::is_same_v<Asked, wire::Check>;
    CheckAnswers before_last;
    for (;;) {
      SI_ASSIGN_OR_RETURN(wire::Answer answer, talk.hear<wire::Answer>());
      if (auto* wanted = std::get_if<Wanted>(&answer)) return std::move(*wanted);
      const auto* fault = std::get_if<storage::StoreFault>(&answer);
      const auto* done = std::get_if<wire::Progress>(&answer);
      if (kIsCheck && fault != nullptr && before_last.take(*fault)) {
        if (visit) visit(*fault);
      } else if (kIsCheck && done != nullptr && before_last.take(*done)) {
        if (progress) SI_RETURN_IF_ERROR(progress(done->blocks_done, done->blocks_total));
      } else {
        const auto* failed = std::get_if<Status>(&answer);
        if (failed != nullptr && !failed->ok()) {
          return talk.named(*failed);
        }
        return talk.named(wrong_answer());
      }
    }
  }

  /// Empty where nobody answers: whoever asks next is told why.
  const wire::Described& described() const {
    if (!described_) {
      auto answer = ask<wire::Described>(wire::Describe{});
      if (!answer.ok()) return nothing_;
      described_ = std::move(*answer);
    }
    return *described_;
  }

  RemoteDeviceOptions options_;
  const Result<Endpoint> endpoint_;
  double bandwidth_ = 0;
  mutable std::optional<wire::Described> described_;
  const wire::Described nothing_;
};

}  // namespace

std::unique_ptr<csd::DeviceSource> remote_source(RemoteDeviceOptions options) {
  return std::make_unique<RemoteSource>(std::move(options));
}

}  // namespace smartinf::serve
