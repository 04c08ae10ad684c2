#include "smartinf/serve/frame.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "smartinf/base/check.h"
#include "smartinf/base/checksum.h"

namespace smartinf::serve::wire {
namespace {

constexpr uint64_t kHeadSeed = 0x64616568666e6973;  // "sinfhead"

base::Status no_frame(const char* what) {
  return base::Status(base::ErrorCode::kCorrupt, what,
                      "It was damaged on its way, or the other side is no smartinf.");
}

}  // namespace

std::vector<std::byte> seal_head(std::vector<std::byte> head) {
  const auto size = static_cast<uint32_t>(head.size());
  const uint64_t checksum = base::checksum(head, kHeadSeed);
  std::vector<std::byte> sealed(sizeof size + head.size() + sizeof checksum);
  std::memcpy(sealed.data(), &size, sizeof size);
  if (!head.empty()) std::memcpy(sealed.data() + sizeof size, head.data(), head.size());
  std::memcpy(sealed.data() + sizeof size + head.size(), &checksum, sizeof checksum);
  return sealed;
}

base::Result<InFrame> InFrame::split(std::vector<std::span<const std::byte>> pieces,
                                     std::shared_ptr<const void> owner) {
  size_t piece = 0;
  const auto take = [&](std::byte* out, uint64_t bytes) {
    while (bytes > 0 && piece < pieces.size()) {
      const uint64_t some = std::min<uint64_t>(bytes, pieces[piece].size());
      if (some > 0) std::memcpy(out, pieces[piece].data(), some);
      out += some;
      bytes -= some;
      pieces[piece] = pieces[piece].subspan(some);
      if (pieces[piece].empty()) ++piece;
    }
    return bytes == 0;
  };
  uint64_t left = 0;
  for (const auto& bytes : pieces) left += bytes.size();
  uint32_t size = 0;
  if (!take(reinterpret_cast<std::byte*>(&size), sizeof size)) {
    return no_frame("a message is too short for one");
  }
  left -= sizeof size;
  if (left < sizeof(uint64_t) || size > left - sizeof(uint64_t)) {
    return no_frame("a message is shorter than it says");
  }
  InFrame frame;
  frame.head_.resize(size);
  uint64_t checksum = 0;
  (void)take(frame.head_.data(), size);
  (void)take(reinterpret_cast<std::byte*>(&checksum), sizeof checksum);
  if (checksum != base::checksum(frame.head_, kHeadSeed)) {
    return no_frame("a message's head has a wrong checksum");
  }
  frame.payload_.assign(pieces.begin() + static_cast<std::ptrdiff_t>(piece), pieces.end());
  frame.payload_bytes_ = left - size - sizeof checksum;
  frame.owner_ = std::move(owner);
  return frame;
}

uint64_t InFrame::copy_payload(std::span<std::byte> out, uint64_t seed) const {
  SI_CHECK(out.size() == payload_bytes_, "room for a payload");
  uint64_t at = 0;
  for (const auto& piece : payload_) {
    if (!piece.empty()) std::memcpy(out.data() + at, piece.data(), piece.size());
    at += piece.size();
  }
  return base::checksum(out, seed);
}

}  // namespace smartinf::serve::wire
