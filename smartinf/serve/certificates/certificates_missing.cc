// Stands in where OpenSSL's headers were not there when this was built.
#include "smartinf/serve/certificates/certificates.h"

namespace smartinf::serve {
namespace {

using base::ErrorCode;
using base::Result;
using base::Status;

Status missing() {
  return Status(ErrorCode::kUnsupported, "this build was made without OpenSSL: no certificates",
                "Install libssl-dev (Debian, Ubuntu) and build again.");
}

}  // namespace

struct CertificateAuthority::Parts {};
CertificateAuthority::CertificateAuthority(std::unique_ptr<Parts> parts)
    : parts_(std::move(parts)) {}
CertificateAuthority::CertificateAuthority(CertificateAuthority&&) noexcept = default;
CertificateAuthority& CertificateAuthority::operator=(CertificateAuthority&&) noexcept = default;
CertificateAuthority::~CertificateAuthority() = default;

Result<CertificateAuthority> CertificateAuthority::open(const std::string&) { return missing(); }
Result<CertificateAuthority> CertificateAuthority::open_or_make(const std::string&) {
  return missing();
}
bool CertificateAuthority::made() const { return false; }
int64_t CertificateAuthority::until_s() const { return 0; }
std::string CertificateAuthority::folder_of(CertificateRole, const std::string&) const {
  return {};
}
Result<CertificateFacts> CertificateAuthority::issue(const CertificateRequest&) {
  return missing();
}
Result<std::vector<CertificateFacts>> CertificateAuthority::issued() const { return missing(); }
Result<std::vector<CertificateFacts>> CertificateAuthority::revoke(const std::string&) {
  return missing();
}

Result<Credentials> read_credentials(const CredentialFiles&, CertificateRole) { return missing(); }
Result<CertificateFacts> certificate_facts(std::string_view) { return missing(); }
Result<std::string> client_name(std::string_view) { return missing(); }
Result<std::unique_ptr<RevocationList>> RevocationList::open(const std::string&,
                                                             const std::string&) {
  return missing();
}

}  // namespace smartinf::serve
