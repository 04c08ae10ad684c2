#include <algorithm>
#include <array>
#include <ctime>
#include <mutex>
#include <utility>

#include <fmt/chrono.h>
#include <openssl/err.h>
#include <openssl/pem.h>
#include <openssl/x509v3.h>
#include <sys/stat.h>

#include "smartinf/base/file.h"
#include "smartinf/base/log.h"
#include "smartinf/serve/certificates/certificates.h"

namespace smartinf::serve {

using base::ErrorCode;
using base::ErrorPlace;
using base::Result;
using base::Status;

namespace {

template <auto kFree>
struct OpensslFree {
  template <typename T>
  void operator()(T* object) const {
    kFree(object);
  }
};
using Bio = std::unique_ptr<BIO, OpensslFree<BIO_free_all>>;
using PrivateKey = std::unique_ptr<EVP_PKEY, OpensslFree<EVP_PKEY_free>>;
using Certificate = std::unique_ptr<X509, OpensslFree<X509_free>>;
using Crl = std::unique_ptr<X509_CRL, OpensslFree<X509_CRL_free>>;
using CertificateStore = std::unique_ptr<X509_STORE, OpensslFree<X509_STORE_free>>;
using StoreContext = std::unique_ptr<X509_STORE_CTX, OpensslFree<X509_STORE_CTX_free>>;
struct FreeStack {
  void operator()(STACK_OF(X509) * stack) const { sk_X509_pop_free(stack, X509_free); }
};
using CertificateStack = std::unique_ptr<STACK_OF(X509), FreeStack>;

/// No file that is read here is longer.
constexpr uint64_t kPemBytesMax = uint64_t{1} << 20;
constexpr uint64_t kCrlBytesMax = uint64_t{16} << 20;

Status problem(ErrorCode code, std::string what, std::string advice, const std::string& path) {
  return Status(code, std::move(what), std::move(advice), ErrorPlace{path, {}, {}, 0});
}

// A key with a password is not asked for it: a server starts without anybody at the keyboard.
int no_password(char*, int, int, void*) { return -1; }

/// The first block of PEM text; null where it is none such.
template <typename Owner, auto kRead>
Owner parse(std::string_view pem) {
  if (pem.size() > kCrlBytesMax) return nullptr;
  const Bio bio(BIO_new_mem_buf(pem.data(), static_cast<int>(pem.size())));
  Owner parsed(kRead(bio.get(), nullptr, no_password, nullptr));
  ERR_clear_error();
  return parsed;
}
constexpr auto parse_certificate = parse<Certificate, PEM_read_bio_X509>;

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

std::string common_name(X509* certificate) {
  const X509_NAME* subject = X509_get_subject_name(certificate);
  const int at = X509_NAME_get_index_by_NID(subject, NID_commonName, -1);
  if (at < 0) return {};
  const ASN1_STRING* text = X509_NAME_ENTRY_get_data(X509_NAME_get_entry(subject, at));
  return {reinterpret_cast<const char*>(ASN1_STRING_get0_data(text)),
          static_cast<size_t>(ASN1_STRING_length(text))};
}

int64_t seconds_of(const ASN1_TIME* time) {
  std::tm calendar{};
  return ASN1_TIME_to_tm(time, &calendar) == 1 ? ::timegm(&calendar) : 0;
}

std::string utc_text(const ASN1_TIME* time) {
  return fmt::format("{:%Y-%m-%d %H:%M} UTC",
                     fmt::gmtime(static_cast<std::time_t>(seconds_of(time))));
}

Status check_chain(X509* certificate, const std::string& name, const CredentialFiles& files,
                   const std::string& certificate_pem, const std::string& ca_pem,
                   CertificateRole role) {
  const CertificateStack trusted = parse_all(ca_pem);
  const CertificateStack between = parse_all(certificate_pem);
  const CertificateStore store(X509_STORE_new());
  const StoreContext context(X509_STORE_CTX_new());
  if (trusted == nullptr || between == nullptr || store == nullptr || context == nullptr) {
    return Status(ErrorCode::kOutOfMemory, "cannot check the certificate");
  }
  if (sk_X509_num(trusted.get()) == 0) {
    return problem(ErrorCode::kCorrupt, "there is no certificate of an authority in the file",
                   "It is the ca.pem beside the certificate that smartinf certificates made.",
                   files.ca);
  }
  for (int i = 0; i < sk_X509_num(trusted.get()); ++i) {
    X509_STORE_add_cert(store.get(), sk_X509_value(trusted.get(), i));
  }
  const bool server = role == CertificateRole::kServer;
  X509_STORE_CTX_init(context.get(), store.get(), certificate, between.get());
  X509_STORE_CTX_set_purpose(context.get(),
                             server ? X509_PURPOSE_SSL_SERVER : X509_PURPOSE_SSL_CLIENT);
  if (X509_verify_cert(context.get()) == 1) return Status();
  ERR_clear_error();
  const int error = X509_STORE_CTX_get_error(context.get());
  const bool own = X509_STORE_CTX_get_error_depth(context.get()) == 0;
  const X509* about = own ? certificate : X509_STORE_CTX_get_current_cert(context.get());
  const std::string of = own ? "the certificate of " + name : "the authority's certificate";
  const std::string& file = own ? files.certificate : files.ca;
  const char* side = server ? "server" : "client";
  switch (error) {
    case X509_V_ERR_CERT_HAS_EXPIRED:
      return problem(ErrorCode::kFailedPrecondition,
                     of + " expired on " + utc_text(X509_get0_notAfter(about)),
                     "Make a new one with smartinf certificates.", file);
    case X509_V_ERR_CERT_NOT_YET_VALID:
      return problem(ErrorCode::kFailedPrecondition,
                     of + " is valid from " + utc_text(X509_get0_notBefore(about)),
                     "Is this machine's clock right?", file);
    case X509_V_ERR_INVALID_PURPOSE:
      return problem(ErrorCode::kMismatch, fmt::format("{} is not for a {}", of, side),
                     fmt::format("smartinf certificates --{} NAME makes one that is.", side), file);
    case X509_V_ERR_UNABLE_TO_GET_ISSUER_CERT:
    case X509_V_ERR_UNABLE_TO_GET_ISSUER_CERT_LOCALLY:
    case X509_V_ERR_UNABLE_TO_VERIFY_LEAF_SIGNATURE:
    case X509_V_ERR_CERT_SIGNATURE_FAILURE:
    case X509_V_ERR_DEPTH_ZERO_SELF_SIGNED_CERT:
    case X509_V_ERR_SELF_SIGNED_CERT_IN_CHAIN:
      return problem(ErrorCode::kMismatch,
                     fmt::format("{} was not issued by the authority in {}", of, files.ca),
                     "Use the ca.pem and the certificate.pem of one folder.", files.certificate);
    default:
      return problem(ErrorCode::kMismatch,
                     fmt::format("{} cannot be used: {}", of, X509_verify_cert_error_string(error)),
                     {}, file);
  }
}

/// Tells one writing of a file from another.
using FileLook = std::array<int64_t, 4>;

FileLook look_at(const std::string& path) {
  struct stat found {};
  if (::stat(path.c_str(), &found) != 0) return {};
  return {static_cast<int64_t>(found.st_ino), found.st_size, found.st_mtim.tv_sec,
          found.st_mtim.tv_nsec};
}

class FileRevocationList final : public RevocationList {
 public:
  FileRevocationList(std::string path, Certificate ca)
      : path_(std::move(path)), ca_(std::move(ca)) {}

  Status read() {
    look_ = look_at(path_);  // before: what is written meanwhile is read the next time
    SI_ASSIGN_OR_RETURN(
        const std::string text,
        base::read_text_file(path_, "cannot read the list of revoked certificates", kCrlBytesMax));
    Crl crl = parse<Crl, PEM_read_bio_X509_CRL>(text);
    if (crl == nullptr) {
      return problem(ErrorCode::kCorrupt, "there is no list of revoked certificates in the file",
                     "It is the revoked.crl in the certificate authority's folder.", path_);
    }
    if (X509_CRL_verify(crl.get(), X509_get0_pubkey(ca_.get())) != 1) {
      ERR_clear_error();
      return problem(ErrorCode::kMismatch,
                     "this list of revoked certificates is not of the server's authority",
                     "Copy revoked.crl from the folder of the authority that issued ca.pem.",
                     path_);
    }
    crl_ = std::move(crl);
    return Status();
  }

  bool is_revoked(std::string_view certificate_pem) override {
    const Certificate certificate = parse_certificate(certificate_pem);
    if (certificate == nullptr) return true;
    const std::lock_guard hold(mutex_);
    if (look_at(path_) != look_) {
      if (const Status status = read(); !status.ok()) {
        base::log(base::LogLevel::kWarning,
                  status.to_string() + " The list that was read before is used on.");
      }
    }
    X509_REVOKED* revoked = nullptr;
    // 2: taken off again, which only another tool's lists say.
    return X509_CRL_get0_by_serial(crl_.get(), &revoked,
                                   X509_get_serialNumber(certificate.get())) == 1;
  }

 private:
  const std::string path_;
  const Certificate ca_;
  std::mutex mutex_;  // of what follows
  FileLook look_{};
  Crl crl_;
};

Status no_certificate(const std::string& path) {
  return problem(ErrorCode::kCorrupt, "there is no certificate in the file",
                 "It must be a certificate in PEM form, as smartinf certificates makes them.",
                 path);
}

}  // namespace

/// A group that serves this one purpose is usual.
Status check_key_mode(const std::string& path) {
  struct stat entry {};
  if (::stat(path.c_str(), &entry) != 0) {
    return base::errno_status(errno, "cannot read the private key", path);
  }
  if ((entry.st_mode & 027) == 0) return Status();
  return problem(
      ErrorCode::kPermissionDenied,
      fmt::format("the private key is open to others (mode {:04o})", entry.st_mode & 07777),
      "Close it: chmod 600. If others could read it, revoke the certificate, too.", path);
}

Result<Credentials> read_credentials(const CredentialFiles& files, CertificateRole role) {
  SI_ASSIGN_OR_RETURN(
      const std::string certificate_pem,
      base::read_text_file(files.certificate, "cannot read the certificate", kPemBytesMax));
  SI_RETURN_IF_ERROR(check_key_mode(files.key));
  SI_ASSIGN_OR_RETURN(const std::string key_pem,
                      base::read_text_file(files.key, "cannot read the private key", kPemBytesMax));
  SI_ASSIGN_OR_RETURN(
      const std::string ca_pem,
      base::read_text_file(files.ca, "cannot read the authority's certificate", kPemBytesMax));
  const Certificate certificate = parse_certificate(certificate_pem);
  if (certificate == nullptr) return no_certificate(files.certificate);
  const PrivateKey key = parse<PrivateKey, PEM_read_bio_PrivateKey>(key_pem);
  if (key == nullptr) {
    return problem(ErrorCode::kCorrupt, "there is no private key in the file",
                   "It must be a key in PEM form without a password.", files.key);
  }
  if (X509_check_private_key(certificate.get(), key.get()) != 1) {
    ERR_clear_error();
    return problem(ErrorCode::kMismatch,
                   fmt::format("this is not the key of the certificate {}", files.certificate),
                   "Use the key.pem and the certificate.pem of one folder.", files.key);
  }
  Credentials read{common_name(certificate.get()),
                   seconds_of(X509_get0_notAfter(certificate.get()))};
  SI_RETURN_IF_ERROR(
      check_chain(certificate.get(), read.name, files, certificate_pem, ca_pem, role));
  return read;
}

Result<std::string> client_name(std::string_view certificate_pem) {
  const Certificate certificate = parse_certificate(certificate_pem);
  if (certificate == nullptr) {
    return Status(ErrorCode::kCorrupt, "this is no certificate in PEM form");
  }
  const auto wrong = [](const char* what) {
    return Status(ErrorCode::kPermissionDenied, what,
                  "smartinf certificates --client NAME makes one that is right.");
  };
  // Without the extension it is UINT32_MAX: for everything, which is more than was asked for.
  const uint32_t uses = X509_get_extended_key_usage(certificate.get());
  if (uses == UINT32_MAX || (uses & XKU_SSL_CLIENT) == 0) {
    return wrong("the certificate does not say that it is for clients (clientAuth)");
  }
  const X509_NAME* subject = X509_get_subject_name(certificate.get());
  const int first = X509_NAME_get_index_by_NID(subject, NID_commonName, -1);
  if (first < 0 || X509_NAME_get_index_by_NID(subject, NID_commonName, first) >= 0) {
    return wrong("the certificate has no common name, or more than one");
  }
  std::string name = common_name(certificate.get());
  const bool printable =
      std::ranges::none_of(name, [](unsigned char c) { return c < 0x20 || c == 0x7f; });
  if (name.empty() || name.size() > 64 || !printable) {
    return wrong("the certificate's common name is not a text of 1 to 64 bytes");
  }
  return name;
}

Result<std::unique_ptr<RevocationList>> RevocationList::open(const std::string& crl_path,
                                                             const std::string& ca_path) {
  SI_ASSIGN_OR_RETURN(const std::string pem,
                      base::read_text_file(ca_path, "cannot read the certificate", kPemBytesMax));
  Certificate ca = parse_certificate(pem);
  if (ca == nullptr) return no_certificate(ca_path);
  auto list = std::make_unique<FileRevocationList>(crl_path, std::move(ca));
  SI_RETURN_IF_ERROR(list->read());
  return std::unique_ptr<RevocationList>(std::move(list));
}

}  // namespace smartinf::serve
