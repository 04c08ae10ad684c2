// A client of the server's port that speaks HTTP/2 over TLS and nothing of gRPC's manners. For
// tests.
#pragma once

#include <algorithm>
#include <array>
#include <csignal>
#include <cstdint>
#include <string>

#include <openssl/ssl.h>
#include <poll.h>

#include "smartinf/serve/test_proxy.h"
#include "smartinf/serve/test_server.h"

namespace smartinf::serve::wire {

class RawHttp2 {
 public:
  explicit RawHttp2(uint16_t port, const TestCertificate& certificate = TestTrust::shared().client)
      : context_(SSL_CTX_new(TLS_client_method())) {
    std::signal(SIGPIPE, SIG_IGN);  // OpenSSL writes to a connection that the server has ended
    SSL_CTX_use_certificate_file(context_, certificate.certificate.c_str(), SSL_FILETYPE_PEM);
    SSL_CTX_use_PrivateKey_file(context_, certificate.key.c_str(), SSL_FILETYPE_PEM);
    const unsigned char protocols[] = {2, 'h', '2'};
    SSL_CTX_set_alpn_protos(context_, protocols, sizeof protocols);
    connection_ = SSL_new(context_);
    socket_ = connect_to(port);
    SSL_set_fd(connection_, socket_);
    SI_CHECK(SSL_connect(connection_) == 1, "a handshake");
  }
  ~RawHttp2() {
    SSL_free(connection_);
    SSL_CTX_free(context_);
    ::close(socket_);
  }

  /// One call of the server's method, with a message that is announced as so long. Sends of it what
  /// the server takes, at most so much, until the server ends the call or the connection, which it
  /// must within ten seconds of the last byte. Returns the bytes of it that were sent.
  uint64_t send_message(uint32_t announced, uint64_t at_most) {
    std::string message{0};
    for (int shift = 24; shift >= 0; shift -= 8) message += static_cast<char>(announced >> shift);
    write(kPreface + frame(4, 0, 0, "") + frame(1, 4, 1, call()) + frame(0, 0, 1, message));
    uint64_t sent = 0;
    const std::string some(16000, 'x');
    while (!ended_) {
      const bool may = sent < at_most && std::min(stream_room_, room_) >= int64_t{16005};
      pollfd ready{socket_, POLLIN, 0};
      if (SSL_pending(connection_) > 0 || ::poll(&ready, 1, may ? 0 : 10'000) == 1) {
        read();
      } else if (may) {
        write(frame(0, 0, 1, some));
        sent += some.size();
        stream_room_ -= static_cast<int64_t>(some.size());
        room_ -= static_cast<int64_t>(some.size());
      } else {
        break;
      }
    }
    return sent;
  }
  /// Opens calls and resets each in the same breath, at most so many, until the server ends the
  /// connection. Returns their number.
  uint32_t open_and_reset(uint32_t at_most) {
    write(kPreface + frame(4, 0, 0, ""));
    uint32_t opened = 0;
    while (!ended_ && opened < at_most) {
      std::string some;
      for (int i = 0; i < 100; ++i, ++opened) {
        some += frame(1, 4, 2 * opened + 1, call()) + frame(3, 0, 2 * opened + 1, {0, 0, 0, 8});
      }
      write(some);
      pollfd ready{socket_, POLLIN, 0};
      while (!ended_ && (SSL_pending(connection_) > 0 || ::poll(&ready, 1, 0) == 1)) read();
    }
    return opened;
  }
  /// Begins a call, and goes on with its fields in frames that do not end them, at most so many,
  /// until the server ends the connection. Returns their number.
  uint32_t send_fields(uint32_t at_most) {
    write(kPreface + frame(4, 0, 0, ""));
    while (!ended_ && !acknowledged_) read();  // nothing may come between
    write(frame(1, 0, 1, call()));
    uint32_t sent = 0;
    const std::string some = frame(9, 0, 1, std::string(200, '\x95'));  // "age", of one byte each
    while (!ended_ && sent < at_most) {
      write(some);
      ++sent;
      pollfd ready{socket_, POLLIN, 0};
      while (!ended_ && (SSL_pending(connection_) > 0 || ::poll(&ready, 1, 0) == 1)) read();
    }
    return sent;
  }
  /// One call whose first message is this; packed: as gzip has it. Whether a message comes back.
  bool is_answered(const std::string& message, bool packed) {
    const std::string content = packed ? gzip(message) : message;
    std::string head(1, packed ? 1 : 0);
    for (int shift = 24; shift >= 0; shift -= 8) {
      head += static_cast<char>(static_cast<uint32_t>(content.size()) >> shift);
    }
    const std::string encoding = std::string("\0\x0dgrpc-encoding\x04gzip", 20);
    write(kPreface + frame(4, 0, 0, "") + frame(1, 4, 1, call() + (packed ? encoding : "")) +
          frame(0, 0, 1, head + content));
    while (!ended_ && !answered_) read();
    return answered_;
  }
  /// The server has ended the call or the connection.
  bool ended() const { return ended_; }

 private:
  static constexpr const char* kMethodPath = "/smartinf.remote.v1.Device/Talk";

  static const inline std::string kPreface = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

  static std::string frame(char type, char flags, uint32_t stream, const std::string& content) {
    const auto size = static_cast<uint32_t>(content.size());
    std::string head;
    for (int shift = 16; shift >= 0; shift -= 8) head += static_cast<char>(size >> shift);
    head += type;
    head += flags;
    for (int shift = 24; shift >= 0; shift -= 8) head += static_cast<char>(stream >> shift);
    return head + content;
  }
  /// The fields that begin a call: none is kept in HPACK's table, and names of its static table are
  /// given by their number.
  static std::string call() {
    const auto field = [](std::string name, const std::string& value) {
      return name + static_cast<char>(value.size()) + value;
    };
    return "\x83\x87" + field("\x04", kMethodPath) + field("\x01", "localhost") +
           field("\x0f\x10", "application/grpc") + field(std::string("\0\x02te", 4), "trailers");
  }
  /// Gzip's form of up to 65535 bytes, as they are.
  static std::string gzip(const std::string& bytes) {
    uint32_t checksum = ~uint32_t{0};
    for (const char byte : bytes) {
      checksum ^= static_cast<uint8_t>(byte);
      for (int i = 0; i < 8; ++i) checksum = checksum >> 1 ^ (checksum & 1 ? 0xedb88320u : 0u);
    }
    const auto little = [](uint32_t value, int count) {
      std::string text;
      for (int i = 0; i < count; ++i) text += static_cast<char>(value >> 8 * i);
      return text;
    };
    const auto size = static_cast<uint32_t>(bytes.size());
    return std::string("\x1f\x8b\x08\0\0\0\0\0\0\x03\x01", 11) + little(size, 2) +
           little(~size, 2) + bytes + little(~checksum, 4) + little(size, 4);
  }
  static uint32_t number(const std::string& text, size_t at) {
    uint32_t value = 0;
    for (size_t i = 0; i < 4; ++i) value = value << 8 | static_cast<uint8_t>(text[at + i]);
    return value;
  }
  void write(const std::string& bytes) {
    if (SSL_write(connection_, bytes.data(), static_cast<int>(bytes.size())) <= 0) ended_ = true;
  }
  void read() {
    std::array<char, 16384> some;
    const int got = SSL_read(connection_, some.data(), some.size());
    if (got <= 0) {
      ended_ = true;
      return;
    }
    came_.append(some.data(), static_cast<size_t>(got));
    while (came_.size() >= 9 && came_.size() >= 9 + (number(came_, 0) >> 8)) {
      const size_t size = number(came_, 0) >> 8;
      take(came_[3], came_[4], number(came_, 5), came_.substr(9, size));
      came_.erase(0, 9 + size);
    }
  }
  void take(char type, char flags, uint32_t stream, const std::string& content) {
    if (type == 4 && (flags & 1) == 0) {
      for (size_t at = 0; at + 6 <= content.size(); at += 6) {
        if (content[at] == 0 && content[at + 1] == 4) {
          const int64_t window = number(content, at + 2);
          stream_room_ += window - window_;
          window_ = window;
        }
      }
      write(frame(4, 1, 0, ""));
      acknowledged_ = true;
    }
    if (type == 0 && !content.empty()) answered_ = true;
    if (type == 6 && (flags & 1) == 0) write(frame(6, 1, 0, content));
    if (type == 8) (stream == 0 ? room_ : stream_room_) += number(content, 0);
    if (type == 7 || (type == 3 && stream == 1) || (type == 1 && (flags & 1) != 0)) ended_ = true;
  }

  SSL_CTX* context_;
  SSL* connection_ = nullptr;
  int socket_ = -1;
  int64_t window_ = 65535, room_ = 65535, stream_room_ = 65535;
  std::string came_;
  bool acknowledged_ = false;  // the server's settings
  bool answered_ = false;      // by a message
  bool ended_ = false;
};

}  // namespace smartinf::serve::wire
