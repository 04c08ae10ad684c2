#include <array>
#include <mutex>

#include <openssl/err.h>
#include <sys/stat.h>

#include "smartinf/base/file.h"
#include "smartinf/base/log.h"
#include "smartinf/serve/certificates/openssl_parts.h"

namespace smartinf::serve {

using base::ErrorCode;
using base::ErrorPlace;
using base::Result;
using base::Status;

namespace {

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
    const ErrorPlace place{path_, {}, {}, 0};
    Crl crl = parse_crl(text);
    if (crl == nullptr) {
      return Status(ErrorCode::kCorrupt, "there is no list of revoked certificates in the file",
                    "It is the revoked.crl in the certificate authority's folder.", place);
    }
    if (X509_CRL_verify(crl.get(), X509_get0_pubkey(ca_.get())) != 1) {
      ERR_clear_error();
      return Status(ErrorCode::kMismatch,
                    "this list of revoked certificates is not of the server's authority",
                    "Copy revoked.crl from the folder of the authority that issued ca.pem.", place);
    }
    crl_ = std::move(crl);
    return Status();
  }

  bool is_revoked(std::string_view certificate_pem) override {
    const Certificate certificate = parse_certificate(certificate_pem);
    return certificate == nullptr || is_listed(X509_get_serialNumber(certificate.get()));
  }

  bool is_serial_revoked(const std::string& serial) override {
    if (serial.empty() || serial.size() > 64 ||
        serial.find_first_not_of("0123456789abcdefABCDEF") != std::string::npos) {
      return true;
    }
    BIGNUM* number = nullptr;
    BN_hex2bn(&number, serial.c_str());
    const Number owner(number);
    const Serial parsed(BN_to_ASN1_INTEGER(number, nullptr));
    return parsed == nullptr || is_listed(parsed.get());
  }

  uint64_t size() const override {
    const std::lock_guard hold(mutex_);
    const int count = sk_X509_REVOKED_num(X509_CRL_get_REVOKED(crl_.get()));
    return count < 0 ? 0 : static_cast<uint64_t>(count);
  }

 private:
  using Serial = std::unique_ptr<ASN1_INTEGER, OpensslFree<ASN1_INTEGER_free>>;

  bool is_listed(ASN1_INTEGER* serial) {
    const std::lock_guard hold(mutex_);
    if (look_at(path_) != look_) {
      if (const Status status = read(); !status.ok()) {
        base::log(base::LogLevel::kWarning,
                  status.to_string() + " The list that was read before is used on.");
      }
    }
    X509_REVOKED* revoked = nullptr;
    // 2: taken off again, which only another tool's lists say.
    return X509_CRL_get0_by_serial(crl_.get(), &revoked, serial) == 1;
  }

  const std::string path_;
  const Certificate ca_;
  mutable std::mutex mutex_;  // of what follows
  FileLook look_{};
  Crl crl_;
};

}  // namespace

Result<std::unique_ptr<RevocationList>> RevocationList::open(const std::string& crl_path,
                                                             const std::string& ca_path) {
  SI_ASSIGN_OR_RETURN(Certificate ca, read_certificate(ca_path));
  auto list = std::make_unique<FileRevocationList>(crl_path, std::move(ca));
  SI_RETURN_IF_ERROR(list->read());
  return std::unique_ptr<RevocationList>(std::move(list));
}

}  // namespace smartinf::serve
