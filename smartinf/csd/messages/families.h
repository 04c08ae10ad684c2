// All families of messages. A new one is named here and has: a header as step.h, an access that
// serves it (beside_access.h), and one of the fake device (fake_device.h). See docs/devices.md.
#pragma once

#include <string_view>
#include <variant>

#include "smartinf/base/status.h"
#include "smartinf/csd/messages/cache/cache.h"
#include "smartinf/csd/messages/rows/rows.h"
#include "smartinf/csd/messages/spool.h"
#include "smartinf/csd/messages/step.h"
#include "smartinf/csd/messages/weights.h"

namespace smartinf::csd {

template <typename... Families>
struct JoinFamilies;
template <typename... Messages>
struct JoinFamilies<std::variant<Messages...>> {
  using Type = std::variant<Messages...>;
};
template <typename... A, typename... B, typename... Rest>
struct JoinFamilies<std::variant<A...>, std::variant<B...>, Rest...>
    : JoinFamilies<std::variant<A..., B...>, Rest...> {};

using Message =
    JoinFamilies<StepMessage, WeightsMessage, SpoolMessage, CacheMessage, RowsMessage>::Type;

/// As in error texts and traces: "begin step".
inline std::string_view message_name(const Message& message) {
  return std::visit([](const auto& one) { return one.kName; }, message);
}

/// A message that a device may take whenever it comes, and one without memory.
template <typename One>
base::Status check(const One&, const DeviceSpace&) {
  return base::Status();
}
template <typename Visit, typename One, typename Space>
void memory(Visit&, One&, const Space&) {}

}  // namespace smartinf::csd
