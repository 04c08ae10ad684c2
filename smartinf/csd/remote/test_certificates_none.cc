// A build without OpenSSL: tests that need certificates skip themselves before.
#include "smartinf/csd/remote/test_certificates.h"

namespace smartinf::csd::wire {

TestAuthority::TestAuthority(std::string directory) : directory_(std::move(directory)) {}
TestCertificate TestAuthority::issue(const TestCertificateOptions&) const { return {}; }

}  // namespace smartinf::csd::wire
