#include <algorithm>
#include <array>
#include <cerrno>
#include <ctime>
#include <filesystem>
#include <initializer_list>

#include <arpa/inet.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <openssl/crypto.h>
#include <openssl/ec.h>
#include <openssl/pem.h>
#include <openssl/rand.h>
#include <sys/file.h>
#include <sys/stat.h>

#include "smartinf/base/file.h"
#include "smartinf/serve/certificates/openssl_parts.h"
#include "smartinf/storage/file_descriptor.h"

namespace smartinf::serve {

using base::ErrorCode;
using base::ErrorPlace;
using base::Result;
using base::Status;
using storage::FileDescriptor;

namespace fs = std::filesystem;

namespace {

constexpr int64_t kDay = 86400;
/// Clocks of two machines differ: what was issued just now is valid a little longer already.
constexpr int64_t kClockDifference = 300;
/// Of a folder that is being made; what a process that died has left is removed.
constexpr char kMaking[] = ".making";

struct NewFile {
  std::string name;
  std::string text;
  uint32_t mode;
};

Status broken(const std::string& what) {
  return openssl_status(ErrorCode::kIo, "cannot make a certificate: " + what);
}

Status sync_folder(const fs::path& folder) {
  const FileDescriptor opened(::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (opened.is_open() && ::fsync(opened.get()) == 0) return Status();
  return base::errno_status(errno, "cannot make the folder durable", folder.string());
}

Status make_folder(const fs::path& folder) {
  if (::mkdir(folder.c_str(), 0700) == 0 || errno == EEXIST) return Status();
  return base::errno_status(errno, "cannot make the folder", folder.string());
}

/// The folder with its files appears at once, or not at all.
Status put_folder(const fs::path& top, const fs::path& folder,
                  std::initializer_list<NewFile> files) {
  const fs::path making = top / kMaking;
  std::error_code error;
  fs::remove_all(making, error);
  SI_RETURN_IF_ERROR(make_folder(making));
  for (const NewFile& file : files) {
    SI_RETURN_IF_ERROR(base::write_text_file((making / file.name).string(), file.text,
                                             "cannot write the file", file.mode));
  }
  if (::rename(making.c_str(), folder.c_str()) != 0) {
    return base::errno_status(errno, "cannot put the folder in place", folder.string());
  }
  return sync_folder(folder.parent_path());
}

std::string pem_of(const Bio& bio) {
  char* data = nullptr;
  const long length = BIO_get_mem_data(bio.get(), &data);
  return {data, static_cast<size_t>(std::max(length, 0L))};
}

std::string pem_text(X509* certificate) {
  const Bio bio(BIO_new(BIO_s_mem()));
  return PEM_write_bio_X509(bio.get(), certificate) == 1 ? pem_of(bio) : std::string();
}

std::string pem_text(EVP_PKEY* key) {
  const Bio bio(BIO_new(BIO_s_secmem()));
  const int written =
      PEM_write_bio_PrivateKey(bio.get(), key, nullptr, nullptr, 0, nullptr, nullptr);
  return written == 1 ? pem_of(bio) : std::string();
}

std::string pem_text(X509_CRL* crl) {
  const Bio bio(BIO_new(BIO_s_mem()));
  return PEM_write_bio_X509_CRL(bio.get(), crl) == 1 ? pem_of(bio) : std::string();
}

bool set_time(ASN1_TIME* time, int64_t seconds) {
  return ASN1_TIME_set(time, static_cast<time_t>(seconds)) != nullptr;
}

/// 128 bits, of which the first is set: 32 digits always.
bool set_random_serial(X509* certificate) {
  const Number number(BN_new());
  return number != nullptr &&
         BN_rand(number.get(), 128, BN_RAND_TOP_ONE, BN_RAND_BOTTOM_ANY) == 1 &&
         BN_to_ASN1_INTEGER(number.get(), X509_get_serialNumber(certificate)) != nullptr;
}

bool set_common_name(X509* certificate, const std::string& name) {
  return X509_NAME_add_entry_by_txt(X509_get_subject_name(certificate), "CN", MBSTRING_UTF8,
                                    reinterpret_cast<const unsigned char*>(name.data()),
                                    static_cast<int>(name.size()), -1, 0) == 1;
}

/// `value` is OpenSSL's text for the extension, never a user's.
bool add_extension(X509* certificate, X509* issuer, int nid, const char* value) {
  X509V3_CTX context;
  X509V3_set_ctx_nodb(&context);
  X509V3_set_ctx(&context, issuer, certificate, nullptr, nullptr, 0);
  const std::unique_ptr<X509_EXTENSION, OpensslFree<X509_EXTENSION_free>> extension(
      X509V3_EXT_conf_nid(nullptr, &context, nid, value));
  return extension != nullptr && X509_add_ext(certificate, extension.get(), -1) == 1;
}

bool add_name(GENERAL_NAMES* names, int type, std::string_view bytes) {
  std::unique_ptr<GENERAL_NAME, OpensslFree<GENERAL_NAME_free>> name(GENERAL_NAME_new());
  ASN1_STRING* text =
      ASN1_STRING_type_new(type == GEN_IPADD ? V_ASN1_OCTET_STRING : V_ASN1_IA5STRING);
  if (name == nullptr || text == nullptr ||
      ASN1_STRING_set(text, bytes.data(), static_cast<int>(bytes.size())) != 1) {
    ASN1_STRING_free(text);
    return false;
  }
  GENERAL_NAME_set0_value(name.get(), type, text);
  if (sk_GENERAL_NAME_push(names, name.get()) <= 0) return false;
  (void)name.release();
  return true;
}

/// A client's is a URI, which no host name that is looked for can be.
bool add_names(X509* certificate, const CertificateRequest& request,
               const std::vector<std::string>& addresses) {
  const std::unique_ptr<GENERAL_NAMES, OpensslFree<GENERAL_NAMES_free>> names(
      sk_GENERAL_NAME_new_null());
  if (names == nullptr) return false;
  if (request.role == CertificateRole::kClient &&
      !add_name(names.get(), GEN_URI, "smartinf:client:" + request.name)) {
    return false;
  }
  for (const std::string& address : addresses) {
    std::array<char, 16> bytes{};
    bool added = false;
    if (::inet_pton(AF_INET, address.c_str(), bytes.data()) == 1) {
      added = add_name(names.get(), GEN_IPADD, {bytes.data(), 4});
    } else if (::inet_pton(AF_INET6, address.c_str(), bytes.data()) == 1) {
      added = add_name(names.get(), GEN_IPADD, {bytes.data(), 16});
    } else {
      added = add_name(names.get(), GEN_DNS, address);
    }
    if (!added) return false;
  }
  return X509_add1_ext_i2d(certificate, NID_subject_alt_name, names.get(), 0, 0) == 1;
}

PrivateKey new_key() { return PrivateKey(EVP_EC_gen("P-256")); }

}  // namespace

struct CertificateAuthority::Parts {
  fs::path folder;
  FileDescriptor lock;
  PrivateKey key;
  Certificate certificate;
  Crl crl;
  bool made = false;

  fs::path crl_path() const { return folder / "revoked.crl"; }
  fs::path key_path() const { return folder / "ca" / "key.pem"; }
  fs::path certificate_path() const { return folder / "ca" / "certificate.pem"; }

  Status take_folder(bool make);
  Status make();
  Status read();
  /// The list with its next number, signed.
  Status write_crl();
  std::optional<int64_t> revoked_s(X509* issued) const;
  Result<std::vector<Certificate>> issued() const;
};

CertificateAuthority::CertificateAuthority(std::unique_ptr<Parts> parts)
    : parts_(std::move(parts)) {}
CertificateAuthority::CertificateAuthority(CertificateAuthority&&) noexcept = default;
CertificateAuthority& CertificateAuthority::operator=(CertificateAuthority&&) noexcept = default;
CertificateAuthority::~CertificateAuthority() = default;

bool CertificateAuthority::made() const { return parts_->made; }
int64_t CertificateAuthority::until_s() const {
  return seconds_of(X509_get0_notAfter(parts_->certificate.get()));
}
std::string CertificateAuthority::folder_of(CertificateRole role, const std::string& name) const {
  const char* kind = role == CertificateRole::kServer ? "servers" : "clients";
  return (parts_->folder / kind / name).string();
}

Status CertificateAuthority::Parts::take_folder(bool make) {
  const ErrorPlace place{folder.string(), {}, {}, 0};
  if (make) SI_RETURN_IF_ERROR(make_folder(folder));
  lock = FileDescriptor(::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!lock.is_open()) {
    return base::errno_status(errno, "cannot open the certificate authority's folder",
                              folder.string());
  }
  struct stat entry {};
  if (::fstat(lock.get(), &entry) != 0) {
    return base::errno_status(errno, "cannot look at the folder", folder.string());
  }
  if ((entry.st_mode & 077) != 0) {
    return Status(ErrorCode::kFailedPrecondition,
                  "the folder is open to others, and whoever has its key can connect as anybody",
                  "Choose a folder that does not exist yet, or close this one: chmod 700.", place);
  }
  if (::flock(lock.get(), LOCK_EX | LOCK_NB) != 0) {
    return Status(ErrorCode::kBusy, "another process is using this certificate authority",
                  "Wait until it has ended.", place);
  }
  std::error_code error;
  fs::remove_all(folder / kMaking, error);
  if (fs::exists(folder / "ca", error)) return Status();
  if (!make) {
    return Status(ErrorCode::kNotFound, "there is no certificate authority in the folder",
                  "smartinf certificates --ca DIR --server NAME --client NAME makes one.", place);
  }
  // Without the authority only what a process that died while making one may have left is there.
  for (const auto& found : fs::directory_iterator(folder, error)) {
    const std::string name = found.path().filename().string();
    if (name == "issued" || name == "servers" || name == "clients" || name == "revoked.crl")
      continue;
    return Status(ErrorCode::kFailedPrecondition,
                  "the folder holds other things, and no certificate authority",
                  "Choose a folder that is empty or does not exist yet.", place);
  }
  return Status();
}

Status CertificateAuthority::Parts::make() {
  key = new_key();
  certificate.reset(X509_new());
  X509* made_here = certificate.get();
  const int64_t now = ::time(nullptr);
  if (key == nullptr || made_here == nullptr || X509_set_version(made_here, X509_VERSION_3) != 1 ||
      !set_random_serial(made_here)) {
    return broken("the authority's key");
  }
  // Part of the name, so that two authorities are told apart.
  const std::string serial = serial_text(X509_get0_serialNumber(made_here));
  const bool good =
      set_common_name(made_here, "smartinf authority " + serial.substr(0, 8)) &&
      X509_set_issuer_name(made_here, X509_get_subject_name(made_here)) == 1 &&
      set_time(X509_getm_notBefore(made_here), now - kClockDifference) &&
      set_time(X509_getm_notAfter(made_here), now + kAuthorityDays * kDay) &&
      X509_set_pubkey(made_here, key.get()) == 1 &&
      add_extension(made_here, made_here, NID_basic_constraints, "critical,CA:TRUE,pathlen:0") &&
      add_extension(made_here, made_here, NID_key_usage, "critical,keyCertSign,cRLSign") &&
      add_extension(made_here, made_here, NID_subject_key_identifier, "hash") &&
      X509_sign(made_here, key.get(), EVP_sha256()) > 0;
  if (!good) return broken("the authority's certificate");

  for (const char* name : {"issued", "servers", "clients"}) {
    SI_RETURN_IF_ERROR(make_folder(folder / name));
  }
  crl.reset(X509_CRL_new());
  if (crl == nullptr || X509_CRL_set_version(crl.get(), X509_CRL_VERSION_2) != 1 ||
      X509_CRL_set_issuer_name(crl.get(), X509_get_subject_name(made_here)) != 1) {
    return broken("the list of revoked certificates");
  }
  SI_RETURN_IF_ERROR(write_crl());
  std::string key_text = pem_text(key.get());
  const Status put =
      put_folder(folder, folder / "ca",
                 {{"key.pem", key_text, 0600}, {"certificate.pem", pem_text(made_here), 0644}});
  OPENSSL_cleanse(key_text.data(), key_text.size());
  made = put.ok();
  return put;
}

Status CertificateAuthority::Parts::read() {
  std::error_code error;
  SI_ASSIGN_OR_RETURN(certificate, read_certificate(certificate_path().string()));
  SI_ASSIGN_OR_RETURN(
      std::string text,
      base::read_text_file(key_path().string(), "cannot read the certificate authority's key",
                           kPemBytesMax));
  key = parse_key(text);
  OPENSSL_cleanse(text.data(), text.size());
  if (key == nullptr || X509_check_private_key(certificate.get(), key.get()) != 1) {
    return openssl_status(ErrorCode::kCorrupt, "this is not the key of the authority's certificate",
                          "Bring back both files of the folder from one copy.",
                          key_path().string());
  }
  SI_ASSIGN_OR_RETURN(
      const std::string list,
      base::read_text_file(crl_path().string(), "cannot read the list of revoked certificates",
                           kCrlBytesMax));
  crl = parse_crl(list);
  if (crl == nullptr || X509_CRL_verify(crl.get(), key.get()) != 1) {
    return openssl_status(
        ErrorCode::kCorrupt, "this is not the authority's list of revoked certificates",
        "Bring it back from a copy, for example from a server.", crl_path().string());
  }
  return Status();
}

Status CertificateAuthority::Parts::write_crl() {
  const std::unique_ptr<ASN1_INTEGER, OpensslFree<ASN1_INTEGER_free>> before(
      static_cast<ASN1_INTEGER*>(
          X509_CRL_get_ext_d2i(crl.get(), NID_crl_number, nullptr, nullptr)));
  const long number = before == nullptr ? 1 : ASN1_INTEGER_get(before.get()) + 1;
  const std::unique_ptr<ASN1_INTEGER, OpensslFree<ASN1_INTEGER_free>> next(ASN1_INTEGER_new());
  const Time now(ASN1_TIME_set(nullptr, ::time(nullptr)));
  // It is valid until a newer one comes: as long as the authority.
  const bool good =
      next != nullptr && now != nullptr && ASN1_INTEGER_set(next.get(), number) == 1 &&
      X509_CRL_add1_ext_i2d(crl.get(), NID_crl_number, next.get(), 0, X509V3_ADD_REPLACE) == 1 &&
      X509_CRL_set1_lastUpdate(crl.get(), now.get()) == 1 &&
      X509_CRL_set1_nextUpdate(crl.get(), X509_get0_notAfter(certificate.get())) == 1 &&
      X509_CRL_sort(crl.get()) == 1 && X509_CRL_sign(crl.get(), key.get(), EVP_sha256()) > 0;
  if (!good) return broken("the list of revoked certificates");
  return base::write_text_file(crl_path().string(), pem_text(crl.get()),
                               "cannot write the list of revoked certificates", 0644);
}

std::optional<int64_t> CertificateAuthority::Parts::revoked_s(X509* issued) const {
  X509_REVOKED* revoked = nullptr;
  if (X509_CRL_get0_by_cert(crl.get(), &revoked, issued) != 1) return std::nullopt;
  return seconds_of(X509_REVOKED_get0_revocationDate(revoked));
}

Result<std::vector<Certificate>> CertificateAuthority::Parts::issued() const {
  std::vector<Certificate> found;
  std::error_code error;
  for (const auto& file : fs::directory_iterator(folder / "issued", error)) {
    if (file.path().extension() != ".pem") continue;
    SI_ASSIGN_OR_RETURN(Certificate one, read_certificate(file.path().string()));
    found.push_back(std::move(one));
  }
  if (error) {
    return base::errno_status(error.value(), "cannot list the certificates",
                              (folder / "issued").string());
  }
  return found;
}

Result<CertificateAuthority> CertificateAuthority::open(const std::string& folder) {
  CertificateAuthority authority(std::make_unique<Parts>());
  authority.parts_->folder = folder;
  SI_RETURN_IF_ERROR(authority.parts_->take_folder(false));
  SI_RETURN_IF_ERROR(authority.parts_->read());
  return authority;
}

Result<CertificateAuthority> CertificateAuthority::open_or_make(const std::string& folder) {
  CertificateAuthority authority(std::make_unique<Parts>());
  authority.parts_->folder = folder;
  SI_RETURN_IF_ERROR(authority.parts_->take_folder(true));
  std::error_code error;
  const bool there = fs::exists(authority.parts_->folder / "ca", error);
  SI_RETURN_IF_ERROR(there ? authority.parts_->read() : authority.parts_->make());
  return authority;
}

Result<CertificateFacts> CertificateAuthority::issue(const CertificateRequest& request) {
  SI_RETURN_IF_ERROR(check_certificate_name(request.role, request.name));
  std::vector<std::string> addresses;
  if (request.role == CertificateRole::kServer) addresses.push_back(request.name);
  for (const std::string& address : request.addresses) {
    SI_RETURN_IF_ERROR(check_certificate_name(CertificateRole::kServer, address));
    addresses.push_back(address);
  }
  if (request.role == CertificateRole::kClient && !addresses.empty()) {
    return Status(ErrorCode::kInvalidArgument, "a client's certificate has no addresses",
                  "Nobody connects to a client: leave --address out.");
  }
  if (request.days < 1 || request.days > kAuthorityDays) {
    return Status(ErrorCode::kInvalidArgument,
                  fmt::format("a certificate of {} days", request.days),
                  fmt::format("Choose 1 to {} days.", kAuthorityDays));
  }
  const int64_t now = ::time(nullptr);
  if (until_s() <= now) {
    return Status(ErrorCode::kFailedPrecondition,
                  "the certificate authority itself expired on " + utc_text(until_s()),
                  "Make a new one in another folder, and new certificates of all machines.",
                  ErrorPlace{parts_->folder.string(), {}, {}, 0});
  }
  const fs::path target = folder_of(request.role, request.name);
  std::error_code error;
  if (fs::exists(fs::symlink_status(target, error))) {
    return Status(ErrorCode::kAlreadyExists,
                  fmt::format("the {} {} has a certificate already",
                              certificate_role_name(request.role), request.name),
                  "Remove its folder to make a new one; the old certificate stays valid until it "
                  "expires or is revoked (--revoke).",
                  ErrorPlace{target.string(), {}, {}, 0});
  }

  const PrivateKey key = new_key();
  const Certificate made_here(X509_new());
  X509* issued = made_here.get();
  X509* issuer = parts_->certificate.get();
  const int64_t from = request.from_s != 0 ? request.from_s : now - kClockDifference;
  const int64_t until = std::min(from + request.days * kDay, until_s());
  const char* usage = request.role == CertificateRole::kServer ? "serverAuth" : "clientAuth";
  // A common name has room for 64 characters; what clients look at is the list of names.
  const bool good =
      key != nullptr && issued != nullptr && X509_set_version(issued, X509_VERSION_3) == 1 &&
      set_random_serial(issued) && set_common_name(issued, request.name.substr(0, 64)) &&
      X509_set_issuer_name(issued, X509_get_subject_name(issuer)) == 1 &&
      set_time(X509_getm_notBefore(issued), from) && set_time(X509_getm_notAfter(issued), until) &&
      X509_set_pubkey(issued, key.get()) == 1 &&
      add_extension(issued, issuer, NID_basic_constraints, "critical,CA:FALSE") &&
      add_extension(issued, issuer, NID_key_usage, "critical,digitalSignature") &&
      add_extension(issued, issuer, NID_ext_key_usage, usage) &&
      add_extension(issued, issuer, NID_subject_key_identifier, "hash") &&
      add_extension(issued, issuer, NID_authority_key_identifier, "keyid:always") &&
      add_names(issued, request, addresses) &&
      X509_sign(issued, parts_->key.get(), EVP_sha256()) > 0;
  if (!good) return broken("of " + request.name);

  // In the list first: a certificate that is out can always be revoked.
  const CertificateFacts facts = facts_of(issued);
  const std::string text = pem_text(issued);
  SI_RETURN_IF_ERROR(
      base::write_text_file((parts_->folder / "issued" / (facts.serial + ".pem")).string(), text,
                            "cannot write the certificate", 0644));
  std::string key_text = pem_text(key.get());
  const Status put = put_folder(parts_->folder, target,
                                {{"key.pem", key_text, 0600},
                                 {"certificate.pem", text, 0644},
                                 {"ca.pem", pem_text(issuer), 0644}});
  OPENSSL_cleanse(key_text.data(), key_text.size());
  if (!put.ok()) return put;
  return facts;
}

Result<std::vector<CertificateFacts>> CertificateAuthority::issued() const {
  SI_ASSIGN_OR_RETURN(const std::vector<Certificate> certificates, parts_->issued());
  std::vector<CertificateFacts> all;
  for (const Certificate& one : certificates) {
    all.push_back(facts_of(one.get()));
    all.back().revoked_s = parts_->revoked_s(one.get());
  }
  std::ranges::sort(all, [](const CertificateFacts& a, const CertificateFacts& b) {
    return std::tie(a.from_s, a.name, a.serial) < std::tie(b.from_s, b.name, b.serial);
  });
  return all;
}

Result<std::vector<CertificateFacts>> CertificateAuthority::revoke(
    const std::string& name_or_serial) {
  SI_ASSIGN_OR_RETURN(const std::vector<Certificate> certificates, parts_->issued());
  std::vector<CertificateFacts> added;
  uint64_t found = 0;
  for (const Certificate& one : certificates) {
    CertificateFacts facts = facts_of(one.get());
    if (facts.name != name_or_serial && facts.serial != name_or_serial) continue;
    ++found;
    if (parts_->revoked_s(one.get())) continue;
    std::unique_ptr<X509_REVOKED, OpensslFree<X509_REVOKED_free>> entry(X509_REVOKED_new());
    const Time now(ASN1_TIME_set(nullptr, ::time(nullptr)));
    const bool good =
        entry != nullptr && now != nullptr &&
        X509_REVOKED_set_serialNumber(entry.get(), X509_get_serialNumber(one.get())) == 1 &&
        X509_REVOKED_set_revocationDate(entry.get(), now.get()) == 1 &&
        X509_CRL_add0_revoked(parts_->crl.get(), entry.get()) == 1;
    if (!good) return broken("the list of revoked certificates");
    (void)entry.release();
    facts.revoked_s = seconds_of(now.get());
    added.push_back(std::move(facts));
  }
  const ErrorPlace place{parts_->folder.string(), {}, {}, 0};
  if (found == 0) {
    return Status(ErrorCode::kNotFound, "no certificate was issued to " + name_or_serial,
                  "See smartinf certificates --ca DIR --list for names and serial numbers.", place);
  }
  if (added.empty()) {
    return Status(ErrorCode::kAlreadyExists, name_or_serial + " is revoked already", {}, place);
  }
  SI_RETURN_IF_ERROR(parts_->write_crl());
  return added;
}

}  // namespace smartinf::serve
