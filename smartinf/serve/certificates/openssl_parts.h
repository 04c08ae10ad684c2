// OpenSSL's objects with owners, and what several sources here do with them.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include <openssl/bio.h>
#include <openssl/bn.h>
#include <openssl/evp.h>
#include <openssl/x509.h>
#include <openssl/x509v3.h>

#include "smartinf/base/status.h"
#include "smartinf/serve/certificates/certificates.h"

namespace smartinf::serve {

template <auto kFree>
struct OpensslFree {
  template <typename T>
  void operator()(T* object) const {
    kFree(object);
  }
};
using Bio = std::unique_ptr<BIO, OpensslFree<BIO_free_all>>;
using Number = std::unique_ptr<BIGNUM, OpensslFree<BN_free>>;
using PrivateKey = std::unique_ptr<EVP_PKEY, OpensslFree<EVP_PKEY_free>>;
using Certificate = std::unique_ptr<X509, OpensslFree<X509_free>>;
using Crl = std::unique_ptr<X509_CRL, OpensslFree<X509_CRL_free>>;
using Time = std::unique_ptr<ASN1_TIME, OpensslFree<ASN1_TIME_free>>;

/// No file that is read here is longer.
inline constexpr uint64_t kPemBytesMax = uint64_t{1} << 20;
inline constexpr uint64_t kCrlBytesMax = uint64_t{16} << 20;

/// A failure of OpenSSL itself, with its reason; empties its queue of errors.
base::Status openssl_status(base::ErrorCode code, std::string what, std::string advice = {},
                            const std::string& path = {});

/// Of PEM text; null where it is none. The first certificate counts.
Certificate parse_certificate(std::string_view pem);
PrivateKey parse_key(std::string_view pem);
Crl parse_crl(std::string_view pem);

base::Result<Certificate> read_certificate(const std::string& path);

std::string serial_text(const ASN1_INTEGER* serial);
int64_t seconds_of(const ASN1_TIME* time);
CertificateFacts facts_of(X509* certificate);

}  // namespace smartinf::serve
