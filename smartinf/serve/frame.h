// A frame, the unit that goes over a stream: a head, which says what it is and has a checksum of
// its own, and a payload, whose checksum (XXH3 like the head's) stands in the head.
//
//   frame := head bytes (u32) head checksum of the head (u64) payload
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "smartinf/base/status.h"

namespace smartinf::serve::wire {

/// A payload goes in pieces of at most so much. A stream's flow control is by the piece, so that
/// nobody holds more than some of them for a peer that does not read.
inline constexpr uint64_t kPieceBytes = uint64_t{1} << 20;
/// More than that in one frame is refused when it is announced: the description of a large model's
/// state, which goes whole, or a piece.
inline constexpr uint64_t kFrameBytesMax = uint64_t{24} << 20;

/// Bytes that stay as they are for as long as somebody holds the owner.
struct Payload {
  std::shared_ptr<const void> owner;
  std::span<const std::byte> bytes;
};

struct OutFrame {
  std::vector<std::byte> head;  // as seal_head() made it
  Payload payload;
  uint64_t bytes() const { return head.size() + payload.bytes.size(); }
};

/// Length, head, checksum.
std::vector<std::byte> seal_head(std::vector<std::byte> head);

/// A frame that came, in the pieces in which the transport has it.
class InFrame {
 public:
  InFrame() = default;
  /// Errors: kCorrupt, it is no frame or its head was damaged.
  static base::Result<InFrame> split(std::vector<std::span<const std::byte>> pieces,
                                     std::shared_ptr<const void> owner);

  std::span<const std::byte> head() const { return head_; }
  uint64_t payload_bytes() const { return payload_bytes_; }
  uint64_t bytes() const { return payload_bytes_ + head_.size() + kAroundHead; }
  /// out has payload_bytes(). Returns the checksum of what was copied, as it lies in `out`.
  uint64_t copy_payload(std::span<std::byte> out, uint64_t seed) const;

 private:
  static constexpr uint64_t kAroundHead = sizeof(uint32_t) + sizeof(uint64_t);
  std::vector<std::byte> head_;
  std::vector<std::span<const std::byte>> payload_;
  uint64_t payload_bytes_ = 0;
  std::shared_ptr<const void> owner_;
};

}  // namespace smartinf::serve::wire
