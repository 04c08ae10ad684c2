#include <algorithm>
#include <cctype>
#include <ctime>

#include <arpa/inet.h>
#include <fmt/chrono.h>
#include <sys/stat.h>

#include "smartinf/serve/certificates/certificates.h"

namespace smartinf::serve {

using base::ErrorCode;
using base::Status;

std::string_view certificate_role_name(CertificateRole role) {
  return role == CertificateRole::kServer ? "server" : "client";
}

std::string utc_text(int64_t seconds) {
  return fmt::format("{:%Y-%m-%d %H:%M} UTC", fmt::gmtime(static_cast<std::time_t>(seconds)));
}

Status check_certificate_name(CertificateRole role, std::string_view name) {
  const std::string text(name);
  const auto plain = [](char c) { return std::isalnum(static_cast<unsigned char>(c)) != 0; };
  if (role == CertificateRole::kServer) {
    in6_addr address{};
    if (text.find('\0') == std::string::npos &&
        (::inet_pton(AF_INET, text.c_str(), &address) == 1 ||
         ::inet_pton(AF_INET6, text.c_str(), &address) == 1)) {
      return Status();
    }
    size_t label = 0;  // characters of the label so far
    bool good = !text.empty() && text.size() <= 253 && text.back() != '-';
    for (size_t i = 0; i < text.size() && good; ++i) {
      if (text[i] == '.') {
        good = label > 0 && text[i - 1] != '-';
        label = 0;
      } else {
        good = plain(text[i]) || (text[i] == '-' && label > 0);
        good = good && ++label <= 63;
      }
    }
    // A last label of digits alone is an address that was mistyped.
    const std::string_view last = std::string_view(text).substr(text.rfind('.') + 1);
    const bool digits = std::ranges::all_of(
        last, [](char c) { return std::isdigit(static_cast<unsigned char>(c)) != 0; });
    if (good && label > 0 && !digits) return Status();
    return Status(ErrorCode::kInvalidArgument, "'" + text + "' is no name of a server",
                  "Give what clients connect to: a DNS name (nas.example.org) or an IP address.");
  }
  const bool good = !text.empty() && text.size() <= 64 && plain(text.front()) &&
                    std::ranges::all_of(
                        text, [&](char c) { return plain(c) || c == '.' || c == '-' || c == '_'; });
  if (good) return Status();
  return Status(ErrorCode::kInvalidArgument, "'" + text + "' is no name of a client",
                "Use up to 64 letters, digits, '.', '-' and '_', a letter or digit first.");
}

/// A group that serves this one purpose is usual.
Status check_key_mode(const std::string& path) {
  struct stat entry {};
  if (::stat(path.c_str(), &entry) != 0) {
    return base::errno_status(errno, "cannot read the private key", path);
  }
  if ((entry.st_mode & 027) == 0) return Status();
  return Status(
      ErrorCode::kPermissionDenied,
      fmt::format("the private key is open to others (mode {:04o})", entry.st_mode & 07777),
      "Close it: chmod 600. If others could read it, revoke the certificate, too.",
      base::ErrorPlace{path, {}, {}, 0});
}

}  // namespace smartinf::serve
