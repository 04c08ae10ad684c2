// Stands in where OpenSSL's headers were not there when this was built.
#include "smartinf/serve/certificates/certificates.h"

namespace smartinf::serve {

using base::Result;
using base::Status;

namespace {

Status missing() {
  return Status(base::ErrorCode::kUnsupported, "this build was made without OpenSSL",
                "Install libssl-dev (Debian, Ubuntu) and build again.");
}

}  // namespace

Status check_key_mode(const std::string&) { return missing(); }
Result<Credentials> read_credentials(const CredentialFiles&, CertificateRole) { return missing(); }
Result<std::string> client_name(std::string_view) { return missing(); }
Result<std::unique_ptr<RevocationList>> RevocationList::open(const std::string&,
                                                             const std::string&) {
  return missing();
}

}  // namespace smartinf::serve
