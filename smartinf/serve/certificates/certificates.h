// A small certificate authority for remote devices, in a folder, and the check of what it issued
// before a connection is tried with it. Keys are ECDSA on P-256: every TLS library that gRPC is
// built with accepts them. Of certificates_openssl.cc and certificates_missing.cc CMake chooses
// one; without OpenSSL every call that needs it is kUnsupported.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "smartinf/base/status.h"

namespace smartinf::serve {

enum class CertificateRole : uint8_t { kServer, kClient };
std::string_view certificate_role_name(CertificateRole role);  // "server", "client"

inline constexpr uint32_t kAuthorityDays = 3650;
inline constexpr uint32_t kCertificateDays = 365;

struct CertificateRequest {
  CertificateRole role = CertificateRole::kClient;
  /// A server's is the name or the address that clients connect to, a client's is what the server
  /// knows it by.
  std::string name;
  std::vector<std::string> addresses = {};  // further names and addresses of a server
  uint32_t days =
      kCertificateDays;  // 1 to kAuthorityDays; it ends with the authority at the latest
  int64_t from_s = 0;    // when it begins to be valid, in seconds since 1970; 0: now
};

/// "2027-11-25 18:00 UTC", of seconds since 1970.
std::string utc_text(int64_t seconds);

/// What a certificate says of itself.
struct CertificateFacts {
  CertificateRole role = CertificateRole::kClient;
  std::string name;
  std::vector<std::string> addresses;  // of a server, its name included
  std::string serial;                  // 32 lower-case hexadecimal digits; fewer of a foreign one
  int64_t from_s = 0;
  int64_t until_s = 0;
  std::optional<int64_t> revoked_s;  // when
};

/// kInvalidArgument, with what is allowed, where the name cannot be one: of a server a DNS name or
/// an IP address, of a client up to 64 letters, digits, '.', '-' and '_'.
base::Status check_certificate_name(CertificateRole role, std::string_view name);

/// The folder has mode 0700 and holds
///   ca/key.pem, ca/certificate.pem    the authority itself; the key leaves this folder never
///   revoked.crl                       the certificates that are revoked (a PEM CRL)
///   issued/SERIAL.pem                 every certificate issued, for the list
///   servers/NAME/, clients/NAME/      key.pem, certificate.pem and ca.pem: what that machine needs
/// While an object lives, no other process changes the folder. Threads: one at a time.
class CertificateAuthority {
 public:
  /// Errors: kNotFound without an authority there; kBusy: another process has it; what is in the
  /// files.
  static base::Result<CertificateAuthority> open(const std::string& folder);
  /// Makes one where there is none. Errors: of open(), but for kNotFound; kFailedPrecondition for a
  /// folder that others may read or that holds something else.
  static base::Result<CertificateAuthority> open_or_make(const std::string& folder);

  CertificateAuthority(CertificateAuthority&&) noexcept;
  CertificateAuthority& operator=(CertificateAuthority&&) noexcept;
  ~CertificateAuthority();

  bool made() const;        // by open_or_make(), just now
  int64_t until_s() const;  // when the authority's own certificate expires

  /// Where a certificate's folder is or would be.
  std::string folder_of(CertificateRole role, const std::string& name) const;
  /// Puts key and certificate into folder_of(), which appears as a whole or not. Errors:
  /// kAlreadyExists: there is one; kInvalidArgument: of the request.
  base::Result<CertificateFacts> issue(const CertificateRequest& request);
  /// All that were ever issued, the oldest first.
  base::Result<std::vector<CertificateFacts>> issued() const;
  /// Adds to revoked.crl what was issued to the name, or the one with the serial number. Returns
  /// those added. Errors: kNotFound: none was issued; kAlreadyExists: all are revoked.
  base::Result<std::vector<CertificateFacts>> revoke(const std::string& name_or_serial);

 private:
  struct Parts;
  explicit CertificateAuthority(std::unique_ptr<Parts> parts);
  std::unique_ptr<Parts> parts_;
};

/// Where one side of a connection has its own certificate and key, and the authority's certificate.
struct CredentialFiles {
  std::string certificate;
  std::string key;
  std::string ca;
};
struct Credentials {
  std::string certificate_pem;
  std::string key_pem;
  std::string ca_pem;
  CertificateFacts facts;  // of the certificate
};
/// Reads the files and checks what a failed handshake would not explain. Errors, each with the file
/// and what to do: kPermissionDenied: others may read the key; kMismatch: key and certificate do
/// not belong together, another authority issued it, or it is for the other side;
/// kFailedPrecondition: expired, or not valid yet; kCorrupt: not PEM.
base::Result<Credentials> read_credentials(const CredentialFiles& files, CertificateRole role);

/// What a PEM certificate says, unchecked: for whom a connection is, once TLS has verified it.
/// Errors: kCorrupt.
base::Result<CertificateFacts> certificate_facts(std::string_view certificate_pem);
/// Who shows a certificate as a client, once TLS has verified it. Errors: kPermissionDenied: it
/// does not say that it is for clients (extendedKeyUsage clientAuth), or does not have one common
/// name of 1 to 64 characters; kCorrupt.
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
  /// The same of a serial number, as in CertificateFacts.
  virtual bool is_serial_revoked(const std::string& serial) = 0;
  virtual uint64_t size() const = 0;
};

}  // namespace smartinf::serve
