// Certificates of the tests' authority as no command makes them. For tests.
#pragma once

#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include <openssl/pem.h>
#include <sys/stat.h>

#include "smartinf/base/check.h"
#include "smartinf/base/file.h"
#include "smartinf/serve/certificates/openssl_parts.h"
#include "smartinf/serve/test_certificates.h"

namespace smartinf::serve::wire {

/// With these common names; for clients: with the extension that says so.
inline TestCertificate issue_odd(const TestAuthority& authority,
                                 const std::vector<std::string>& names, bool for_clients) {
  const auto text = [](const std::string& path) {
    return std::move(*base::read_text_file(path, "for a test", 1 << 20));
  };
  const std::filesystem::path folder = std::filesystem::path(authority.ca()).parent_path();
  const Certificate issuer = parse_certificate(text(authority.ca()));
  const PrivateKey signer = parse_key(text((folder / "key.pem").string()));
  const PrivateKey key(EVP_EC_gen("P-256"));
  const Certificate made(X509_new());
  static int number = 0;
  ++number;
  X509_set_version(made.get(), X509_VERSION_3);
  ASN1_INTEGER_set(X509_get_serialNumber(made.get()), number);
  X509_gmtime_adj(X509_getm_notBefore(made.get()), -60);
  X509_gmtime_adj(X509_getm_notAfter(made.get()), 86400);
  X509_NAME* subject = X509_get_subject_name(made.get());
  for (const std::string& name : names) {
    X509_NAME_add_entry_by_txt(subject, "CN", MBSTRING_UTF8,
                               reinterpret_cast<const unsigned char*>(name.data()),
                               static_cast<int>(name.size()), -1, 0);
  }
  X509_set_issuer_name(made.get(), X509_get_subject_name(issuer.get()));
  X509_set_pubkey(made.get(), key.get());
  if (for_clients) {
    X509_EXTENSION* extension =
        X509V3_EXT_conf_nid(nullptr, nullptr, NID_ext_key_usage, "clientAuth");
    X509_add_ext(made.get(), extension, -1);
    X509_EXTENSION_free(extension);
  }
  SI_CHECK(X509_sign(made.get(), signer.get(), EVP_sha256()) > 0, "a signature");
  const std::string path = (folder / ("odd" + std::to_string(number))).string();
  const mode_t before = ::umask(077);
  const Bio certificate(BIO_new_file((path + ".pem").c_str(), "w"));
  const Bio secret(BIO_new_file((path + ".key").c_str(), "w"));
  ::umask(before);
  PEM_write_bio_X509(certificate.get(), made.get());
  PEM_write_bio_PrivateKey(secret.get(), key.get(), nullptr, nullptr, 0, nullptr, nullptr);
  return {path + ".pem", path + ".key"};
}

}  // namespace smartinf::serve::wire
