// The certificates of remote devices as a session uses them; scripts/certificates.py makes them. Of
// certificates_openssl.cc and certificates_missing.cc CMake chooses one; without OpenSSL every call
// is kUnsupported.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "smartinf/base/status.h"

namespace smartinf::serve {

enum class CertificateRole : uint8_t { kServer, kClient };

/// Where one side of a connection has its own certificate and key, and the authority's certificate.
struct CredentialFiles {
  std::string certificate;
  std::string key;
  std::string ca;
};
struct Credentials {
  std::string name;     // in the certificate
  int64_t until_s = 0;  // when it expires, in seconds since 1970
};
/// Reads the files and checks what a failed handshake would not explain. Errors, each with the file
/// and what to do: kPermissionDenied: others may read the key; kMismatch: key and certificate do
/// not belong together, another authority issued it, or it is for the other side;
/// kFailedPrecondition: expired, or not valid yet; kCorrupt: not PEM.
base::Result<Credentials> read_credentials(const CredentialFiles& files, CertificateRole role);

/// The client's name in a certificate that TLS has verified. Errors: kPermissionDenied: it does not
/// say that it is for clients (extendedKeyUsage clientAuth), or does not have one common name of 1
/// to 64 characters; kCorrupt.
base::Result<std::string> client_name(std::string_view certificate_pem);

/// Errors: kPermissionDenied: others may read the file, or its group write it.
base::Status check_key_mode(const std::string& path);

/// revoked.crl as a server uses it. Threads: safe.
class RevocationList {
 public:
  /// Errors: kMismatch: another authority's; kCorrupt; as errno says.
  static base::Result<std::unique_ptr<RevocationList>> open(const std::string& crl_path,
                                                            const std::string& ca_path);
  virtual ~RevocationList() = default;
  /// Looks first whether the file has changed, and reads it then. A file that cannot be used is
  /// logged once, and the list before it stays: nothing is un-revoked by a mistake. What is no
  /// certificate counts as revoked.
  virtual bool is_revoked(std::string_view certificate_pem) = 0;
};

}  // namespace smartinf::serve
