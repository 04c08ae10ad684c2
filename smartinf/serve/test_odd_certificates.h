// Certificates of the tests' authority as no command makes them. For tests.
#pragma once

#include <cstdio>
#include <string>
#include <vector>

#include <openssl/pem.h>
#include <openssl/x509v3.h>
#include <sys/stat.h>

#include "smartinf/base/check.h"
#include "smartinf/serve/test_certificates.h"

namespace smartinf::serve::wire {

struct OddCertificate {
  std::vector<std::string> names;  // common names
  bool for_clients = true;         // with the extension that says so
  long from_s = -60;               // when it begins to be valid, seconds from now
  long until_s = 86400;
};

inline TestCertificate issue_odd(const TestAuthority& authority, const OddCertificate& odd) {
  const auto opened = [](const std::string& path, const char* mode) {
    BIO* file = BIO_new_file(path.c_str(), mode);
    SI_CHECK(file != nullptr, path);
    return file;
  };
  const std::string folder = authority.ca().substr(0, authority.ca().rfind('/') + 1);
  BIO* file = opened(authority.ca(), "r");
  X509* issuer = PEM_read_bio_X509(file, nullptr, nullptr, nullptr);
  BIO_free_all(file);
  file = opened(folder + "key.pem", "r");
  EVP_PKEY* signer = PEM_read_bio_PrivateKey(file, nullptr, nullptr, nullptr);
  BIO_free_all(file);
  EVP_PKEY* key = EVP_EC_gen("P-256");
  X509* made = X509_new();
  static int number = 0;
  ++number;
  X509_set_version(made, X509_VERSION_3);
  ASN1_INTEGER_set(X509_get_serialNumber(made), number);
  X509_gmtime_adj(X509_getm_notBefore(made), odd.from_s);
  X509_gmtime_adj(X509_getm_notAfter(made), odd.until_s);
  for (const std::string& name : odd.names) {
    X509_NAME_add_entry_by_txt(X509_get_subject_name(made), "CN", MBSTRING_UTF8,
                               reinterpret_cast<const unsigned char*>(name.data()),
                               static_cast<int>(name.size()), -1, 0);
  }
  X509_set_issuer_name(made, X509_get_subject_name(issuer));
  X509_set_pubkey(made, key);
  if (odd.for_clients) {
    X509_EXTENSION* extension =
        X509V3_EXT_conf_nid(nullptr, nullptr, NID_ext_key_usage, "clientAuth");
    X509_add_ext(made, extension, -1);
    X509_EXTENSION_free(extension);
  }
  SI_CHECK(X509_sign(made, signer, EVP_sha256()) > 0, "a signature");
  const std::string path = folder + "odd" + std::to_string(number);
  const mode_t before = ::umask(077);
  BIO* certificate = opened(path + ".pem", "w");
  BIO* secret = opened(path + ".key", "w");
  ::umask(before);
  PEM_write_bio_X509(certificate, made);
  PEM_write_bio_PrivateKey(secret, key, nullptr, nullptr, 0, nullptr, nullptr);
  BIO_free_all(certificate);
  BIO_free_all(secret);
  X509_free(made);
  X509_free(issuer);
  EVP_PKEY_free(key);
  EVP_PKEY_free(signer);
  return {path + ".pem", path + ".key"};
}

}  // namespace smartinf::serve::wire
