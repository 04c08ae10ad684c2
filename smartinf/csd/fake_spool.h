// The spool of the fake device. For tests.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <vector>

#include "smartinf/base/traffic.h"
#include "smartinf/csd/device.h"

namespace smartinf::csd {

/// Carries out a family of messages for the fake device (BesideAccess for devices).
class FakeAccess {
 public:
  virtual ~FakeAccess() = default;
  virtual bool serves(const Command& command) const = 0;
  virtual base::Status carry_out(const Command& command) = 0;

  base::TrafficCounter* host = nullptr;  // the device's
  base::TrafficCounter* store = nullptr;
};

class FakeSpool final : public FakeAccess {
 public:
  explicit FakeSpool(uint64_t bytes) : bytes_(bytes) {}

  bool serves(const Command& command) const override {
    return command.as<PutSpool>() != nullptr || command.as<GetSpool>() != nullptr;
  }
  base::Status carry_out(const Command& command) override {
    const auto* put = command.as<PutSpool>();
    return put != nullptr ? this->put(*put) : get(*command.as<GetSpool>());
  }

 private:
  base::Status put(const PutSpool& put) {
    const uint64_t bytes = put.bytes.size();
    SI_RETURN_IF_ERROR(check_spool(put.offset_bytes, put.bytes, bytes_.size()));
    std::erase_if(spans_, [&](const auto& span) {
      return span.first < put.offset_bytes + bytes && put.offset_bytes < span.first + span.second;
    });
    spans_[put.offset_bytes] = bytes;
    std::ranges::copy(put.bytes, bytes_.begin() + static_cast<ptrdiff_t>(put.offset_bytes));
    host->add_down(base::TrafficKind::kActivation, bytes);
    store->add_down(base::TrafficKind::kActivation, bytes);
    return base::Status();
  }
  base::Status get(const GetSpool& get) {
    const uint64_t bytes = get.out.size();
    SI_RETURN_IF_ERROR(check_spool(get.offset_bytes, get.out, bytes_.size()));
    const auto found = spans_.find(get.offset_bytes);
    if (found == spans_.end() || found->second != bytes) {
      return base::Status(base::ErrorCode::kFailedPrecondition, "it was not put");
    }
    std::copy_n(bytes_.begin() + static_cast<ptrdiff_t>(get.offset_bytes), bytes, get.out.begin());
    host->add_up(base::TrafficKind::kActivation, bytes);
    store->add_up(base::TrafficKind::kActivation, bytes);
    return base::Status();
  }

  std::vector<std::byte> bytes_;
  std::map<uint64_t, uint64_t> spans_;  // offset -> bytes
};

}  // namespace smartinf::csd
