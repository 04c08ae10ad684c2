// Certificates for tests, made anew. For tests.
#pragma once

#include <string>

namespace smartinf::csd::wire {

struct TestCertificate {
  std::string certificate;  // paths
  std::string key;
};

struct TestCertificateOptions {
  std::string name;          // common name
  std::string host;          // subject alternative name; empty: none
  bool server = false;       // else for a client
  int valid_from_s = -3600;  // from now on
  int valid_to_s = 3600;
};

/// A small authority in a directory.
class TestAuthority {
 public:
  explicit TestAuthority(std::string directory);
  const std::string& ca() const { return ca_; }
  /// Files named after it.
  TestCertificate issue(const TestCertificateOptions& options) const;

 private:
  std::string directory_;
  std::string ca_, ca_key_;
};

}  // namespace smartinf::csd::wire
