#include "smartinf/serve/grpc_tls.h"

#include <cstdlib>
#include <optional>
#include <string>

/// gRPC's own, in none of its headers: reads the variable at the first call, and keeps it.
__attribute__((weak)) const char* grpc_get_ssl_cipher_suites();

namespace smartinf::serve::wire {
namespace {

// Ciphers of TLS 1.2: nothing is left that two sides have in common but its pre-shared keys, of
// which there are none. The suites of TLS 1.3 are another list, which stays. gRPC 1.51 has no other
// way to say so.
constexpr char kCipherVariable[] = "GRPC_SSL_CIPHER_SUITES";
constexpr char kNoCiphersOf12[] = "PSK-AES256-GCM-SHA384";

/// The variable goes back to what it was: it is neither for the processes that this one starts nor
/// for another gRPC in this one. Where gRPC hides the function, it stays.
bool take_ciphers() {
  std::optional<std::string> before;
  if (const char* value = std::getenv(kCipherVariable)) before = value;
  (void)::setenv(kCipherVariable, kNoCiphersOf12, 1);
  if (grpc_get_ssl_cipher_suites == nullptr) return true;
  const std::string taken = grpc_get_ssl_cipher_suites();
  if (before) {
    (void)::setenv(kCipherVariable, before->c_str(), 1);
  } else {
    (void)::unsetenv(kCipherVariable);
  }
  return taken == kNoCiphersOf12;
}

}  // namespace

base::Status speak_tls13_only() {
  static const bool taken = take_ciphers();
  if (taken) return base::Status();
  return base::Status(base::ErrorCode::kFailedPrecondition,
                      "this process would speak TLS 1.2, too: something else in it has used gRPC's "
                      "TLS before",
                      "Open the devices of other machines first.");
}

}  // namespace smartinf::serve::wire
