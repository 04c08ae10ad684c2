#include "smartinf/csd/remote/test_certificates.h"

#include <cstdio>
#include <memory>

#include <openssl/ec.h>
#include <openssl/evp.h>
#include <openssl/pem.h>
#include <openssl/rand.h>
#include <openssl/x509.h>
#include <openssl/x509v3.h>

#include "smartinf/base/check.h"

namespace smartinf::csd::wire {
namespace {

EVP_PKEY* make_key() {
  EVP_PKEY* key = EVP_EC_gen("P-256");
  SI_CHECK(key != nullptr, "a key");
  return key;
}

void extend(X509* certificate, X509* issuer, int id, const char* value) {
  X509V3_CTX context;
  X509V3_set_ctx_nodb(&context);
  X509V3_set_ctx(&context, issuer, certificate, nullptr, nullptr, 0);
  X509_EXTENSION* extension = X509V3_EXT_conf_nid(nullptr, &context, id, value);
  SI_CHECK(extension != nullptr, "an extension");
  X509_add_ext(certificate, extension, -1);
  X509_EXTENSION_free(extension);
}

X509* make(EVP_PKEY* key, const std::string& name, int from_s, int to_s) {
  X509* certificate = X509_new();
  X509_set_version(certificate, 2);
  unsigned char serial[8];
  RAND_bytes(serial, sizeof serial);
  serial[0] &= 0x7f;
  BIGNUM* number = BN_bin2bn(serial, sizeof serial, nullptr);
  BN_to_ASN1_INTEGER(number, X509_get_serialNumber(certificate));
  BN_free(number);
  X509_gmtime_adj(X509_getm_notBefore(certificate), from_s);
  X509_gmtime_adj(X509_getm_notAfter(certificate), to_s);
  X509_set_pubkey(certificate, key);
  X509_NAME_add_entry_by_txt(X509_get_subject_name(certificate), "CN", MBSTRING_ASC,
                             reinterpret_cast<const unsigned char*>(name.c_str()), -1, -1, 0);
  return certificate;
}

void write(const std::string& path, X509* certificate) {
  FILE* file = std::fopen(path.c_str(), "w");
  PEM_write_X509(file, certificate);
  std::fclose(file);
}
void write(const std::string& path, EVP_PKEY* key) {
  FILE* file = std::fopen(path.c_str(), "w");
  PEM_write_PrivateKey(file, key, nullptr, nullptr, 0, nullptr, nullptr);
  std::fclose(file);
}

}  // namespace

TestAuthority::TestAuthority(std::string directory)
    : directory_(std::move(directory)),
      ca_(directory_ + "/ca.pem"),
      ca_key_(directory_ + "/ca.key") {
  EVP_PKEY* key = make_key();
  X509* ca = make(key, "test authority", -7200, 7200);
  X509_set_issuer_name(ca, X509_get_subject_name(ca));
  extend(ca, ca, NID_basic_constraints, "critical,CA:TRUE");
  extend(ca, ca, NID_key_usage, "critical,keyCertSign,cRLSign");
  X509_sign(ca, key, EVP_sha256());
  write(ca_, ca);
  write(ca_key_, key);
  X509_free(ca);
  EVP_PKEY_free(key);
}

TestCertificate TestAuthority::issue(const TestCertificateOptions& options) const {
  const std::string path = directory_ + "/" + options.name;
  const TestCertificate files{path + ".pem", path + ".key"};
  FILE* file = std::fopen(ca_.c_str(), "r");
  X509* ca = PEM_read_X509(file, nullptr, nullptr, nullptr);
  std::fclose(file);
  file = std::fopen(ca_key_.c_str(), "r");
  EVP_PKEY* ca_key = PEM_read_PrivateKey(file, nullptr, nullptr, nullptr);
  std::fclose(file);
  EVP_PKEY* key = make_key();
  X509* own = make(key, options.name, options.valid_from_s, options.valid_to_s);
  X509_set_issuer_name(own, X509_get_subject_name(ca));
  extend(own, ca, NID_basic_constraints, "critical,CA:FALSE");
  extend(own, ca, NID_ext_key_usage, options.server ? "serverAuth" : "clientAuth");
  if (!options.host.empty()) {
    extend(own, ca, NID_subject_alt_name, ("DNS:" + options.host).c_str());
  }
  X509_sign(own, ca_key, EVP_sha256());
  write(files.certificate, own);
  write(files.key, key);
  X509_free(own);
  X509_free(ca);
  EVP_PKEY_free(key);
  EVP_PKEY_free(ca_key);
  return files;
}

}  // namespace smartinf::csd::wire
