#include "smartinf/csd/messages/cache/cache.h"

#include "smartinf/csd/device_space.h"

namespace smartinf::csd {

using base::ErrorCode;
using base::Status;

namespace {

// Bounds of what a message can make a device compute with: sums of products of them fit 64 bits.
constexpr uint32_t kLayersMax = 1 << 16;
constexpr uint32_t kHeadsMax = 1 << 14;
constexpr uint32_t kHeadWidthMax = 1 << 14;

}  // namespace

Status check_shape(const OpenCache& message) {
  const auto& [block, heads, scale, softcap] = message.shape;
  const bool fits = message.layers > 0 && message.layers <= kLayersMax && block.kv_heads > 0 &&
                    heads > 0 && heads <= kHeadsMax && heads % block.kv_heads == 0 &&
                    block.head_width > 0 && block.head_width <= kHeadWidthMax &&
                    message.device_index < message.device_count;
  if (fits) return Status();
  return Status(ErrorCode::kInvalidArgument, "a cache of a shape that no model has");
}

Status check(const OpenCache& message, const DeviceSpace&) { return check_shape(message); }

Status check(const Attend& message, const DeviceSpace&) {
  const bool fits =
      !message.query.empty() && !message.state_out.empty() &&
      (message.state_in.empty() || message.state_in.size() == message.state_out.size()) &&
      (message.query.size() | message.state_out.size()) % sizeof(float) == 0;
  if (fits) return Status();
  return Status(ErrorCode::kInvalidArgument, "a query without its memory");
}

}  // namespace smartinf::csd
