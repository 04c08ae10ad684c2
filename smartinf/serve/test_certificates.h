// Certificates for tests, made anew by an authority of their own. For tests.
#pragma once

#include <string>
#include <utility>

#include "smartinf/base/check.h"
#include "smartinf/serve/certificates/certificates.h"

namespace smartinf::serve::wire {

struct TestCertificate {
  std::string certificate;  // paths
  std::string key;
};

class TestAuthority {
 public:
  explicit TestAuthority(const std::string& directory)
      : folder_(directory + "/authority"), authority_(opened(folder_)) {}

  std::string ca() const { return folder_ + "/ca/certificate.pem"; }
  /// The one there is, where it was issued before.
  TestCertificate issue(const CertificateRequest& request) {
    const auto issued = authority_.issue(request);
    SI_CHECK(issued.ok() || issued.status().code() == base::ErrorCode::kAlreadyExists,
             issued.status().to_string());
    const std::string folder = authority_.folder_of(request.role, request.name);
    return {folder + "/certificate.pem", folder + "/key.pem"};
  }

 private:
  static CertificateAuthority opened(const std::string& folder) {
    auto authority = CertificateAuthority::open_or_make(folder);
    SI_CHECK(authority.ok(), authority.status().to_string());
    return std::move(*authority);
  }
  std::string folder_;
  CertificateAuthority authority_;
};

}  // namespace smartinf::serve::wire
