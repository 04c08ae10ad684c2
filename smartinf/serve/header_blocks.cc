#include "smartinf/serve/header_blocks.h"

#include <algorithm>
#include <atomic>

#include <openssl/err.h>
#include <openssl/ssl.h>

namespace smartinf::serve::wire {
namespace {

// Numbers of RFC 9113.
constexpr uint8_t kHeaders = 1, kPushPromise = 5, kContinuation = 9;
constexpr uint8_t kEndHeaders = 4;

std::atomic<bool> reads_here{false};

/// Header blocks of a connection, for as long as OpenSSL has it.
HeaderBlocks* blocks_of(SSL* connection) {
  static const int index = ::SSL_get_ex_new_index(
      0, nullptr, nullptr, nullptr, [](void*, void* blocks, CRYPTO_EX_DATA*, int, long, void*) {
        delete static_cast<HeaderBlocks*>(blocks);
      });
  auto* blocks = static_cast<HeaderBlocks*>(::SSL_get_ex_data(connection, index));
  if (blocks == nullptr) {
    blocks = new HeaderBlocks(::SSL_is_server(connection) == 1);
    ::SSL_set_ex_data(connection, index, blocks);
  }
  return blocks;
}

}  // namespace

bool HeaderBlocks::take(std::span<const std::byte> bytes) {
  while (!bytes.empty() && block_bytes_ <= kBytesMax) {
    if (skip_ > 0) {
      const uint64_t here = std::min<uint64_t>(skip_, bytes.size());
      skip_ -= here;
      bytes = bytes.subspan(here);
      continue;
    }
    head_[head_bytes_++] = bytes.front();
    bytes = bytes.subspan(1);
    if (head_bytes_ == head_.size()) begin_frame();
  }
  return block_bytes_ <= kBytesMax;
}

void HeaderBlocks::begin_frame() {
  const auto at = [&](size_t i) { return std::to_integer<uint8_t>(head_[i]); };
  head_bytes_ = 0;
  skip_ = uint64_t{at(0)} << 16 | uint64_t{at(1)} << 8 | at(2);
  if (at(3) == kHeaders || at(3) == kPushPromise) block_bytes_ = 0;
  if (at(3) != kHeaders && at(3) != kPushPromise && at(3) != kContinuation) return;
  block_bytes_ += head_.size() + skip_;
  if (block_bytes_ <= kBytesMax && (at(4) & kEndHeaders) != 0) block_bytes_ = 0;
}

bool header_blocks_are_bounded() { return reads_here; }

}  // namespace smartinf::serve::wire

/// As OpenSSL's own, which is SSL_read_ex() with another way to say how much came, and a look at
/// what came. For every caller in the program, whose TLS connections are all gRPC's.
extern "C" __attribute__((visibility("default"))) int SSL_read(SSL* connection, void* buffer,
                                                               int bytes) {
  using smartinf::serve::wire::blocks_of;
  using smartinf::serve::wire::reads_here;
  size_t came = 0;
  if (bytes < 0) {
    ERR_raise(ERR_LIB_SSL, SSL_R_BAD_LENGTH);
    return -1;
  }
  if (::SSL_read_ex(connection, buffer, static_cast<size_t>(bytes), &came) <= 0) return -1;
  reads_here = true;
  if (blocks_of(connection)->take({static_cast<const std::byte*>(buffer), came})) {
    return static_cast<int>(came);
  }
  // gRPC ends a connection whose bytes OpenSSL refuses.
  ERR_raise_data(ERR_LIB_USER, ERR_R_PASSED_INVALID_ARGUMENT, "a header block above %d bytes",
                 static_cast<int>(smartinf::serve::wire::HeaderBlocks::kBytesMax));
  return -1;
}
