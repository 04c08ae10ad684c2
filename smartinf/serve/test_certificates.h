// Certificates for tests, made anew by an authority of their own: scripts/certificates.py, which
// needs python3 and the openssl command. For tests.
#pragma once

#include <cstdlib>
#include <filesystem>
#include <string>

#include "smartinf/base/check.h"

namespace smartinf::serve::wire {

struct TestCertificate {
  std::string certificate;  // paths
  std::string key;
};

class TestAuthority {
 public:
  explicit TestAuthority(const std::string& directory) : folder_(directory + "/authority") {}

  // There once something was issued.
  std::string ca() const { return folder_ + "/ca/certificate.pem"; }
  std::string revoked() const { return folder_ + "/revoked.crl"; }

  /// The one there is, where it was issued before.
  TestCertificate client(const std::string& name) const { return issued("client", name); }
  TestCertificate server(const std::string& name) const { return issued("server", name); }
  /// As the command's flags say.
  void run(const std::string& flags) const {
    const std::string command = "python3 " SMARTINF_ROOT "/scripts/certificates.py --ca " +
                                folder_ + " " + flags + " >/dev/null";
    SI_CHECK(std::system(command.c_str()) == 0, command);
  }

 private:
  TestCertificate issued(const std::string& role, const std::string& name) const {
    const std::string folder = folder_ + "/" + role + "s/" + name;
    if (!std::filesystem::exists(folder)) run("--" + role + " " + name);
    return {folder + "/certificate.pem", folder + "/key.pem"};
  }

  std::string folder_;
};

}  // namespace smartinf::serve::wire
