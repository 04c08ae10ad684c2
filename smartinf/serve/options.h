// Options for devices on other machines: the recipe's [remote] table.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace smartinf::serve {

struct RemoteOptions {
  std::string certificate;           // PEM files of this client...
  std::string key;                   // ...
  std::string ca;                    // ...and of whoever signed the server's
  double reconnect_seconds = 60;     // a lost connection is tried again for so long
  double deadline_seconds = 120;     // a server that owes an answer may be silent for so long
  double keepalive_seconds = 10;     // between pings; one that stays unanswered so long breaks it
  uint64_t window_bytes = 64 << 20;  // of one device, on their way or unanswered, each way
};

inline constexpr std::string_view kRemoteScheme = "grpc://";
inline bool is_remote(std::string_view path) { return path.starts_with(kRemoteScheme); }

}  // namespace smartinf::serve
