#include <fmt/format.h>
#include <openssl/err.h>
#include <openssl/pem.h>

#include "smartinf/base/file.h"
#include "smartinf/serve/certificates/openssl_parts.h"

namespace smartinf::serve {

using base::ErrorCode;
using base::ErrorPlace;
using base::Result;
using base::Status;

namespace {

using CertificateStore = std::unique_ptr<X509_STORE, OpensslFree<X509_STORE_free>>;
using StoreContext = std::unique_ptr<X509_STORE_CTX, OpensslFree<X509_STORE_CTX_free>>;
struct FreeStack {
  void operator()(STACK_OF(X509) * stack) const { sk_X509_pop_free(stack, X509_free); }
};
using CertificateStack = std::unique_ptr<STACK_OF(X509), FreeStack>;

/// All certificates of PEM text: an authority's and those between it and the first.
CertificateStack parse_all(std::string_view pem) {
  CertificateStack stack(sk_X509_new_null());
  const Bio bio(BIO_new_mem_buf(pem.data(), static_cast<int>(pem.size())));
  while (X509* one = PEM_read_bio_X509(bio.get(), nullptr, nullptr, nullptr)) {
    if (sk_X509_push(stack.get(), one) <= 0) X509_free(one);
  }
  ERR_clear_error();
  return stack;
}

Status check_chain(X509* certificate, const CredentialFiles& files, const Credentials& read,
                   CertificateRole role) {
  const CertificateStack trusted = parse_all(read.ca_pem);
  const CertificateStack between = parse_all(read.certificate_pem);
  const CertificateStore store(X509_STORE_new());
  const StoreContext context(X509_STORE_CTX_new());
  if (trusted == nullptr || between == nullptr || store == nullptr || context == nullptr) {
    return openssl_status(ErrorCode::kOutOfMemory, "cannot check the certificate");
  }
  if (sk_X509_num(trusted.get()) == 0) {
    return Status(ErrorCode::kCorrupt, "there is no certificate of an authority in the file",
                  "It is the ca.pem beside the certificate that smartinf certificates made.",
                  ErrorPlace{files.ca, {}, {}, 0});
  }
  for (int i = 0; i < sk_X509_num(trusted.get()); ++i) {
    X509_STORE_add_cert(store.get(), sk_X509_value(trusted.get(), i));
  }
  X509_STORE_CTX_init(context.get(), store.get(), certificate, between.get());
  X509_STORE_CTX_set_purpose(context.get(), role == CertificateRole::kServer
                                                ? X509_PURPOSE_SSL_SERVER
                                                : X509_PURPOSE_SSL_CLIENT);
  if (X509_verify_cert(context.get()) == 1) return Status();
  ERR_clear_error();
  const int error = X509_STORE_CTX_get_error(context.get());
  const bool own = X509_STORE_CTX_get_error_depth(context.get()) == 0;
  const X509* about = own ? certificate : X509_STORE_CTX_get_current_cert(context.get());
  const std::string of =
      own ? "the certificate of " + read.facts.name : "the authority's certificate";
  const ErrorPlace place{own ? files.certificate : files.ca, {}, {}, 0};
  switch (error) {
    case X509_V_ERR_CERT_HAS_EXPIRED:
      return Status(ErrorCode::kFailedPrecondition,
                    of + " expired on " + utc_text(seconds_of(X509_get0_notAfter(about))),
                    "Make a new one with smartinf certificates.", place);
    case X509_V_ERR_CERT_NOT_YET_VALID:
      return Status(ErrorCode::kFailedPrecondition,
                    of + " is valid from " + utc_text(seconds_of(X509_get0_notBefore(about))),
                    "Is this machine's clock right?", place);
    case X509_V_ERR_INVALID_PURPOSE:
      return Status(ErrorCode::kMismatch,
                    fmt::format("{} is not for a {}", of, certificate_role_name(role)),
                    fmt::format("smartinf certificates --{} NAME makes one that is.",
                                certificate_role_name(role)),
                    place);
    case X509_V_ERR_UNABLE_TO_GET_ISSUER_CERT:
    case X509_V_ERR_UNABLE_TO_GET_ISSUER_CERT_LOCALLY:
    case X509_V_ERR_UNABLE_TO_VERIFY_LEAF_SIGNATURE:
    case X509_V_ERR_CERT_SIGNATURE_FAILURE:
    case X509_V_ERR_DEPTH_ZERO_SELF_SIGNED_CERT:
    case X509_V_ERR_SELF_SIGNED_CERT_IN_CHAIN:
      return Status(ErrorCode::kMismatch,
                    fmt::format("{} was not issued by the authority in {}", of, files.ca),
                    "Use the ca.pem and the certificate.pem of one folder.",
                    ErrorPlace{files.certificate, {}, {}, 0});
    default:
      return Status(ErrorCode::kMismatch,
                    fmt::format("{} cannot be used: {}", of, X509_verify_cert_error_string(error)),
                    {}, place);
  }
}

}  // namespace

Result<Credentials> read_credentials(const CredentialFiles& files, CertificateRole role) {
  Credentials read;
  SI_ASSIGN_OR_RETURN(
      read.certificate_pem,
      base::read_text_file(files.certificate, "cannot read the certificate", kPemBytesMax));
  SI_RETURN_IF_ERROR(check_key_mode(files.key));
  SI_ASSIGN_OR_RETURN(read.key_pem,
                      base::read_text_file(files.key, "cannot read the private key", kPemBytesMax));
  SI_ASSIGN_OR_RETURN(
      read.ca_pem,
      base::read_text_file(files.ca, "cannot read the authority's certificate", kPemBytesMax));
  SI_ASSIGN_OR_RETURN(const Certificate certificate, read_certificate(files.certificate));
  read.facts = facts_of(certificate.get());
  const PrivateKey key = parse_key(read.key_pem);
  if (key == nullptr) {
    return Status(ErrorCode::kCorrupt, "there is no private key in the file",
                  "It must be a key in PEM form without a password.",
                  ErrorPlace{files.key, {}, {}, 0});
  }
  if (X509_check_private_key(certificate.get(), key.get()) != 1) {
    ERR_clear_error();
    return Status(ErrorCode::kMismatch,
                  fmt::format("this is not the key of the certificate {}", files.certificate),
                  "Use the key.pem and the certificate.pem of one folder.",
                  ErrorPlace{files.key, {}, {}, 0});
  }
  SI_RETURN_IF_ERROR(check_chain(certificate.get(), files, read, role));
  return read;
}

}  // namespace smartinf::serve
