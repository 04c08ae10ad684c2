// A bound for the header blocks that come over a connection. gRPC 1.51 counts a call's fields anew
// in each frame, so that a block which goes on in CONTINUATION frames has no end, and a byte of it
// can take a hundred of memory. gRPC has no place to look at frames, but it reads them by
// SSL_read(): the program has one of its own in front of OpenSSL's.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

namespace smartinf::serve::wire {

/// Bounds what one end sends in the headers of a connection of HTTP/2. Threads: one at a time.
class HeaderBlocks {
 public:
  /// Bytes of one block, with the heads of its frames. gRPC sends some hundred bytes.
  static constexpr uint64_t kBytesMax = 4096;

  /// of_client: the bytes are those of a client, whose preface comes before its first frame.
  explicit HeaderBlocks(bool of_client) : skip_(of_client ? 24 : 0) {}

  /// Takes what came next. False, and from then on always: a block is longer.
  [[nodiscard]] bool take(std::span<const std::byte> bytes);

 private:
  void begin_frame();

  std::array<std::byte, 9> head_{};
  size_t head_bytes_ = 0;  // of it have come
  uint64_t skip_;          // until the next head
  uint64_t block_bytes_ = 0;
};

/// Whether gRPC reads by this program's SSL_read(): true once the other end has said something.
bool header_blocks_are_bounded();

}  // namespace smartinf::serve::wire
